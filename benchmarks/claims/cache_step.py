"""A decode step of a deep, narrow model over our cache and over mlx-lm's: on a CPU all of it is the cost of
launching operations. Each side has a process of its own, since the engine changes a model's layers."""

from __future__ import annotations

from typing import Any

from benchmarks import step
from benchmarks.measurement import Measurement, compare
from benchmarks.rig import Model, Rig

DEEP = Model(layers=30, width=64)
ROUNDS = 7
STEPS = 100
PROMPT = 128
PAIRS = ((step.OURS, step.STEPPED), (step.OURS, step.CONCATENATED), (step.TRACED, step.OURS))


def run(rig: Rig) -> list[Measurement]:
    steps = 10 if rig.quick else STEPS
    kinds = {True: [step.OURS, step.TRACED], False: [step.STEPPED, step.CONCATENATED]}
    found: dict[str, list[dict[str, Any]]] = {kind: [] for pair in kinds.values() for kind in pair}
    with rig.peer(DEEP) as ours, rig.peer(DEEP) as peer:
        ours.ask("prepare")
        for _ in range(rig.rounds(ROUNDS) + 1):  # the first is for what happens only once
            for side in (ours, peer):
                asked = side.ask("steps", kinds=kinds[side is ours], prompt=PROMPT, steps=steps)
                for kind, answer in asked.items():
                    found[kind].append(answer)
    return [_measurement(found, *pair) for pair in PAIRS]


def _measurement(found: dict[str, list[dict[str, Any]]], mine: str, kind: str) -> Measurement:
    ours, theirs = found[mine][1:], found[kind][1:]
    traced = ", traced" if mine == step.TRACED else ""
    return Measurement(
        claim=f"decode step in process{traced}, {DEEP.name}",
        unit="ms",
        ours=tuple(answer["ms"] for answer in ours),
        peer=tuple(answer["ms"] for answer in theirs),
        peer_name=kind,
        lower_is_better=True,
        least_ratio=None if traced else 1.0,
        tokens=compare([ours[-1]["tokens"]], [theirs[-1]["tokens"]], lambda *_: float("inf")),
    )
