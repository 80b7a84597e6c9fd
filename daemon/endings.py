"""The ends of requests: what they mean for sessions, and those that the broker words itself. Pure."""

from __future__ import annotations

from stateroom.client.errors import EngineLost, Mismatch, NotFound
from stateroom.client.protocol import (
    OPERATIONS,
    Body,
    CloseResult,
    Decode,
    DecodeResult,
    ErrorBody,
    Event,
    ForkResult,
    LengthResult,
    OpenResult,
    Prefill,
    PublishResult,
    Receipt,
    ScoreResult,
    Usage,
)
from stateroom.daemon.catalog import Catalog
from stateroom.daemon.lifecycle import SessionEvent, SessionState
from stateroom.daemon.metrics import Metrics
from stateroom.daemon.recovery import LIFTS
from stateroom.daemon.session import NO_ENGINE, Session
from stateroom.daemon.tickets import Ticket

Told = list[tuple[Event, str]]  # events, each with the owner it is for


class Settlement:
    """Brings the catalog up to date with the final answer of a request."""

    def __init__(self, catalog: Catalog, metrics: Metrics) -> None:
        self._catalog, self._metrics = catalog, metrics

    def settle(self, ticket: Ticket, body: Body) -> Told:
        """Moves the request's sessions to where this end leads; gives what watchers should hear."""
        session = ticket.session
        if session is None:
            return []
        refused = isinstance(body, ErrorBody)
        if ticket.op == "adopt":
            if isinstance(body, ErrorBody):
                session.generation = NO_ENGINE
                if body.code != "engine_lost":  # the worker would not have it; else it merely died
                    session.refusal = unfit(session, body)
            elif session.lost:
                session.lost = False
                self._metrics.count("sessions_recovered")
            return []
        if ticket.op in ("close", "unpublish"):
            return self._dead(session)
        if ticket.reads:
            return []
        if ticket.forks_trunk:
            return self._made(ticket, body)
        session.running = session.running_op = None
        self._catalog.touch(session)
        if session.quarantined is not None and _lifts(ticket, body):
            session.quarantined = None
            self._catalog.record(session)
        if ticket.op in ("open", "restore"):
            if isinstance(body, OpenResult):
                session.kinds = session.kinds or body.caps.kv  # the journal tells how it is stored by now
            return self._born([session], refused)
        session.advance(SessionEvent.END)
        return self._made(ticket, body)

    def _made(self, ticket: Ticket, body: Body) -> Told:
        session = ticket.session
        assert session is not None
        if isinstance(body, ForkResult | PublishResult):
            for child in ticket.children:
                child.tokens, child.chat = session.tokens[:], session.chat
                child.kinds, child.kv = session.kinds, session.kv
                child.generation, child.resident = session.generation, session.resident
        return self._born(ticket.children, isinstance(body, ErrorBody))

    def _born(self, sessions: list[Session], refused: bool) -> Told:
        told: Told = []
        for session in sessions:
            session.advance(SessionEvent.REFUSED if refused else SessionEvent.OPENED)
            if refused:
                self._catalog.remove(session)
                continue
            self._catalog.opened(session)
            if session.published_as is not None:
                details = {"as": session.published_as}
                event = Event(event="trunk_published", model=session.model, details=details)
                told.append((event, session.owner))
            else:
                self._metrics.count("sessions_opened")
                event = Event(event="session_opened", session=session.id, model=session.model)
                told.append((event, session.owner))
        return told

    def _dead(self, session: Session) -> Told:
        session.advance(SessionEvent.END)
        session.running = session.running_op = None
        self._catalog.remove(session)
        if session.published_as is not None:
            details = {"as": session.published_as}
            return [(Event(event="trunk_unpublished", model=session.model, details=details), session.owner)]
        self._metrics.count("sessions_closed")
        return [(Event(event="session_closed", session=session.id, model=session.model), session.owner)]


def _lifts(ticket: Ticket, body: Body) -> bool:
    """Its session has another content now, and all of that was computed."""
    return ticket.op in LIFTS and isinstance(body, LengthResult) and body.finish == "done"


def unfit(session: Session, why: ErrorBody) -> ErrorBody:
    """What is told of a session that a worker would not take over: its model isn't what it was."""
    return Mismatch(
        f"The session doesn't fit the model that is called {session.model} now ({why.message}) Serve the one "
        "that it was made with, or close it.",
        field="session",
        length=session.length,
    ).body()


def streams(ticket: Ticket) -> bool:
    """Whether the request has replies before its final one."""
    if isinstance(ticket.request, Decode):
        return ticket.request.stream
    if isinstance(ticket.request, Prefill):
        return ticket.request.progress
    return ticket.op in OPERATIONS and OPERATIONS[ticket.op].streams


def cut_short(ticket: Ticket, why: str) -> Body:
    """The result of a request that is cancelled while no engine has it: what was told of it stays."""
    session = ticket.session
    length = session.length if session else 0
    if ticket.op == "decode":
        drawn = session.tokens[ticket.base :].tolist() if session and ticket.base is not None else []
        usage = Usage(decoded=len(drawn))
        text = "".join(ticket.texts)
        return DecodeResult(finish="cancelled", tokens=drawn, text=text, length=length, usage=usage)
    if ticket.op == "score":
        return ScoreResult(tokens=[], logprobs=[], total=0.0)
    reused = length if session and session.resident else 0
    receipt = Receipt(reused=reused, source="session" if reused else "none", why=why)
    return LengthResult(length=length, receipt=receipt, finish="cancelled")


def refused_again(ticket: Ticket, body: Body) -> Body:
    """What a worker answered that was not the first to have the request.

    A refusal says that nothing changed; behind what the first one drew, that isn't so.
    """
    session = ticket.session
    if not isinstance(body, ErrorBody) or not ticket.resumes or session is None or ticket.base is None:
        return body
    if ticket.op != "decode" or session.length == ticket.base or body.code in ("numeric", "internal"):
        return body
    return lost(ticket, f"and could not go on: {body.message}")


def lost(ticket: Ticket, reason: str) -> Body:
    """The end of a request whose worker died. A `close` has what it wanted."""
    if ticket.op in ("close", "unpublish"):
        return CloseResult(freed_bytes=0)
    if ticket.session is not None and ticket.session.state is SessionState.CLOSED:
        return CLOSED
    if ticket.session is None:  # an `import`
        message, length = f"The engine stopped while it took the file in ({reason}); send it again.", 0
    elif ticket.op in ("open", "restore"):
        message, length = f"The engine stopped while this was opened ({reason}); send it again.", 0
    else:
        message = f"The engine stopped under this request ({reason}); the session is kept, send it again."
        length = ticket.session.length
    return EngineLost(message, length=length).body()


def abandoned(ticket: Ticket, body: Body) -> list[Session]:
    """What an `open` or `fork` made that nobody can ever use: its client is gone, and it has no name.

    Its id was told to nobody, so it would stay until the daemon ends.
    """
    if not ticket.unheard or ticket.session is None:
        return []
    made = {OpenResult: [ticket.session], ForkResult: ticket.children}.get(type(body), [])
    return [session for session in made if session.name is None]


# Of a read, or a fork of a trunk: it doesn't have the session, which may be closed while it waits.
CLOSED = NotFound("It was closed before this began.", field="session").body()

# For the books alone: the client of a request that had not begun went away, and nobody will read it.
GONE = ErrorBody(code="not_found", message="The client went away before this began.")
