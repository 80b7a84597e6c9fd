"""A stream's step while 1,000 other sessions are idle, against the same without them.

Idle with KV: forks of one session, resident on the device, so that the engine holds a cache for each but
their tokens once. Without: opened empty, known to the broker and the engine by name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from benchmarks.claims.single import drawn
from benchmarks.measurement import Measurement, compare
from benchmarks.peer import Run
from benchmarks.rig import DEMO, TOY, Model, Rig

from stateroom.client import Room, Session, connect
from stateroom.client.limits import FORKS_MAX

SESSIONS = 1000
ROUNDS = {DEMO: 5, TOY: 9}
TOKENS = {DEMO: 32, TOY: 256}
PROMPT = 128  # tokens of the stream's session, and of the one that is forked
LEAST = 0.98  # at most 1.02 times the time


def run(rig: Rig) -> list[Measurement]:
    models = [TOY] if rig.quick else [DEMO, TOY]
    return [made for model in models for made in _measure(rig, model)]


def _measure(rig: Rig, model: Model) -> list[Measurement]:
    sides = rig.sides(model)
    count = 100 if rig.quick else SESSIONS
    kinds: dict[str, Callable[[Room, int], list[Session]]] = {"with KV": _forks, "without KV": _empty}
    alone: list[Run] = []
    beside: dict[str, list[Run]] = {kind: [] for kind in kinds}
    with (
        sides.room.open(tokens=sides.prompt(PROMPT)) as session,
        closing(connect(sides.room.endpoint, app="idle")) as other,
    ):
        _step(session, TOKENS[model])  # nothing is timed that happens only once
        for _ in range(rig.rounds(ROUNDS[model])):
            alone.append(_step(session, TOKENS[model]))
            for kind, make in kinds.items():
                idle = make(other, count)
                beside[kind].append(_step(session, TOKENS[model]))
                for one in idle:
                    one.close()
    return [
        Measurement(
            claim=f"step beside {count:,} idle sessions {kind}, {model.name}",
            unit="ms",
            ours=tuple(1000 / run.tokens_per_s for run in runs),
            peer=tuple(1000 / run.tokens_per_s for run in alone),
            peer_name="the same without them",
            lower_is_better=True,
            least_ratio=LEAST if model == DEMO else None,
            tokens=compare(
                [run.tokens for run in runs], [run.tokens for run in alone], lambda *_: float("inf")
            ),
        )
        for kind, runs in beside.items()
    ]


def _step(session: Session, tokens: int) -> Run:
    length = session.length
    run = drawn(session, tokens, 0.0)
    session.trim(to=length)
    return run


def _forks(room: Room, count: int) -> list[Session]:
    parent = room.open(tokens=[i % 100 for i in range(PROMPT)])
    made = [parent]
    while len(made) < count:
        made += parent.fork(min(FORKS_MAX, count - len(made)))
    return made


def _empty(room: Room, count: int) -> list[Session]:
    return [room.open() for _ in range(count)]
