"""Room in the KV budget: what is idle goes down the ladder, and who needs the room waits for it.

A request that is refused by the budget is held, not answered, where room can be made: drafts and checkpoints
of idle sessions give way at once (`memory.py`), then whole sessions, the least recently used first, from the
device to disk, or to their tokens where there is no disk, none to spare, or too little to be worth a read.
Then the request is taken again from its start. Nothing in use is touched: where running requests have the
room, it waits for one of them to end, or for a larger budget. Every wait ends, with `capacity` and the
figures: after `ROOM_WAIT_S` in which nobody gave way, after `ROOM_WAIT_MOST_S` whatever happens.

Those that wait are looked at in the order in which they came, whenever something has changed. One that fits
may overtake another that still doesn't.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from stateroom.daemon.engine.demotion import freeable, plan
from stateroom.daemon.engine.memory import NoRoom
from stateroom.daemon.engine.session import Session
from stateroom.daemon.link import Journals, Kept, Left, Short, Within

if TYPE_CHECKING:
    from stateroom.daemon.engine.engine import Engine

HELD_MAX = 256  # requests that wait for room; more are refused
ROOM_WAIT_S = 10.0  # without anybody having given way, until a request that waits is refused
ROOM_WAIT_MOST_S = 60.0  # though others give way, for whoever overtakes it
KEEPS_AT_ONCE = 2  # sessions on their way to disk: one is copied from the device while another is written
KEEP_MIN = 64  # tokens; fewer are computed again sooner than they are read


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits for room.

    Args:
        session: whose it is, where there is one yet; for it others give way, not the other way round.
        again: takes it from the start; raises `NoRoom`, and nothing has changed, or is done with it.
        give_up: ends it as cancelled.
        fail: ends it with an error.
        planned: its plan counts on what the session has, which therefore gives way to nobody.
    """

    rid: int
    session: Session | None
    again: Callable[[], None]
    give_up: Callable[[], None]
    fail: Callable[[Exception], None]
    planned: bool = False


@dataclass(slots=True, eq=False)
class _Held:
    waiter: Waiter
    refusal: NoRoom
    since_ms: float
    asked: int = 0  # bytes of a larger budget

    @property
    def theirs(self) -> set[Session | None]:
        return {*self.refusal.theirs, self.waiter.session}


