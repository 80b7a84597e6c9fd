"""Models that nobody uses give their memory back; their sessions are parked, and come back when touched."""

from __future__ import annotations

from structlog.typing import FilteringBoundLogger

from stateroom.daemon.clock import Clock
from stateroom.daemon.supervisor import Engine, Supervisor
from stateroom.daemon.tickets import Tickets


class Unloading:
    """Looks for them about once a second.

    Args:
        after_s: without a request for so long; None: never.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        tickets: Tickets,
        clock: Clock,
        log: FilteringBoundLogger,
        after_s: float | None,
    ) -> None:
        self._supervisor, self._tickets, self._clock, self._log = supervisor, tickets, clock, log
        self._after_s = after_s

    def tick(self) -> None:
        if self._after_s is None:
            return
        now_s = self._clock()
        busy = {ticket.model for ticket in self._tickets}
        in_use = {ticket.model for ticket in self._tickets if not ticket.looks}
        for engine in self._supervisor.engines:
            if engine.id in in_use:
                engine.used_s = now_s
            elif engine.ready and engine.id not in busy and now_s - engine.used_s >= self._after_s:
                self._unload(engine)

    def _unload(self, engine: Engine) -> None:
        idle_s = round(self._clock() - engine.used_s)
        self._log.info("model unloaded", model=engine.id, idle_s=idle_s)
        self._supervisor.unload(engine, f"nobody used it for {idle_s} s")
