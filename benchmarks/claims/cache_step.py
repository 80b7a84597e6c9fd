"""A decode step of a deep, narrow model over our cache and over mlx-lm's, in one process: on a CPU all of it
is the cost of launching operations."""

from __future__ import annotations

from benchmarks import step
from benchmarks.measurement import Measurement, compare
from benchmarks.rig import Model, Rig

DEEP = Model(layers=30, width=64)
ROUNDS = 7
STEPS = 100
PROMPT = 128


def run(rig: Rig) -> list[Measurement]:
    with rig.peer(DEEP) as peer:
        steps = 10 if rig.quick else STEPS
        found = peer.ask("steps", prompt=PROMPT, steps=steps, rounds=rig.rounds(ROUNDS))
    made = []
    pairs = [(step.OURS, step.STEPPED), (step.OURS, step.CONCATENATED), (step.TRACED, step.OURS)]
    for mine, kind in pairs:
        ours, theirs = found[mine], found[kind]
        traced = ", traced" if mine == step.TRACED else ""
        made.append(
            Measurement(
                claim=f"decode step in process{traced}, {DEEP.name}",
                unit="ms",
                ours=tuple(ours["ms"]),
                peer=tuple(theirs["ms"]),
                peer_name=kind,
                lower_is_better=True,
                least_ratio=None if traced else 1.0,
                tokens=compare([ours["tokens"]], [theirs["tokens"]], lambda *_: float("inf")),
            )
        )
    return made
