"""`watch`: who wants to hear of what happens. Sessions' events go to who may see them, engines' to all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from stateroom.client.protocol import Event, StatsResult, Watch, WatchResult
from stateroom.client.wire import to_wire
from stateroom.daemon.clock import Clock
from stateroom.daemon.tickets import Ticket, Tickets

FIGURES_MAX = 16  # watchers told the figures in one tick; some milliseconds, in which nothing else happens
REST_S = 0.05  # until the next tick, at the least


@dataclass(slots=True, eq=False)
class _Watcher:
    ticket: Ticket
    watch: Watch
    sees: Callable[[str], bool]
    stats_due_s: float
    events: int = 0


class Watchers:
    """The watches that go on, by rid.

    `stats(owner)` tells the figures; `wake(s)` asks for a `tick` in so many seconds.
    """

    def __init__(
        self,
        tickets: Tickets,
        clock: Clock,
        stats: Callable[[str], StatsResult],
        wake: Callable[[float], None],
    ) -> None:
        self._tickets, self._clock, self._stats, self._wake = tickets, clock, stats, wake
        self._watchers: dict[int, _Watcher] = {}

    def __len__(self) -> int:
        return len(self._watchers)

    def add(self, ticket: Ticket, watch: Watch, sees: Callable[[str], bool]) -> None:
        """`sees(owner)`: whether it may hear of that one's sessions."""
        every_s = watch.stats_every_s
        self._watchers[ticket.rid] = _Watcher(ticket, watch, sees, self._clock() + (every_s or 0))
        if every_s is not None:
            self._wake(every_s)

    def end(self, ticket: Ticket) -> None:
        """Gives a watch its final reply."""
        watcher = self._watchers.pop(ticket.rid)
        self._tickets.reply(ticket, WatchResult(events=watcher.events))

    def drop(self, ticket: Ticket) -> None:
        """Its final reply was given elsewhere."""
        self._watchers.pop(ticket.rid, None)

    def publish(self, event: Event, owner: str | None = None) -> None:
        """Tells the watchers. `owner`: whose session it is about; None tells everyone."""
        for watcher in list(self._watchers.values()):
            if owner is None:
                self._tell(watcher, event)
            elif watcher.watch.sessions and watcher.sees(owner):
                named = {"owner": owner} if watcher.watch.everyone else {}
                self._tell(watcher, replace(event, details=event.details | named))

    def tick(self) -> None:
        """Sends the figures that are due, the longest due first; of many, some wait for the next tick."""
        now_s = self._clock()
        wanted = [w for w in self._watchers.values() if w.watch.stats_every_s is not None]
        due = sorted((w for w in wanted if now_s >= w.stats_due_s), key=lambda w: w.stats_due_s)
        told: dict[str, dict[str, Any]] = {}  # by owner
        for watcher in due[:FIGURES_MAX]:
            watcher.stats_due_s = now_s + (watcher.watch.stats_every_s or 0)
            owner = watcher.ticket.owner
            if owner not in told:
                told[owner] = to_wire(self._stats(owner))
            self._tell(watcher, Event(event="stats", details=told[owner]))
        if wanted:
            self._wake(max(REST_S, min(w.stats_due_s for w in wanted) - now_s))

    def _tell(self, watcher: _Watcher, event: Event) -> None:
        if watcher.ticket.rid in self._watchers:  # telling one may have ended another of the same client
            watcher.events += 1
            self._tickets.reply(watcher.ticket, event)
