"""Requests that wait for an engine, by model: which of them may go to it, and in which order. Pure.

All may, unless the engine has a suspect (`recovery`). That one is on *trial*: nothing that computes is sent
beside it until it got on or ended, or, while it may well be innocent, until `TRIAL_S` are over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from stateroom.daemon.clock import Clock
from stateroom.daemon.recovery import DEATHS_MAX, Suspicion, computes, order
from stateroom.daemon.session import Session
from stateroom.daemon.tickets import Ticket

TRIAL_S = 30.0  # for which others wait; a long prompt tells nothing until it is computed


@dataclass(frozen=True, slots=True)
class Trial:
    ticket: Ticket
    until_s: float | None  # None: until it got on or ended


class Queues:
    """What waits, and who is on trial. An engine is told of `sent`, `ended` and `down` as they happen."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.suspicion = Suspicion()
        self._waiting: dict[str, deque[Ticket]] = {}
        self._trials: dict[str, Trial] = {}

    def __iter__(self) -> Iterator[Ticket]:
        return (ticket for queue in self._waiting.values() for ticket in queue)

    def of(self, model: str) -> list[Ticket]:
        return list(self._waiting.get(model, ()))

    def add(self, model: str, ticket: Ticket) -> None:
        self._waiting.setdefault(model, deque()).append(ticket)

    def put_first(self, model: str, tickets: list[Ticket]) -> None:
        """Before all others, in the order in which they are given."""
        self._waiting.setdefault(model, deque()).extendleft(reversed(tickets))

    def drop(self, ticket: Ticket) -> None:
        """It waits no longer, if it did."""
        queue = self._waiting.get(ticket.model or "")
        if queue is not None and ticket in queue:
            queue.remove(ticket)

    def take(self, model: str, only: str | None = None) -> list[Ticket]:
        """All that waits, or all of one operation, which waits no longer."""
        taken = [ticket for ticket in self.of(model) if only is None or ticket.op == only]
        for ticket in taken:
            self._waiting[model].remove(ticket)
        return taken

    def open_to(self, ticket: Ticket, model: str) -> bool:
        """Whether it may go to the engine now, if that is ready."""
        return model not in self._trials or not computes(ticket)

    def going(self, model: str) -> Iterator[Ticket]:
        """What may go now, one by one, as long as those that were given leave room."""
        queue = self._waiting.get(model, deque())
        for ticket in order(queue, self.suspicion):
            if not self.open_to(ticket, model):
                return
            if ticket in queue:  # else it ended with one before it
                queue.remove(ticket)
                yield ticket

    # ------------------------------------------------------------ trials

    def sent(self, ticket: Ticket, model: str) -> None:
        if ticket.session is None or not computes(ticket) or not self.suspicion.is_suspect(ticket.session.id):
            return
        known = self.suspicion.deaths(ticket.session.id) >= DEATHS_MAX
        self._trials[model] = Trial(ticket, None if known else self._clock() + TRIAL_S)

    def got_on(self, session: Session, tokens: int | None) -> bool:
        """It drew so many tokens, or went on otherwise (None). Whether others may go now."""
        if not len(self.suspicion) or not self.suspicion.got_on(session.id, tokens):
            return False
        trial = self._trials.get(session.model)
        return trial is not None and trial.ticket.session is session and self.ended(trial.ticket)

    def ended(self, ticket: Ticket) -> bool:
        """Whether others may go now, since it was on trial."""
        trial = self._trials.get(ticket.model or "")
        if trial is None or trial.ticket is not ticket:
            return False
        del self._trials[ticket.model or ""]
        return True

    def overdue(self) -> list[str]:
        """The models whose trial took long enough: it is over."""
        now_s = self._clock()
        late = [
            m for m, trial in self._trials.items() if trial.until_s is not None and now_s >= trial.until_s
        ]
        for model in late:
            del self._trials[model]
        return late

    def down(self, model: str) -> None:
        """The engine's worker is gone, and with it the trial."""
        self._trials.pop(model, None)
