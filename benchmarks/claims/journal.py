"""Eight streams while every token is kept on disk, against a daemon that keeps nothing; and the CPU it takes.

Speed varies from round to round by far more than a hundredth, so it has no goal: CPU time of the broker has,
whose threads do all of the keeping.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.measurement import Measurement, compare
from benchmarks.paid import draw_and_pay
from benchmarks.rig import DEMO, TOY, Model, Rig

from stateroom.client import Room

STREAMS = 8
ROUNDS = {DEMO: 4, TOY: 6}
TOKENS = {DEMO: 48, TOY: 1500}  # drawn by each
MOST = 1.0  # % of the time in which the tokens are drawn


@dataclass(frozen=True)
class Kept:
    """One round of a daemon. `busy`: CPU time of its broker, as a part of the time that the tokens took."""

    tokens: list[list[int]]
    tokens_per_s: float
    busy: float


def run(rig: Rig) -> list[Measurement]:
    models = [TOY] if rig.quick else [DEMO, TOY]
    return [made for model in models for made in _measure(rig, model)]


def _measure(rig: Rig, model: Model) -> list[Measurement]:
    path, tokens = rig.path(model), 100 if rig.quick else TOKENS[model]
    ours, peer = [], []
    with rig.daemon(path) as keeping, rig.daemon(path, "--no-keep") as plain:
        for _ in range(rig.rounds(ROUNDS[model]) + 1):  # the first one warms up
            ours.append(_round(keeping, tokens))
            peer.append(_round(plain, tokens))
    ours, peer = ours[1:] or ours, peer[1:] or peer
    same = compare(
        [drawn for each in ours for drawn in each.tokens],
        [drawn for each in peer for drawn in each.tokens],
        lambda *_: float("inf"),
    )
    return [
        Measurement(
            claim=f"{STREAMS} streams, all of it kept on disk, {model.name}",
            unit="tokens/s",
            ours=tuple(each.tokens_per_s for each in ours),
            peer=tuple(each.tokens_per_s for each in peer),
            peer_name="nothing kept",
            tokens=same,
        ),
        Measurement(
            claim=f"CPU that keeping {STREAMS} streams takes, of their time, {model.name}",
            unit="%",
            ours=tuple(100 * (a.busy - b.busy) for a, b in zip(ours, peer, strict=True)),
            most=MOST if model == DEMO else None,
            tokens=same,
        ),
    ]


def _round(room: Room, tokens: int) -> Kept:
    paid = draw_and_pay(room, STREAMS, tokens)
    took_s = max(times[-1] for times in paid.drawn.times)
    return Kept(paid.drawn.tokens, STREAMS * tokens / took_s, paid.broker_s / took_s)
