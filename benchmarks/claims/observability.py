"""What it costs to be looked at: a daemon with all of it on and all who may look, against one with none.

On: the page for Prometheus scraped each second, two `watch` with figures each second, sessions, requests and
figures asked for each second as `top` does, each request's spans recorded, the log at `info`. Off: nobody, no
recorder, the log at `error`. The rounds alternate, and the observers only look during theirs.

Speed varies from round to round by more than a hundredth on a machine with other work, and CPU time of a
worker for a token from one daemon to the next. That of the broker, who has nearly all of the work of being
looked at, hardly varies: it is shown as a part of the time in which the tokens were drawn.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from benchmarks.measurement import Measurement, compare
from benchmarks.observers import observers, turned
from benchmarks.rig import DEMO, TEXT, TOY, Model, Rig
from benchmarks.streams import draw

from stateroom.client import Room

STREAMS = 4
PAIRS = 4  # of daemons: one isn't quite as fast as the next one of the same kind
ROUNDS = 4  # of each pair, each of some seconds: several looks fall into it
TOKENS = {DEMO: 48, TOY: 1200}  # drawn by each stream
TRIES = 5
LEAST = 0.99  # of the speed


@dataclass(frozen=True)
class Round:
    """Of one daemon.

    Attributes:
        cpu_ms: CPU time of its broker and its worker for each token that was drawn.
        broker_part: CPU time of its broker, as a part of the time in which they were.
    """

    tokens: list[list[int]]
    tokens_per_s: float
    cpu_ms: float
    broker_part: float


def run(rig: Rig) -> list[Measurement]:
    return [made for model in ([TOY] if rig.quick else [DEMO, TOY]) for made in _measure(rig, model)]


def _measure(rig: Rig, model: Model) -> list[Measurement]:
    tokens = 100 if rig.quick else TOKENS[model]
    on: list[Round] = []
    off: list[Round] = []
    for _ in range(rig.rounds(PAIRS)):
        with _pair(rig, rig.path(model)) as pair:
            more = [pair.rounds(number, tokens) for number in range(rig.rounds(ROUNDS) + 1)]
        on += [each[0] for each in more[1:]]  # the first ones warm up
        off += [each[1] for each in more[1:]]
    same = compare(
        [drawn for each in on for drawn in each.tokens],
        [drawn for each in off for drawn in each.tokens],
        lambda *_: float("inf"),
    )
    claim = f"{STREAMS} streams, looked at in every way, {model.name}"
    # Of a toy, whose tokens cost next to nothing, it is the worst case.
    goal = LEAST if model == DEMO else None
    return [
        Measurement(
            claim=claim,
            unit="tokens/s",
            ours=tuple(each.tokens_per_s for each in on),
            peer=tuple(each.tokens_per_s for each in off),
            peer_name="nobody looks, nothing is recorded",
            least_ratio=goal,
            tokens=same,
        ),
        Measurement(
            claim=f"CPU time of broker and worker for a token of it, {model.name}",
            unit="ms",
            ours=tuple(each.cpu_ms for each in on),
            peer=tuple(each.cpu_ms for each in off),
            peer_name="nobody looks, nothing is recorded",
            lower_is_better=True,
            least_ratio=goal,
            tokens=same,
        ),
        Measurement(
            claim=f"CPU time that it takes of the broker, of the streams' time, {model.name}",
            unit="%",
            ours=tuple(100 * (a.broker_part - b.broker_part) for a, b in zip(on, off, strict=True)),
            most=None if goal is None else 100 * (1 - LEAST),
            tokens=same,
        ),
    ]


@dataclass(frozen=True)
class Pair:
    """Two daemons, the one that is looked at and the other, and those who look at it, in a process."""

    looked_at: Room
    plain: Room
    process: subprocess.Popen[str]

    def rounds(self, number: int, tokens: int) -> tuple[Round, Round]:
        """One of each; who goes first changes. Raises RuntimeError: the observers saw nothing."""
        if number % 2:
            off, on = _round(self.plain, tokens), self._observed(tokens)
        else:
            on, off = self._observed(tokens), _round(self.plain, tokens)
        return on, off

    def _observed(self, tokens: int) -> Round:
        turned(self.process)
        made = _round(self.looked_at, tokens)
        seen = turned(self.process)
        if not (seen.scrapes and seen.looks and seen.events):
            raise RuntimeError(f"the observers saw nothing: {seen}")
        return made


@contextmanager
def _pair(rig: Rig, model: Path) -> Iterator[Pair]:
    """Started anew until both have decided alike on how they use the BLAS, which is worth tenths on a CPU."""
    for left in reversed(range(TRIES)):
        port = _free_port()
        with ExitStack() as opened:
            looked_at = opened.enter_context(rig.daemon(model, "--metrics-port", str(port)))
            plain = opened.enter_context(rig.daemon(model, "--no-record", "--log-level", "error"))
            facts = [room.stats().models[0]["facts"]["blas_switched"] for room in (looked_at, plain)]
            if facts[0] == facts[1] or not left:
                process = opened.enter_context(observers(looked_at.endpoint, port))
                yield Pair(looked_at, plain, process)
                return


def _round(room: Room, tokens: int) -> Round:
    worker = psutil.Process(room.stats().models[0]["pid"])
    broker = worker.parent()
    assert broker is not None
    text = TEXT.read_text(encoding="utf-8")
    sessions = [room.open(text=text[100 * i : 100 * i + 200]) for i in range(STREAMS)]
    before = [_cpu_s(process) for process in (broker, worker)]
    drawn = draw(sessions, tokens)
    took = [_cpu_s(process) - s for process, s in zip((broker, worker), before, strict=True)]
    all_s = max(times[-1] for times in drawn.times)
    for session in sessions:
        session.close()
    cpu_ms = 1000 * sum(took) / (STREAMS * tokens)
    return Round(drawn.tokens, drawn.tokens_per_s, cpu_ms, broker_part=took[0] / all_s)


def _cpu_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def _free_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
