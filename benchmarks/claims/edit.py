"""An editor's buffer that is resident, after a small edit near its end, against computing it anew."""

from __future__ import annotations

import time

from benchmarks.claims.single import agreement, drawn
from benchmarks.measurement import Measurement, together
from benchmarks.peer import Run
from benchmarks.rig import DEMO, Rig

from stateroom.client import Session

ROUNDS = 3
BUFFER = 600  # tokens
KEPT = 560  # of them before the edit
EDITED = 3  # replaced
DRAWN = 8  # then, to see that the KV is right
LEAST = 3.0


def run(rig: Rig) -> list[Measurement]:
    sides = rig.sides(DEMO)
    buffer = sides.prompt(BUFFER)
    pairs, parts = [], []
    with sides.room.open(tokens=buffer) as session:
        for i in range(rig.rounds(ROUNDS)):
            edit = sides.prompt(EDITED, start=100 * (i + 1))
            edited = buffer[:KEPT] + edit + buffer[KEPT + EDITED :]
            ours, theirs = (
                _resident(session, edited),
                sides.peer.generate(edited, DRAWN),
            )
            pairs.append((ours, theirs))
            parts.append(agreement(sides, edited, ours, theirs))
    return [
        Measurement(
            claim=f"first token after an edit at {KEPT} of {BUFFER}, {sides.model.name}",
            unit="s",
            ours=tuple(ours.first_s for ours, _ in pairs),
            peer=tuple(theirs.first_s for _, theirs in pairs),
            peer_name="stream_generate, anew",
            lower_is_better=True,
            least_ratio=LEAST,
            tokens=together(parts),
        )
    ]


def _resident(session: Session, edited: list[int]) -> Run:
    """Sync, and the first tokens of a completion, which the next sync takes away."""
    begin = time.perf_counter()
    receipt = session.sync(tokens=edited).receipt
    assert receipt.reused >= KEPT - 1, receipt
    return drawn(session, DRAWN, begin)
