"""The bytes of KV: what is held, what was promised, and what is admitted. Checkpoints give way first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from stateroom.caches.layout import CAPACITY_STEP
from stateroom.caches.session import SessionCache
from stateroom.client.errors import Capacity
from stateroom.daemon.engine.fill import Fill
from stateroom.daemon.engine.kv import Served
from stateroom.daemon.engine.score import Score
from stateroom.daemon.engine.session import Session
from stateroom.daemon.scheduler.pace import QUANTUM_MAX

if TYPE_CHECKING:
    from stateroom.daemon.engine.engine import Engine

RETRY_AFTER_S = 5.0  # told with `capacity`; sessions close or end in about that time
STEP = 1  # tokens that a decoding session takes at once
CHECKPOINT_EVERY = 256  # tokens between two checkpoints of a long prompt or answer, and at every prompt's end


class Told(NamedTuple):
    """Bytes of a session: its own, shared ones; of both, what tokens fill and what is allocated for them."""

    private: int
    shared: int
    live: int
    capacity: int


class Memory:
    """Counts an engine's KV, and says no.

    Args:
        budget_bytes: the most KV held at once; None: no limit.
        dropped: told of sessions whose checkpoints went to make room.
    """

    def __init__(
        self, engine: Engine, budget_bytes: int | None, dropped: Callable[[list[Session]], None]
    ) -> None:
        self._engine = engine
        self.budget_bytes = budget_bytes
        self._dropped = dropped

    # ------------------------------------------------------------ what is held

    @property
    def held_bytes(self) -> int:
        """KV on the device: rows of sessions and batches, and each checkpoint once, whoever shares it."""
        engine = self._engine
        batched = [batch.cache for batch in engine.decoding.batches if batch.cache is not None]
        batches = sum(cache.nbytes_capacity for cache in batched)
        rows = sum(session.kv_bytes for session in engine.sessions.values())
        alone = [session.cache for session in engine.sessions.values() if session.cache is not None]
        trunks = {trunk for cache in (*batched, *alone) for trunk in cache.trunks}
        shared = sum(trunk.nbytes for trunk in trunks)
        return batches + rows + shared + self._marks_bytes(engine.sessions.values())

    def told(self, session: Session) -> Told:
        """Bytes as `info` tells them. Trunks and checkpoints are shared while others have them too."""
        cache, row = self._place(session)
        marks = session.trail
        private, shared = marks.nbytes - marks.shared_nbytes, marks.shared_nbytes
        if cache is None:
            return Told(private, shared, 0, 0)
        own = cache.nbytes_capacity // cache.rows
        trunks = cache.row_trunks(row)
        alone = sum(trunk.nbytes for trunk in trunks if trunk.holders == 1)
        others = sum(trunk.nbytes for trunk in trunks) - alone
        return Told(private + own + alone, shared + others, cache.row_bytes(row), own + alone + others)

    def _place(self, session: Session) -> tuple[SessionCache | None, int]:
        """The cache that has the session's row, and which one that is."""
        if not session.lent:
            return session.cache, 0
        for batch in self._engine.decoding.batches:
            for row, stream in enumerate(batch.members):
                if stream.session is session:
                    return batch.cache.place(row)
        return None, 0

    @staticmethod
    def _marks_bytes(sessions: Iterable[Session]) -> int:
        marks = {mark for session in sessions for mark in session.trail}
        return sum(mark.nbytes for mark in marks)

    # ------------------------------------------------------------ checkpoints

    def mark(self, session: Session, cache: SessionCache, row: int, every: int = CHECKPOINT_EVERY) -> None:
        """Leaves a checkpoint of a session's row, if the last is so many tokens back and there is room."""
        length = cache.offsets[row]
        if not cache.checkpointed or length - session.trail.last < every:
            return
        session.trail.last = length  # one that is too large isn't tried again at the next token
        nbytes = cache.checkpoint_bytes(row)
        if nbytes <= session.trail.bytes_max and self.has_room(nbytes):
            checkpoint = cache.checkpoint(row)
            assert checkpoint is not None
            session.trail.add(checkpoint)

    # ------------------------------------------------------------ what is admitted

    def admit(self, served: Served, *growths: tuple[Session | None, int], at_once: int = QUANTUM_MAX) -> None:
        """Refuses what would pass the budget: each session, all of one scheme, grows to that length.

        Raises `Capacity`, and nothing has changed.
        """
        if self.budget_bytes is not None:
            growth = (self._growth(served, session, length, at_once) for session, length in growths)
            # Whose plans may count on their checkpoints.
            self.admit_bytes(sum(growth), {session for session, _ in growths})

    def admit_bytes(self, needed: int, theirs: set[Session | None] | None = None) -> None:
        """The same for so many bytes. `theirs`: sessions that must keep what they have."""
        if self.budget_bytes is None:
            return
        free = self.budget_bytes - self.held_bytes - self._promised()
        if needed > max(free, 0) and not self._made_room(needed - free, theirs or set()):
            if needed > self.budget_bytes:
                advice = f"the budget is {self.budget_bytes}: it can't fit"
            else:
                advice = "close sessions or try again"
            raise Capacity(  # what takes nothing more is never refused
                f"This needs {needed} bytes of KV and {max(free, 0)} are free; {advice}.",
                needed_bytes=needed,
                free_bytes=max(free, 0),
                retry_after_s=RETRY_AFTER_S,
            )

    def has_room(self, nbytes: int) -> bool:
        """So much more may be held that nobody asked for: checkpoints, and padding."""
        if self.budget_bytes is None:
            return True
        return self.held_bytes + self._promised() + nbytes <= self.budget_bytes

    def _made_room(self, wanted_bytes: int, theirs: set[Session | None]) -> bool:
        """Drops checkpoints of idle sessions, those of the oldest first, if they come to so much."""
        busy = {request.session for request in self._engine.requests.values()} | theirs
        sessions = list(self._engine.sessions.values())
        gone = [session for session in sessions if len(session.trail) and session not in busy]
        holders = Counter(mark for session in sessions for mark in session.trail)
        freed = 0
        for last, session in enumerate(gone, 1):
            for mark in session.trail:
                holders[mark] -= 1
                if not holders[mark]:
                    freed += mark.nbytes
            if freed >= wanted_bytes:
                gone = gone[:last]
                break
        if freed < wanted_bytes:
            return False
        for session in gone:
            session.trail.cut(-1)
        self._dropped(gone)
        return True

    def _growth(self, served: Served, session: Session | None, length: int, at_once: int) -> int:
        """Bytes that a session (None: a new one) has still to take to hold so many tokens."""
        held = 0
        cache, row = self._place(session) if session is not None else (None, 0)
        if cache is not None:
            # Rounded as planes are: what comes behind a trunk may need a step of capacity more.
            step = CAPACITY_STEP * int(cache.bytes_per_token)
            held = cache.nbytes_capacity // cache.rows
            if cache.quantised:  # else what it shares now will be a copy of its own
                held += max(cache.shared_bytes(row) - step, 0)
        return max(served.projected_bytes(length, at_once) - held, 0)

    def _promised(self) -> int:
        """Bytes that what was admitted earlier has still to take, at the most."""
        promised = 0
        for request in self._engine.requests.values():
            session, served = request.session, request.session.served
            if isinstance(request, Fill):
                most = max(request.change.length, request.most)
                promised += self._growth(served, session, most, QUANTUM_MAX)
            elif isinstance(request, Score):
                copied = session.length + len(request.continuation)
                promised += self._growth(served, None, copied, QUANTUM_MAX)
            else:
                promised += self._growth(served, session, request.most, STEP)
        return promised
