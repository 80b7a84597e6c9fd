"""An editor's buffer that is resident, after an edit at its end or in its middle, against computing it anew.

Measured until all but the buffer's last token is computed, ours and `stream_generate`'s; then both draw a few
tokens, which must be the same.
"""

from __future__ import annotations

import time

from benchmarks.claims.single import agreement, drawn
from benchmarks.measurement import Measurement, together
from benchmarks.peer import Run
from benchmarks.rig import DEMO, Rig, Sides

from stateroom.client import Session

ROUNDS = 2
BUFFER = 2000  # tokens
EDITED = 20  # replaced by as many others
DRAWN = 8  # then, to see that the KV is right
LEAST_AT_END = 40.0


def run(rig: Rig) -> list[Measurement]:
    sides = rig.sides(DEMO)
    size = BUFFER // 10 if rig.quick else BUFFER
    buffer = sides.prompt(size)
    places = {"at its end": size - EDITED, "in its middle": size // 2}
    made = []
    with sides.room.open(tokens=buffer) as session:
        for where, place in places.items():
            follow = size - place
            rounds = [_round(sides, session, buffer, place, 100 * (i + 1)) for i in range(rig.rounds(ROUNDS))]
            made.append(
                Measurement(
                    claim=f"sync of {size:,} tokens, {EDITED} changed {where}, {sides.model.name}",
                    unit="s",
                    ours=tuple(taken for _, taken, _, _ in rounds),
                    peer=tuple(theirs.prefill_s for _, _, _, theirs in rounds),
                    peer_name="stream_generate, anew",
                    lower_is_better=True,
                    # In proportion: the rest of the buffer, and no more, is computed.
                    least_ratio=LEAST_AT_END if follow == EDITED else size / follow,
                    tokens=together(
                        [agreement(sides, edited, ours, theirs) for edited, _, ours, theirs in rounds]
                    ),
                )
            )
    return made


def _round(
    sides: Sides, session: Session, buffer: list[int], place: int, start: int
) -> tuple[list[int], float, Run, Run]:
    """The edited buffer, seconds of its sync, and what both sides draw after it."""
    session.sync(tokens=buffer)  # as it was, without what was drawn
    edited = buffer[:place] + sides.prompt(EDITED, start) + buffer[place + EDITED :]
    begin = time.perf_counter()
    receipt = session.sync(tokens=edited).receipt
    taken = time.perf_counter() - begin
    assert receipt.reused >= place - 1, receipt
    return edited, taken, drawn(session, DRAWN, begin), sides.peer.generate(edited, DRAWN)