class Ladder:
    """Of one engine, whose budget is in `memory.budget_bytes`.

    Attributes:
        demoted: sessions that gave way, since the start.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._held: dict[int, _Held] = {}  # by rid, the first come first
        self._trying: _Held | None = None  # is being taken again
        self._leaving: dict[Session, float] = {}  # on their way to disk: when they were last used
        self._next: list[Session] = []  # to leave after those
        self._why: Left = "memory"  # they do
        self._limit: int | None = None  # a budget that is to be told once it is kept
        self._most = 0  # that the budget may become, as the broker said
        self._seen: object = None  # what there was when nobody who waits could be helped
        self._wished = 0  # bytes
        self._progress_ms = 0.0  # when a session last gave way
        self.demoted = 0

    # ------------------------------------------------------------ who waits

    def hold(self, waiter: Waiter, refusal: NoRoom) -> None:
        """Takes over a request that was refused; it is answered by its callbacks, maybe at once."""
        if len(self._held) >= HELD_MAX:
            waiter.fail(refusal)
            return
        now_ms = self._engine.clock_ms()
        self._held[waiter.rid] = _Held(waiter, refusal.bare(), now_ms)
        self._engine.recorder.wait(waiter.rid, "memory", now_ms, needed_bytes=refusal.needed_bytes)
        self._seen = None
        self.turn()

    def holds(self, session: Session) -> bool:
        """A request of the session waits here."""
        return any(h.waiter.session is session for h in self._held.values() if h is not self._trying)

    @property
    def pinned(self) -> set[Session]:
        """Sessions on whose KV a request counts that waits."""
        return {h.waiter.session for h in self._held.values() if h.waiter.planned and h.waiter.session}

    @property
    def rids(self) -> list[int]:
        """Requests that wait, the first come first."""
        return list(self._held)

    def cancel(self, rid: int) -> None:
        """Ends a request that waits, now. Others are passed over."""
        held = self._held.pop(rid, None)
        if held is not None:
            self._next, self._seen = [], None  # who was to leave for it may stay
            held.waiter.give_up()

    def wish(self, nbytes: int) -> None:
        """It would be of use, though nobody waits for it: who is idle gives it where there is a disk."""
        if self._engine.disk is not None:
            self._wished = max(self._wished, nbytes)

    # ------------------------------------------------------------ the budget

    def limit(self, nbytes: int, most: int = 0) -> None:
        """The budget from now on, and what it may become; `Within` is told once that is kept."""
        self._engine.memory.budget_bytes = nbytes
        self._limit, self._most, self._seen = nbytes, most, None
        for held in self._held.values():
            held.asked = 0
        self.turn()

    # ------------------------------------------------------------ a turn

    def turn(self) -> None:
        """Looks whether who waits can go on, or has waited long enough."""
        if self._trying is not None:
            return  # one that is being taken again has another one wait
        self._send_off()
        if not self._held and self._limit is None:
            self._fulfil()
            return
        seen = (self._engine.memory.free_bytes, tuple(self._engine.requests))
        if not self._leaving and seen != self._seen:
            self._keep_within()
            for held in list(self._held.values()):
                self._serve(held)
            self._seen = (self._engine.memory.free_bytes, tuple(self._engine.requests))
        now_ms = self._engine.clock_ms()
        for held in list(self._held.values()):
            waited_ms = now_ms - max(held.since_ms, self._progress_ms)
            if waited_ms >= ROOM_WAIT_S * 1000.0 or now_ms - held.since_ms >= ROOM_WAIT_MOST_S * 1000.0:
                self._refuse(held)

    def _fulfil(self) -> None:
        """What was wished for, from the longest idle; it comes to more than one checkpoint mostly."""
        if not self._wished or self._leaving:
            return
        lacking, self._wished = self._wished - self._engine.memory.free_bytes, 0
        if lacking > 0:
            idle, parts = self._engine.memory.idle()
            self._demote(plan(idle, parts, lacking) or [], "memory")

    def _keep_within(self) -> None:
        memory = self._engine.memory
        while self._limit is not None and not self._leaving:
            lacking = -memory.free_bytes
            if lacking <= 0:
                self._engine.emit(Within(self._limit))
                self._limit = None
                return
            idle, parts = memory.idle()
            gone = plan(idle, parts, min(lacking, freeable(idle, parts))) or []
            if not self._demote(gone, "budget"):
                return

    def _serve(self, held: _Held) -> None:
        """Takes a request again once there is room, for which others give way."""
        while held.waiter.rid in self._held and not self._leaving:
            lacking = held.refusal.needed_bytes - self._engine.memory.free_bytes
            if lacking <= 0:
                self._take_again(held)
                continue
            idle, parts = self._engine.memory.idle(held.theirs)
            gone = plan(idle, parts, lacking)
            if gone is None:
                self._ask(held, lacking - freeable(idle, parts))
                return
            if not self._demote(gone, "memory"):
                return

    def _take_again(self, held: _Held) -> None:
        self._trying = held
        try:
            held.waiter.again()
        except NoRoom as refusal:  # it needs more than before: who was to lend to it has given way
            held.refusal = refusal.bare()
        except Exception as error:
            del self._held[held.waiter.rid]
            held.waiter.fail(error)
        else:
            del self._held[held.waiter.rid]
        finally:
            self._trying = None

    def _ask(self, held: _Held, short: int) -> None:
        """All that is idle isn't enough: it waits for what runs, and for more budget; or there is no hope."""
        budget = self._engine.memory.budget_bytes or 0
        grows = self._most > budget
        if held.refusal.needed_bytes > max(self._most, budget) or not (grows or self._engine.requests):
            self._refuse(held)
        elif grows and short > held.asked:
            held.asked = short
            self._engine.emit(Short(short))

    def _refuse(self, held: _Held) -> None:
        del self._held[held.waiter.rid]
        self._next, self._seen = [], None
        idle, parts = self._engine.memory.idle(held.theirs)
        free = self._engine.memory.free_bytes
        held.waiter.fail(held.refusal.after(free, freeable(idle, parts)))

    # ------------------------------------------------------------ giving way

    def _demote(self, ids: list[str], why: Left) -> bool:
        """Whether somebody has gone by now, or is about to."""
        before, self._why = self.demoted, why
        self._next = [self._engine.sessions[each] for each in ids]
        self._send_off()
        return bool(self._leaving) or self.demoted > before

    def _send_off(self) -> None:
        """The next ones leave, at once or by way of the disk."""
        while self._next and len(self._leaving) < KEEPS_AT_ONCE:
            session = self._next.pop(0)
            if not self._is_idle(session):
                continue
            disk = self._engine.disk
            if disk is None or session.stored < KEEP_MIN:
                self._drop(session, self._why)
            else:
                self._leaving[session] = session.used_ms
                disk.keep(session, partial(self._kept, session, self._why))

    def _kept(self, session: Session, why: Left, outcome: Kept | Exception) -> None:
        """It is on disk, or can't be: then its tokens are what stays. Whoever used it since keeps it here."""
        from stateroom.daemon.engine.disk import InUse  # which imports who imports this

        unused = self._leaving.pop(session) == session.used_ms
        if unused and not isinstance(outcome, InUse) and self._is_idle(session):
            self._drop(session, why)
        self._seen = None

    def _is_idle(self, session: Session) -> bool:
        there = self._engine.sessions.get(session.id) is session
        return there and session not in self._engine.busy and session not in self.pinned

    def _drop(self, session: Session, why: Left) -> None:
        session.drop_kv(why)
        if session.guesser is not None:
            session.guesser.drafts = None
        self.demoted += 1
        self._progress_ms = self._engine.clock_ms()
        self._engine.emit(Journals([self._engine.journal(session, session.length)]))
