"""Verifications: which session is next, when the daemon begins one by itself, and who hears of it. Pure.

What may be picked is idle and has its KV in a worker; it stays usable meanwhile. The one that was looked at
longest ago is first.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from stateroom.client.errors import NotFound
from stateroom.client.protocol import Event, VerifyResult
from stateroom.daemon.catalog import Catalog
from stateroom.daemon.clock import Clock
from stateroom.daemon.lifecycle import SessionState
from stateroom.daemon.metrics import Metrics
from stateroom.daemon.session import Session


class Engine(Protocol):
    """What is asked of a `supervisor.Engine`."""

    generation: int

    @property
    def ready(self) -> bool: ...


class Checks:
    """Picks sessions to verify, goes round all of them, and judges results.

    Args:
        engine: the engine of a model, if it has one.
        every_s: from the beginning of one round to that of the next; None: there are none.
    """

    def __init__(
        self,
        catalog: Catalog,
        engine: Callable[[str], Engine | None],
        clock: Clock,
        metrics: Metrics,
        every_s: float | None = None,
    ) -> None:
        self._catalog, self._engine, self._clock, self._metrics = catalog, engine, clock, metrics
        self.every_s = every_s
        self._due_s = clock() + (every_s or 0.0)
        self._round: deque[str] = deque()  # ids of the sessions that the round under way has yet to look at
        self._turns = itertools.count(1)
        self._last: dict[str, int] = {}  # when a session was last picked, by turns

    def pick(self) -> Session:
        """The session to verify next, of whatever owner.

        Raises:
            NotFound: none is idle and has KV.
        """
        session = min(self._ready(self._catalog), key=self._age, default=None)
        if session is None:
            raise NotFound("There is no idle session with KV right now.", field="session")
        self._picked(session)
        return session

    def due(self) -> Session | None:
        """The next session of the round under way; call it while none is being verified."""
        if self.every_s is None:
            return None
        if not self._round and self._clock() >= self._due_s:
            self._due_s = self._clock() + self.every_s
            self._round.extend(session.id for session in sorted(self._ready(self._catalog), key=self._age))
        while self._round:
            session = self._catalog.get(self._round.popleft())
            if session is not None and any(self._ready([session])):
                self._picked(session)
                return session
        return None

    def judge(self, session: Session, result: VerifyResult) -> list[tuple[Event, str]]:
        """Counts what a verification found; gives what its session's owner should hear."""
        if result.finish == "cancelled":
            return []
        self._metrics.count("verified")
        if result.healthy:
            return []
        self._metrics.count("verify_failed")
        details = {
            "max_abs_logit_error": result.max_abs_logit_error,
            "max_abs_logit": result.max_abs_logit,
            "argmax_agree": result.argmax_agree,
            "bound": result.bound,
        }
        event = Event(event="verify_failed", session=session.id, model=session.model, details=details)
        return [(event, session.owner)]

    def _ready(self, sessions: Iterable[Session]) -> list[Session]:
        found = []
        for session in sessions:
            if session.state is SessionState.IDLE and session.resident and session.length:
                engine = self._engine(session.model)
                if engine is not None and engine.ready and engine.generation == session.generation:
                    found.append(session)
        return found

    def _age(self, session: Session) -> int:
        return self._last.get(session.id, 0)

    def _picked(self, session: Session) -> None:
        self._last[session.id] = next(self._turns)
        if len(self._last) > 2 * len(self._catalog):
            self._last = {id: turn for id, turn in self._last.items() if self._catalog.get(id) is not None}
