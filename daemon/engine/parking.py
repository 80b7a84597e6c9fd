"""When a worker leaves: its sessions go to disk while there is time, the most valuable ones first."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from stateroom.daemon.engine.session import Session
from stateroom.daemon.engine.sharing import SHARE_MIN
from stateroom.daemon.link import Kept

if TYPE_CHECKING:
    from stateroom.daemon.engine.engine import Engine

SNAPSHOT_BYTES = 4 * 2**20  # what a disk writes in the time that the files and syncs of one snapshot take
AHEAD_MAX = 2  # sessions that are copied while another is written


@dataclass(frozen=True, slots=True)
class Candidate:
    """A session: tokens to compute again if it isn't kept, and bytes to write if it is.

    `parts`: bytes by number of those that others may have, too; they are written once.
    """

    id: str
    tokens: int
    own_bytes: int
    parts: Mapping[int, int] = field(default_factory=dict)


def order(candidates: Iterable[Candidate]) -> list[str]:
    """By what each saves for the time that it takes; a part's bytes are paid for by all that have it."""
    them = list(candidates)
    holders = Counter(part for each in them for part in each.parts)

    def worth(each: Candidate) -> float:
        shared = sum(nbytes / holders[part] for part, nbytes in each.parts.items())
        return each.tokens / (each.own_bytes + shared + SNAPSHOT_BYTES)

    return [each.id for each in sorted(them, key=lambda each: (-worth(each), each.id))]


def park_all(engine: Engine, seconds: float) -> None:
    """Keeps what sessions hold for so long; each is told as soon as it is there. The engine serves nobody.

    What is being written when the time is over is left to the thread that writes it, or to nobody.
    """
    disk, until_ms = engine.disk, engine.clock_ms() + seconds * 1000.0
    if disk is None:
        return
    left = deque(order(_candidates(engine)))
    while (left or disk.busy) and (left_ms := until_ms - engine.clock_ms()) > 0:
        if left and disk.queued < AHEAD_MAX:
            session = engine.sessions[left.popleft()]
            disk.keep(session, partial(_kept, engine, session))
        elif disk.pressing:
            disk.turn()
        else:
            disk.files.wait(left_ms / 1000.0)
            disk.turn()


def _kept(engine: Engine, session: Session, outcome: Kept | Exception) -> None:
    if isinstance(outcome, Kept) and engine.disk is not None:
        engine.disk.tell([session])


def _candidates(engine: Engine) -> list[Candidate]:
    found = []
    for session in engine.sessions.values():
        known = session.snapshot is not None and session.snapshot_sure
        covered = min(session.snapshot_length, session.snapshot_stored) if known else 0
        if session.stored - covered >= SHARE_MIN:
            holding, _ = engine.memory.holding(session)
            parts = {part.number: part.nbytes for part in holding.parts}
            found.append(Candidate(session.id, session.stored - covered, holding.own, parts))
    return found
