"""`trace`: the timeline of one request, from what the broker saw and what its worker remembers.

The worker is asked, and answers between two steps; who asked waits for that `WAIT_S` at the most,
and then has the broker's part alone. Both read one clock, the machine's monotonic one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from stateroom.client.errors import Capacity, NotFound, Unsupported
from stateroom.client.protocol import Trace, TraceResult
from stateroom.daemon.clock import Clock
from stateroom.daemon.link import Recall, Recorded
from stateroom.daemon.peers import Peer
from stateroom.daemon.recorder import Record, timeline
from stateroom.daemon.supervisor import Engine, Supervisor
from stateroom.daemon.tickets import Ticket, Tickets, Told
from stateroom.daemon.view import View

WAIT_S = 5.0  # for the worker's part: the steps of a busy machine are long, and then a trace is wanted
WAITING_MAX = 16  # traces that wait for workers; each takes one a few milliseconds
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class _Asked:
    ticket: Ticket
    found: Told
    generation: int
    until_s: float


class Traces:
    """`wake(s)` asks for a `tick` in so many seconds."""

    def __init__(
        self,
        tickets: Tickets,
        view: View,
        supervisor: Supervisor,
        clock: Clock,
        wake: Callable[[float], None],
    ) -> None:
        self._tickets, self._view, self._supervisor = tickets, view, supervisor
        self._clock, self._wake = clock, wake
        self._asked: dict[int, _Asked] = {}  # by the rid of the `trace`

    def begin(self, ticket: Ticket, peer: Peer, request: Trace) -> None:
        """Answers a `trace`, at once or when the worker has.

        Raises:
            NotFound: there is no such request any more, or the client may not see it.
            Unsupported: nothing is recorded.
            Capacity: too many wait for an answer.
        """
        found = self._find(request.request)
        if found is None or not self._view.sight(peer, request.everyone)(found.info.owner):
            raise NotFound(
                "No such request is remembered, or it isn't yours; `requests` tells which there are, as "
                "`stateroom trace` does.",
                field="request",
            )
        if not found.record.on:
            raise Unsupported("This daemon records nothing: it was started with --no-record.")
        engine = self._engine(found.record)
        if engine is None:
            self._answer(ticket, found, None)
            return
        if len(self._asked) >= WAITING_MAX:
            raise Capacity("Too many traces are being made; try again.", retry_after_s=RETRY_AFTER_S)
        until_s = self._clock() + WAIT_S
        self._asked[ticket.rid] = _Asked(ticket, found, engine.generation, until_s)
        ticket.on_end = partial(self._over, ticket.rid)
        engine.send(Recall(request.request))
        self._wake(WAIT_S)

    def take(self, generation: int, recorded: Recorded | None) -> None:
        """What a worker remembers; None: it is gone."""
        for asked in list(self._asked.values()):
            rid = asked.found.info.rid
            if asked.generation == generation and (recorded is None or recorded.rid == rid):
                self._answer(asked.ticket, self._find(rid) or asked.found, recorded)

    def tick(self) -> None:
        """Answers those who have waited long enough."""
        now_s = self._clock()
        for asked in list(self._asked.values()):
            if now_s >= asked.until_s:
                self._answer(asked.ticket, asked.found, None)
        if self._asked:
            self._wake(max(min(asked.until_s for asked in self._asked.values()) - now_s, 0.0))

    def _over(self, rid: int) -> None:
        """A `trace` had its answer, or was cancelled."""
        del self._asked[rid]

    def _find(self, rid: int) -> Told | None:
        ticket = self._tickets.get(rid)
        if ticket is not None:
            return Told(ticket.started_s, self._view.request(ticket), ticket.record)
        ended = self._tickets.ended(rid)
        return None if ended is None else ended.aged(self._clock())

    def _engine(self, record: Record) -> Engine | None:
        """The engine whose worker had the request last, if that worker is still there."""
        if not record.workers:
            return None
        model, generation = record.workers[-1]
        engine = self._supervisor.known(model)
        there = engine is not None and engine.ready and engine.generation == generation
        return engine if there else None

    def _answer(self, ticket: Ticket, found: Told, recorded: Recorded | None) -> None:
        record = found.record
        spans = timeline(found.began_s, record.seen(), recorded)
        dropped = record.dropped + (0 if recorded is None else recorded.dropped)
        missing = self._missing(record, recorded)
        self._tickets.reply(
            ticket, TraceResult(request=found.info, spans=spans, dropped=dropped, missing=missing)
        )

    def _missing(self, record: Record, recorded: Recorded | None) -> str | None:
        """What of the workers' part isn't told, in words."""
        gone = [f"{model} #{generation}" for model, generation in record.workers]
        if recorded is not None:
            gone.pop()
        elif self._engine(record) is not None:
            return f"The worker did not answer within {WAIT_S:g} s: it is busy, or it hangs. Try again."
        if not gone:
            return None
        return f"What these workers remembered went with them: {', '.join(gone)}."
