"""Tokens are computed once for all who have them: a fill begins with what another session holds already.

Sessions of one owner, with one KV scheme, form a realm, and so do all that stem from one published trunk, as
far as its tokens go. When a fill begins, the resident session that has the longest beginning in common lends
its KV: as trunks, without a copy, unless the model or the place of the row allows no better than one (which
still costs a hundredth of computing). Only what is stored and complete is lent, tokens are compared once more
before it is, and layers that can't be trimmed go back to one of the lender's checkpoints.

A fill that another one, already under way, computes the beginning of waits for that one instead of computing
the same. Who waits is not queued yet and holds nobody up; who is queued waits for nobody, so that no two wait
for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from stateroom.caches.layout import CAPACITY_STEP
from stateroom.caches.session import SessionCache
from stateroom.daemon.engine.fill import Fill
from stateroom.daemon.engine.kv import Served
from stateroom.daemon.engine.ladder import Waiter
from stateroom.daemon.engine.memory import NoRoom
from stateroom.daemon.engine.prefixes import Prefixes
from stateroom.daemon.engine.session import NO_LIMIT, Session, common_prefix, reachable
from stateroom.daemon.link import Journals

if TYPE_CHECKING:
    from stateroom.daemon.engine.engine import Engine

SHARE_MIN = (
    32  # tokens more than a session can reuse of its own: what a pass over a trunk costs is then made up for
)
LENDERS_TRIED = (
    16  # of those with the most in common; layers that can't be trimmed may not go back that far in some
)
LEADERS_TRIED = 64  # fills under way that a new one is compared with
RELEASED_PER_TURN = 32  # waiting fills that begin in one turn, so that streams don't wait for all of them


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    fill: Fill
    leader: Fill
    until: int  # tokens that the leader is to have stored


class Sharing:
    """Lends KV among the sessions of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.prefixes: Prefixes[Session] = Prefixes()
        self._waiting: dict[int, _Waiting] = {}  # by rid, the first come first

    # ------------------------------------------------------------ who may share

    def enter(self, session: Session, parent: Session | None = None) -> None:
        """A session that is new to the engine. `parent`: whose tokens it has."""
        scheme = session.served.blueprint.scheme
        session.realm = ("owner", session.owner, scheme)
        if session.trunk is not None:
            # All who have forked it may know its tokens, whoever computes them first.
            session.trunk_realm = ("trunk", session.trunk, scheme)
        session.moved = self._moved
        self._engine.sessions[session.id] = session
        if parent is not None:
            for realm, limit in session.realms():
                self.prefixes.stand_beside(realm, session, parent, min(session.stored, limit))
        self._moved(session)

    def leave(self, session: Session) -> None:
        """It is no more, and holds nothing."""
        del self._engine.sessions[session.id]
        if self._engine.disk is not None:
            self._engine.disk.closed(session)
        session.drop_kv()
        self._engine.conservation.closed(session)

    def _moved(self, session: Session) -> None:
        self._engine.memory.changed(session)
        for realm, limit in session.realms():
            self.prefixes.move(realm, session, session.tokens, min(session.stored, limit))

    # ------------------------------------------------------------ fills begin

    def begin(self, fill: Fill) -> None:
        """Begins a fill with what the disk or others hold, once that is there.

        Raises `Capacity` when it doesn't fit the budget, and nothing has changed.
        """
        if fill.cancelled:  # before it began
            self._engine.filling.begin(fill)  # which ends it
            return
        memory, found = self._engine.memory, self._lender(fill)
        if found is not None and not self._affords(found[0]):
            found = None
        lent, disk = found[1] if found else 0, self._engine.disk
        if disk is not None and disk.fetching.covers(fill) >= max(fill.change.kv_keep, lent) + SHARE_MIN:
            disk.fetching.begin(fill)
            return
        ahead = self._ahead(fill, lent)
        if ahead is not None:
            memory.admit_fill(fill, hoped=ahead.until)
            fill.hoped = ahead.until
            self._engine.requests[fill.rid] = fill
            self._waiting[fill.rid] = ahead
            self._engine.recorder.wait(fill.rid, "turn", self._engine.clock_ms(), shares=ahead.until)
            return
        loan = None
        if found is not None:
            self._engine.touch(found[0])  # it gives way after all others
            if not self._copies(found[0]):
                loan = self._loan(fill.tokens, *found)  # takes nothing, so that less has to be admitted
        if fill.computes or fill.change.tokens:
            try:
                memory.admit_fill(fill, loan)
            except NoRoom as refusal:
                if loan is None:
                    raise
                found = loan = None
                self._admit_alone(fill, refusal.bare())
        if found is not None:
            fill.borrow(loan or self._loan(fill.tokens, *found))
        self.go_on(fill)

    def go_on(self, fill: Fill) -> None:
        """A fill has what it begins with."""
        if fill.done:
            self._end(fill)
        else:
            self._engine.filling.begin(fill)

    def _admit_alone(self, fill: Fill, refusal: NoRoom) -> None:
        """Without a loan that was refused: its lender's checkpoints may give way, or its own KV is enough."""
        try:
            self._engine.memory.admit_fill(fill)
        except NoRoom as alone:
            raise min(refusal, alone, key=lambda each: each.needed_bytes) from None

    def _end(self, fill: Fill) -> None:
        fill.started_ms = self._engine.clock_ms()
        try:
            fill.end()
        except Exception as error:
            self._engine.fail(fill.rid, error, self._engine.journal(fill.session, 0))
        else:
            self.restock(fill.session)

    def restock(self, session: Session) -> None:
        """A published trunk that lost its KV with a worker takes what a fork of it has: that one may go."""
        trunk = self._engine.sessions.get(session.trunk or "")
        if trunk is None or trunk is session or not trunk.missing or self._is_busy(trunk):
            return
        length = self._reach(session, min(trunk.length - 1, session.trunk_length, session.stored))
        if length < trunk.stored + SHARE_MIN or not self._affords(session):
            return
        if self._copies(session) and not self._engine.memory.has_room(session.kv_bytes):
            return
        loan = self._loan(trunk.tokens, session, length)
        trunk.cache, trunk.trail = loan.cache, loan.trail
        trunk.stored = loan.stored
        self._engine.emit(Journals([self._engine.journal(trunk, trunk.length)]))

    def turn(self) -> None:
        """Once a turn of the loop: waiting fills begin when what they wait for is there, or won't be."""
        if not self._waiting:
            return
        due = (waiting.fill for waiting in self._waiting.values() if not self._waits(waiting))
        for fill in list(islice(due, RELEASED_PER_TURN)):
            del self._waiting[fill.rid], self._engine.requests[fill.rid]
            fill.hoped = 0
            self.begin_again(fill)

    def begin_again(self, fill: Fill) -> None:
        """What `begin` would raise ends it, or where it is for want of room, has it wait for that."""
        self.attempt(fill, partial(self.begin, fill))

    def attempt(self, fill: Fill, begin: Callable[[], None]) -> None:
        """The same for another way to begin it, which ends it if it was cancelled."""

        def give_up() -> None:
            fill.cancelled = True
            begin()

        def fail(error: Exception) -> None:
            if fill.opens:
                self.leave(fill.session)
            fill.end_cancelled()
            keep = 0 if fill.applied else fill.session.length
            self._engine.fail(fill.rid, error, self._engine.journal(fill.session, keep))

        try:
            begin()
        except NoRoom as refusal:
            waiter = Waiter(fill.rid, fill.session, begin, give_up, fail, planned=True)
            self._engine.ladder.hold(waiter, refusal)
        except Exception as error:
            fail(error)

    def waiting_for_disk(self) -> int:
        """Fills that wait for one that waits for the disk."""
        fetching = self._engine.disk.fetching if self._engine.disk is not None else None
        return sum(fetching is not None and fetching.waits(each.leader) for each in self._waiting.values())

    def _waits(self, waiting: _Waiting) -> bool:
        leader, session = waiting.leader, waiting.leader.session
        going = self._engine.requests.get(leader.rid) is leader
        return (
            going and not waiting.fill.cancelled and not (leader.applied and session.stored >= waiting.until)
        )

    def _ahead(self, fill: Fill, lent: int) -> _Waiting | None:
        """The fill under way that computes the most of what this one needs, and no other session has yet."""
        best: _Waiting | None = None
        most = max(fill.change.kv_keep, lent) + SHARE_MIN - 1
        for leader in islice(self._under_way(fill), LEADERS_TRIED):
            limit = min(fill.change.length, leader.change.length, _limit(fill, leader)) - 1
            if limit > most:
                until = min(common_prefix(leader.tokens, fill.tokens), limit)
                if until > most and not (leader.applied and leader.session.stored >= until):
                    best, most = _Waiting(fill, leader, until), until
        return best

    def _under_way(self, fill: Fill) -> Iterator[Fill]:
        for other in self._engine.requests.values():
            if not isinstance(other, Fill) or other.rid in self._waiting or other.cancelled:
                continue
            # Nobody waits for what gives way to it.
            if other.session is not fill.session and other.session.background <= fill.session.background:
                yield other

    # ------------------------------------------------------------ lending

    def lendable(self, fill: Fill) -> int:
        """The most of a fill's tokens that another session has KV of."""
        found = self._lender(fill)
        return found[1] if found else 0

    def _lender(self, fill: Fill) -> tuple[Session, int] | None:
        """The session that can lend the most of a fill's tokens, and how many."""
        tokens, session = fill.tokens, fill.session
        best: Session | None = None
        most = fill.change.kv_keep + SHARE_MIN - 1
        for realm, limit in session.realms():
            length = min(len(tokens) - 1, limit)
            if length <= most:
                continue
            for common, lender in islice(self.prefixes.matches(realm, tokens, length), LENDERS_TRIED):
                if common <= most:
                    break
                reach = 0 if lender is session else self._reach(lender, common)
                if reach > most:
                    best, most = lender, reach
        return None if best is None else (best, most)

    def _reach(self, lender: Session, length: int) -> int:
        cache, row = self._engine.memory.place(lender)
        if cache is None or any(store.in_round for store in cache.stores):
            return 0
        return reachable(cache, row, lender.trail, length)

    def _affords(self, lender: Session) -> bool:
        """There is room for what lending copies: too many trunks of the lender's are made into one first."""
        cache, _ = self._engine.memory.place(lender)
        assert cache is not None
        if cache.rows > 1 or not _shares(lender.served):
            return True  # the borrower's copy alone, which is admitted
        needed = cache.branch_bytes(self._engine.shared_min)
        if self._is_busy(lender):  # what it takes next begins with columns of its own, which nobody promised
            needed += CAPACITY_STEP * int(cache.bytes_per_token)
        return self._engine.memory.has_room(needed)

    def _is_busy(self, session: Session) -> bool:
        return any(request.session is session for request in self._engine.requests.values())

    def _copies(self, lender: Session) -> bool:
        """It can't lend without a copy."""
        cache, _ = self._engine.memory.place(lender)
        return cache is None or cache.rows > 1 or not _shares(lender.served)

    def _loan(self, tokens: list[int], lender: Session, length: int) -> Session:
        """KV of the first `length` of these tokens, in a session that nobody knows."""
        if lender.tokens[:length] != tokens[:length]:
            raise AssertionError("the index of prefixes names a session of other tokens")
        cache, row = self._engine.memory.place(lender)
        assert cache is not None
        loan = Session("", lender.served, trail=lender.trail.copy())
        loan.cache = cache if cache.rows == 1 else cache.extract_row(row)
        if cache.rows == 1 or _shares(lender.served):
            loan.cache = self.branched(lender.served, loan.cache)
        loan.go_back(length)
        self._engine.memory.changed(lender)
        if not self._is_busy(lender):
            # What was its own is shared now; who has a request tells with its next answer.
            self._engine.emit(Journals([self._engine.journal(lender, lender.length)]))
        return loan

    def branched(self, served: Served, cache: SessionCache) -> SessionCache:
        """A lone row's twin: it shares what it can, where the model's reads allow it, else it is a copy."""
        return cache.branch(self._engine.shared_min) if _shares(served) else cache.fork()


def _shares(served: Served) -> bool:
    return served.caps.fork == "shared"


def _limit(one: Fill, other: Fill) -> int:
    """How many tokens the two may share: as `Session.realms` will be when their changes are carried out."""
    if one.session.realm == other.session.realm:
        return NO_LIMIT
    if one.session.trunk is None or one.session.trunk_realm != other.session.trunk_realm:
        return 0
    return min(one.session.trunk_length, other.session.trunk_length, one.change.keep, other.change.keep)
