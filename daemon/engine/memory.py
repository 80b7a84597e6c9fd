"""The bytes of KV: what is held, what was promised, and what is admitted. Checkpoints give way first.

Sums are kept, not made: what a session takes is counted again when its KV changed (`Session.moved`), while a
request has it, and once after; who is parked costs nothing. `conservation.py` compares them with a count of
everything. Parts stand in the books by number: a trunk that a session takes back is written in place only as
long as nobody else refers to its planes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from stateroom.caches.checkpoints import Checkpoint
from stateroom.caches.layout import CAPACITY_STEP
from stateroom.caches.reach import FULL
from stateroom.caches.rows import PackedRows
from stateroom.caches.session import SessionCache
from stateroom.caches.trunk import Trunk
from stateroom.client.errors import Capacity
from stateroom.daemon.engine.demotion import Held, Idle
from stateroom.daemon.engine.fill import Fill
from stateroom.daemon.engine.kv import Served
from stateroom.daemon.engine.score import Score
from stateroom.daemon.engine.session import CHECKPOINT_EVERY, Session
from stateroom.daemon.engine.speculation.guesser import Guesser
from stateroom.daemon.engine.stream import Stream
from stateroom.daemon.engine.verify import Verify
from stateroom.daemon.scheduler.pace import QUANTUM_MAX

if TYPE_CHECKING:
    from stateroom.daemon.engine.engine import Engine

RETRY_AFTER_S = 5.0  # told with `capacity`; sessions close or end in about that time
STEP = 1  # tokens that a decoding session takes at once

Part = Trunk | Checkpoint  # what several sessions may hold


class NoRoom(Capacity):
    """Refused by the budget; the ladder may make room. `theirs`: sessions that must keep what they have."""

    def __init__(self, needed: int, free: int, budget: int, theirs: frozenset[Session | None]) -> None:
        self.needed_bytes, self.budget_bytes, self.theirs = needed, budget, theirs
        fits = needed <= budget
        advice = "close sessions or try again" if fits else f"the budget is {budget}: it can't fit"
        super().__init__(
            f"This needs {needed} bytes of KV and {max(free, 0)} are free; {advice}.",
            needed_bytes=needed,
            free_bytes=max(free, 0),
            retry_after_s=RETRY_AFTER_S,
        )

    def bare(self) -> NoRoom:
        """Without the frames that raised it: what they have in view, such as a loan, would be held by it."""
        self.__traceback__ = self.__context__ = None
        return self

    def after(self, free: int, demotable: int) -> Capacity:
        """What to answer when no room could be made: as it is now, with what idle sessions could give."""
        return Capacity(
            f"This needs {self.needed_bytes} bytes of KV; {max(free, 0)} are free, and idle sessions hold "
            f"{demotable}; the budget is {self.budget_bytes}. Close sessions or try again.",
            **self.details | {"free_bytes": max(free, 0), "demotable_bytes": demotable},
        )


class Told(NamedTuple):
    """Bytes of a session: its own, shared ones; of both, what tokens fill and what is allocated for them."""

    private: int
    shared: int
    live: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Holding:
    """What a session holds: bytes of columns and states of its own, and parts that others may hold too."""

    own: int = 0
    parts: tuple[Part, ...] = ()


NOTHING = Holding()
Counted = tuple[int, tuple[int, ...]]  # what a `Holding` is in the books: bytes, numbers of parts


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
        self._counted: dict[Session, Counted] = {}  # sessions that hold something, as it was last counted
        self._own = 0  # the sum of what they have for themselves
        self._holders: Counter[int] = Counter()  # how many of them hold each part
        self._sizes: dict[int, int] = {}  # bytes of each of those parts
        self._known: WeakValueDictionary[int, Part] = WeakValueDictionary()  # them, for as long as they are
        self._parts = 0  # their sum
        self._stale: set[Session] = set()  # to be counted anew
        self._busy: set[Session] = set()  # that had a request at the last count

    # ------------------------------------------------------------ what is held

    def changed(self, session: Session) -> None:
        """What a session holds is not what it was."""
        self._stale.add(session)

    @property
    def held_bytes(self) -> int:
        """KV on the device: rows of sessions and batches, each part once, whoever shares it; and drafts."""
        self._count()
        batched = [batch.cache for batch in self._engine.decoding.batches if batch.cache is not None]
        seen = {trunk for cache in batched for trunk in cache.trunks} | self._verified()
        trunks = {trunk for trunk in seen if trunk.number not in self._sizes}
        rows = sum(cache.nbytes_capacity for cache in batched)
        return self._own + self._parts + rows + sum(trunk.nbytes for trunk in trunks) + self._drafts()

    def _verified(self) -> set[Trunk]:
        """Of what is to be verified: its session may have gone meanwhile. Its own columns were promised."""
        twins = [r.session.cache for r in self._engine.requests.values() if isinstance(r, Verify)]
        return {trunk for cache in twins if cache is not None for trunk in cache.trunks}

    def _drafts(self) -> int:
        """KV of drafting models: of sessions that speculated lately, and of all streams that do."""
        streams = (request for request in self._engine.requests.values() if isinstance(request, Stream))
        running = {stream.guesser for stream in streams}  # one may have been evicted meanwhile
        kept = {session.guesser for session in self._engine.decoding.guessers.sessions()}
        return sum(map(drafts_of, running | kept))

    def _count(self) -> None:
        busy = self._engine.busy
        for session in self._stale | self._busy | busy:
            there = self._engine.sessions.get(session.id) is session
            self._recount(session, _holding(session, session.cache, 0) if there else NOTHING)
        self._stale, self._busy = set(), busy

    def _recount(self, session: Session, now: Holding) -> None:
        before, after = self._counted.get(session, (0, ())), (now.own, tuple(p.number for p in now.parts))
        if after == before:
            return
        self._own += now.own - before[0]
        for part in now.parts:
            if part.number not in self._sizes:
                self._sizes[part.number] = part.nbytes
                self._known[part.number] = part
                self._parts += part.nbytes
            self._holders[part.number] += 1
        for number in before[1]:
            self._holders[number] -= 1
            if not self._holders[number]:
                del self._holders[number]
                self._parts -= self._sizes.pop(number)
        if now == NOTHING:
            self._counted.pop(session, None)
        else:
            self._counted[session] = after

    def counted(self) -> tuple[dict[Session, Counted], int, int]:
        """Every session's share in the sums, and the sums: own bytes, and those of parts."""
        self._count()
        return self._counted, self._own, self._parts

    def holding(self, session: Session) -> tuple[Holding, int]:
        """What a session holds, wherever its row is, and the bytes that its tokens fill."""
        cache, row = self.place(session)
        return _holding(session, cache, row), 0 if cache is None else cache.row_bytes(row)

    def told(self, session: Session) -> Told:
        """Bytes as of now. Trunks and checkpoints are shared while others have them too."""
        cache, row = self.place(session)
        marks = session.trail
        private, shared = marks.nbytes - marks.shared_nbytes, marks.shared_nbytes
        if cache is None:
            return Told(private, shared, 0, 0)
        own = cache.nbytes_capacity // cache.rows
        trunks = cache.row_trunks(row)
        alone = sum(trunk.nbytes for trunk in trunks if trunk.holders == 1)
        others = sum(trunk.nbytes for trunk in trunks) - alone
        return Told(private + own + alone, shared + others, cache.row_bytes(row), own + alone + others)

    def place(self, session: Session) -> tuple[SessionCache | None, int]:
        """The cache that has the session's row, and which one that is."""
        if not session.lent:
            return session.cache, 0
        for batch in self._engine.decoding.batches:
            place = batch.place(session)
            if place is not None:
                return place
        return None, 0

    # ------------------------------------------------------------ checkpoints

    def mark(self, session: Session, cache: SessionCache, row: int, every: int = CHECKPOINT_EVERY) -> None:
        """Leaves a checkpoint of a session's row, if the last is so many tokens back and there is room."""
        length = cache.offsets[row]
        if not cache.checkpointed or length - session.trail.last < every:
            return
        session.trail.last = length  # one that is too large isn't tried again at the next token
        nbytes = cache.checkpoint_bytes(row)
        if nbytes > session.trail.bytes_max:
            return
        lacking = nbytes - self.free_bytes
        if lacking > 0 and not self._made_room(lacking, {session}):
            self._engine.ladder.wish(nbytes)  # for the next one
            return
        checkpoint = cache.checkpoint(row)
        assert checkpoint is not None
        session.trail.add(checkpoint)

    # ------------------------------------------------------------ what is admitted

    def admit(
        self,
        served: Served,
        *growths: tuple[Session | None, int],
        at_once: int = QUANTUM_MAX,
        beside: int = 0,
    ) -> None:
        """Refuses what would pass the budget: each session, all of one scheme, grows to that length.

        `beside`: bytes that are needed besides.

        Raises `Capacity`, and nothing has changed.
        """
        if self.budget_bytes is not None:
            growth = (self._growth(served, session, length, at_once) for session, length in growths)
            # Whose plans may count on their checkpoints.
            self.admit_bytes(sum(growth) + beside, {session for session, _ in growths})

    def admit_bytes(self, needed: int, theirs: set[Session | None] | None = None) -> None:
        """The same for so many bytes. `theirs`: sessions that must keep what they have."""
        if self.budget_bytes is None:
            return
        free = self.budget_bytes - self.held_bytes - self._promised()
        if needed > max(free, 0) and not self._made_room(needed - free, theirs or set()):
            # What takes nothing more is never refused.
            raise NoRoom(needed, free, self.budget_bytes, frozenset(theirs or ()))

    @property
    def free_bytes(self) -> int:
        """Of the budget, less what was promised; below 0 where it was made smaller. Without one, no end."""
        if self.budget_bytes is None:
            return 2**62
        return self.budget_bytes - self.held_bytes - self._promised()

    def has_room(self, nbytes: int) -> bool:
        """So much more may be held that nobody asked for: checkpoints, and padding."""
        return nbytes <= self.free_bytes

    # ------------------------------------------------------------ who gives way

    def idle(self, theirs: Collection[Session | None] = ()) -> tuple[list[Idle], dict[int, Held]]:
        """The sessions that hold something and have no request, and what they hold that others may too.

        Without `theirs`.
        """
        self._count()
        busy = self._engine.busy | self._engine.ladder.pinned | set(theirs)
        found: list[Idle] = []
        for session in {*self._counted, *self._engine.decoding.guessers.sessions()} - busy:
            own, numbers = self._counted.get(session, (0, ()))
            own += drafts_of(session.guesser)
            found.append(Idle(session.id, session.used_ms, own, numbers, session.background))
        parts = {number for each in found for number in each.parts}
        return found, {number: Held(self._sizes[number], self._holders_of(number)) for number in parts}

    def _holders_of(self, number: int) -> int:
        """How many have a part, loans and copies that are being written among them."""
        part = self._known.get(number)
        if part is None:
            return self._holders[number]
        return part.holders if isinstance(part, Trunk) else len(part.trails)

    @property
    def busy_bytes(self) -> int:
        """What requests have, or were promised: it gives way to nobody."""
        self._count()
        counted = [self._counted.get(session, (0, ())) for session in self._engine.busy]
        sizes = {number: self._sizes[number] for _, numbers in counted for number in numbers}
        batched = [batch.cache for batch in self._engine.decoding.batches]
        seen = {trunk for cache in batched for trunk in cache.trunks} | self._verified()
        sizes.update((trunk.number, trunk.nbytes) for trunk in seen)
        rows = sum(cache.nbytes_capacity for cache in batched)
        return sum(own for own, _ in counted) + sum(sizes.values()) + rows + self._promised()

    def _made_room(self, wanted_bytes: int, theirs: set[Session | None]) -> bool:
        """Drafts and checkpoints of idle sessions go, those of the oldest first, if they come to so much."""
        idle, _ = self.idle(theirs)
        oldest = [self._engine.sessions[each.id] for each in sorted(idle, key=lambda one: one.age_key)]
        gone: list[Session] = []
        holders = {mark: len(mark.trails) for session in oldest for mark in session.trail}  # loans, too
        freed = 0
        for session in oldest:
            if freed >= wanted_bytes:
                break
            before = freed
            freed += drafts_of(session.guesser)
            for mark in session.trail:
                holders[mark] -= 1
                if not holders[mark]:
                    freed += mark.nbytes
            if freed > before or len(session.trail):
                gone.append(session)
        if freed < wanted_bytes:
            return False
        for session in gone:
            if session.guesser is not None:
                session.guesser.drafts = None
            session.trail.cut(-1)
            self.changed(session)
        self._dropped(gone)
        return True

    def admit_fill(self, fill: Fill, loan: Session | None = None, hoped: int = 0) -> None:
        """Refuses a fill that would pass the budget.

        `loan`: what it would begin with instead of its session's own. `hoped`: tokens of those that it is to
        share with somebody who has yet to compute them. Raises `Capacity`, and nothing has changed.
        """
        if self.budget_bytes is None:
            return
        session, most = fill.session, max(fill.change.length, fill.most)
        cache, row = self.place(session) if loan is None else (loan.cache, 0)
        growth = self._growth_of(session.served, cache, row, most, QUANTUM_MAX)
        if loan is not None and cache is not None:
            growth += cache.nbytes_capacity  # in the books once it is the session's
        growth = max(growth - hoped_bytes(session.served, hoped), 0)
        self.admit_bytes(growth + fill.beside, {session})

    def _growth(self, served: Served, session: Session | None, length: int, at_once: int) -> int:
        """Bytes that a session (None: a new one) has still to take to hold so many tokens."""
        cache, row = self.place(session) if session is not None else (None, 0)
        return self._growth_of(served, cache, row, length, at_once)

    @staticmethod
    def _growth_of(served: Served, cache: SessionCache | None, row: int, length: int, at_once: int) -> int:
        held = 0
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
                growth = self._growth(served, session, most, QUANTUM_MAX)
                promised += max(growth - hoped_bytes(served, request.hoped), 0) + request.beside
            elif isinstance(request, Score):
                copied = session.length + len(request.continuation)
                promised += self._growth(served, None, copied, QUANTUM_MAX)
            elif isinstance(request, Verify):
                promised += request.nbytes
            else:
                promised += self._growth(served, session, request.most, STEP)
                if request.drafter is not None:
                    promised += max(request.drafter.projected_bytes(request.most) - request.drafts.nbytes, 0)
        return promised


def _holding(session: Session, cache: SessionCache | None, row: int) -> Holding:
    marks = list[Part](session.trail)
    if cache is None:
        return Holding(0, tuple(marks))
    return Holding(cache.nbytes_capacity // cache.rows, (*chained(cache, row), *marks))


def drafts_of(guesser: Guesser | None) -> int:
    """KV of a drafting model that a session holds, in bytes."""
    return 0 if guesser is None or guesser.drafts is None else guesser.drafts.nbytes


def chained(cache: SessionCache, row: int) -> list[Trunk]:
    """The trunks that a row has in view, in order."""
    packed = [store for store in cache.stores if isinstance(store, PackedRows)]
    return [view.trunk for store in packed for view in store.chains[row]]


def hoped_bytes(served: Served, tokens: int) -> int:
    """What so many tokens take where they can be shared, less what rounding may cost behind them."""
    if served.caps.fork != "shared" or served.blueprint.scheme.quantise_after:
        return 0
    stores = [s for s in served.samples[0].stores if isinstance(s, PackedRows) and s.reach is FULL]
    return max(tokens - CAPACITY_STEP, 0) * sum(store.bytes_per_token for store in stores)
