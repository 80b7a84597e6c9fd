"""Requests that need an engine: one at a time in a session, held, sent, superseded, cancelled, ended.

Every change goes session table first (`lifecycle.SESSIONS`), then ticket, then engine. `_ended` is the one
place where a request that had a session lets go of it.

A read (`tokens`) goes past all this: it leaves the session to whoever has it, so that many may run at once.

A request is *held* while its engine starts (`queues`), or, for a `sync` or `close`, while the older request
of its session ends (`Session.held`).
"""

from __future__ import annotations

import secrets

from structlog.typing import FilteringBoundLogger

from stateroom.client.errors import Busy, EngineLost, NotFound, ShuttingDown, StateroomError, Unsupported
from stateroom.client.protocol import (
    Body,
    CloseResult,
    Decode,
    ErrorBody,
    Event,
    Fork,
    ModelResult,
    Open,
    Publish,
    Restore,
    Result,
    Save,
    TokenEvent,
    Verify,
    VerifyResult,
)
from stateroom.client.protocol import Close as CloseRequest
from stateroom.daemon.archive import Archive
from stateroom.daemon.catalog import Catalog
from stateroom.daemon.checks import Checks
from stateroom.daemon.endings import (
    CLOSED,
    GONE,
    Settlement,
    abandoned,
    cut_short,
    lost,
    refused_again,
    streams,
)
from stateroom.daemon.lifecycle import EngineState, RequestEvent, RequestState, SessionEvent, SessionState
from stateroom.daemon.link import (
    Adopt,
    Answer,
    CancelCommand,
    Command,
    Doing,
    Journal,
    Journals,
    Kept,
    Shelved,
)
from stateroom.daemon.metrics import Metrics
from stateroom.daemon.peers import Peer
from stateroom.daemon.queues import Queues
from stateroom.daemon.recovery import (
    QUARANTINED,
    computes,
    goes_on,
    seeded,
    why_quarantined,
)
from stateroom.daemon.session import NO_ENGINE, Session
from stateroom.daemon.shown import short
from stateroom.daemon.store.rows import SnapshotRow
from stateroom.daemon.supervisor import Engine, Supervisor
from stateroom.daemon.tickets import Ticket, Tickets
from stateroom.daemon.watchers import Watchers

SUPERSEDED = ("decode", "prefill", "sync")  # what a newer `sync` ends instead of getting `busy`
CUT_SHORT = ("decode", "prefill", "sync", "trim", "score")  # whose result tells how far they got
HELD_ENDS = ("decode", "prefill", "sync")  # what a cancel ends at once while no engine has it
SHORT = (
    "fork", "publish", "unpublish", "tokens", "close", "adopt", "export", "import", "trace",
)  # fmt: skip  # over before a cancel could arrive
RIDS_LOGGED = 64  # in one entry
PARENTS_MAX = 16  # of a session's ancestors, how many it names
WITH_ENGINE = (RequestState.SENT, RequestState.CANCELLING, RequestState.CUT, RequestState.ORPHANED)


class Work:
    """Moves requests between sessions and engines. Implements `supervisor.Listener`."""

    def __init__(
        self,
        tickets: Tickets,
        catalog: Catalog,
        supervisor: Supervisor,
        watchers: Watchers,
        archive: Archive,
        metrics: Metrics,
        log: FilteringBoundLogger,
    ) -> None:
        self._tickets, self._catalog, self._supervisor = tickets, catalog, supervisor
        self._watchers, self._archive, self._metrics, self._log = watchers, archive, metrics, log
        self._settlement = Settlement(catalog, metrics)
        every_s = supervisor.config.verify_every_s
        self.checks = Checks(catalog, supervisor.known, supervisor.clock, metrics, every_s)
        self._looking: int | None = None  # rid of the daemon's own verification
        self.queues = Queues(supervisor.clock)  # held until their engines take them
        self._ending = False  # the daemon stops: nothing goes to another worker any more

    # ------------------------------------------------------------ requests begin

    def open(self, ticket: Ticket, request: Open, engine: Engine) -> None:
        """Begins an `open`, whose session exists from here on."""
        self._supervisor.ensure(engine)
        (session,) = self._catalog.add(
            ticket.owner, engine.id, [request.name], request.session_class, request.ttl_s, []
        )
        ticket.session = session
        session.kv = request.kv
        session.running, session.running_op = ticket.rid, "open"
        self._dispatch(ticket, engine)

    def restore(self, ticket: Ticket, request: Restore, row: SnapshotRow) -> None:
        """Begins a `restore`: an `open` whose content comes from a snapshot.

        Raises NotFound, too: its model isn't here any more.
        """
        engine = self._supervisor.engine(row.model)
        self._supervisor.ensure(engine)
        (session,) = self._catalog.add(
            ticket.owner, row.model, [request.name], request.session_class, request.ttl_s, []
        )
        ticket.session, ticket.snapshot = session, row.id
        session.running, session.running_op = ticket.rid, "restore"
        self._dispatch(ticket, engine)

    def take_in(self, ticket: Ticket, engine: Engine) -> None:
        """An `import` whose file is complete: `Ticket.snapshot` is its path."""
        self._supervisor.ensure(engine)
        self._dispatch(ticket, engine)

    def run(self, ticket: Ticket, session: Session) -> None:
        """Begins a request in a session.

        Raises:
            Busy: another request has the session.
            NotFound: it is read while it is being closed.
            Exists, Capacity: of the children of a `fork`.
            EngineLost: its engine keeps stopping, or the session is in quarantine.
            Unsupported: its model can't be loaded.
        """
        ticket.session = session
        if session.quarantined is not None and ticket.op in QUARANTINED:
            raise EngineLost(session.quarantined, quarantined=True)  # it never began: no length
        if isinstance(ticket.request, Decode):
            ticket.request = seeded(ticket.request, secrets.randbits(64))
        if ticket.reads:
            self._read(ticket, session)
        elif ticket.op == "close":
            self._close(ticket, session)
        elif session.state is SessionState.IDLE:
            self._start(ticket, session)
        elif ticket.op == "sync" and self._may_supersede(session):
            self._supersede(ticket, session)
        else:
            raise self._busy(ticket, session)

    def load(self, ticket: Ticket, engine: Engine) -> None:
        """Answers once the model is ready. One that could not be loaded is tried again."""
        if engine.state is EngineState.FAILED and engine.pid is None:
            engine.begin()
        self._supervisor.ensure(engine)
        ticket.model = engine.id
        if engine.ready:
            self._tickets.reply(ticket, ModelResult(model=engine.info))
        else:
            self.queues.add(engine.id, ticket)

    def unload(self, ticket: Ticket, engine: Engine) -> None:
        """Answers once the worker is gone. Sessions keep their tokens and come back when touched.

        Raises:
            Busy: requests of the model are open.
        """
        open_now = sum(other.model == engine.id and other is not ticket for other in self._tickets)
        if open_now:
            raise Busy(
                f"{open_now} requests of {engine.id} are open; cancel them or wait for their end.",
                field="model",
                requests=open_now,
            )
        if engine.state not in (EngineState.STOPPED, EngineState.FAILED):
            self._supervisor.unload(engine)
        if engine.state is EngineState.STOPPING:
            ticket.model = engine.id
            self.queues.add(engine.id, ticket)
        else:
            self._tickets.reply(ticket, ModelResult(model=engine.info))

    def _read(self, ticket: Ticket, session: Session) -> None:
        if session.state is SessionState.OPENING:
            raise self._busy(ticket, session)  # the engine may not know it yet, and may never
        if session.state is SessionState.CLOSING:
            raise NotFound("The session is being closed.", field="session")
        engine = self._supervisor.engine(session.model)
        self._supervisor.ensure(engine)
        self._catalog.touch(session)
        self._dispatch(ticket, engine)

    def look_at(self, ticket: Ticket, session: Session) -> None:
        """Verifies a session that the daemon picked: its owner isn't held up, nor is this a use of it."""
        ticket.session = session
        self._dispatch(ticket, self._supervisor.engine(session.model))

    def look_round(self) -> None:
        """Begins the next verification of a round that is due, one at a time."""
        if self._tickets.get(self._looking) is None and (session := self.checks.due()) is not None:
            ticket = self._tickets.open_own("verify", Verify(), session)
            self._looking = ticket.rid
            self.look_at(ticket, session)

    def _judged(self, rid: int, session: Session, result: VerifyResult) -> list[tuple[Event, str]]:
        failed = self.checks.judge(session, result)
        for event, _ in failed:
            shown = short(session.id)
            self._log.error("verify failed", rid=rid, session=shown, model=session.model, **event.details)
        return failed

    def fork_trunk(self, ticket: Ticket, trunk: Session, request: Fork) -> None:
        """Begins a fork of a published trunk, which nobody has to wait for.

        Raises as `run` does; what it makes belongs to who asks.
        """
        ticket.session = trunk
        engine = self._supervisor.engine(trunk.model)
        self._supervisor.ensure(engine)
        ticket.children = self._catalog.add(
            ticket.owner, trunk.model, _names(request), "interactive", None, []
        )
        for child in ticket.children:
            child.trunk, child.trunk_length = trunk.id, trunk.length
        self._dispatch(ticket, engine)

    def unpublish(self, ticket: Ticket, trunk: Session) -> None:
        """Takes back a published trunk; those who forked it keep what they have."""
        ticket.session = trunk
        trunk.advance(SessionEvent.CLOSE)
        self._free(ticket, trunk)

    def _start(self, ticket: Ticket, session: Session) -> None:
        engine = self._supervisor.engine(session.model)
        self._supervisor.ensure(engine)
        if isinstance(ticket.request, Save):
            ticket.on_end = self._archive.reserve(ticket.owner, ticket.request)
        if isinstance(ticket.request, Publish):
            ticket.children = [self._catalog.publish(session, ticket.request.name)]
        if isinstance(ticket.request, Fork):
            parents = [session.id, *session.parents][:PARENTS_MAX]
            names = _names(ticket.request)
            ticket.children = self._catalog.add(
                session.owner, session.model, names, session.session_class, session.ttl_s, parents
            )
            for child in ticket.children:
                child.trunk, child.trunk_length = session.trunk, session.trunk_length
        session.advance(SessionEvent.START)
        session.running, session.running_op = ticket.rid, ticket.op
        self._catalog.touch(session)
        self._dispatch(ticket, engine)

    def _dispatch(self, ticket: Ticket, engine: Engine) -> None:
        ticket.model = engine.id
        if engine.ready and self.queues.open_to(ticket, engine.id):
            self._send(ticket, engine)
        else:
            ticket.record.waits("trial" if engine.ready else "engine")
            self.queues.add(engine.id, ticket)

    def _send(self, ticket: Ticket, engine: Engine) -> None:
        session = ticket.session
        if session is None:
            self._send_file(ticket, engine)
            return
        assert ticket.request is not None
        if session.state is SessionState.CLOSED:
            self._ended(ticket, CLOSED)
            return
        self.queues.sent(ticket, engine.id)
        # Nothing runs in a session that its engine doesn't know: what ran ended with the last worker.
        if ticket.op not in ("open", "restore") and session.generation != engine.generation:
            self._adopt(session, engine)
        session.generation = engine.generation
        ticket.sent_to(engine.generation)
        children = [child.id for child in ticket.children]
        base, again = ticket.base, ticket.op == "decode" and ticket.resumes > 0
        ticket.base = session.length if base is None else base
        engine.send(
            Command(
                ticket.rid,
                ticket.request,
                session.id,
                children,
                ticket.owner,
                self._snapshot(ticket),
                base=ticket.base if again else None,
            )
        )
        if ticket.cancel_wanted:
            self._tell_cancel(ticket, RequestEvent.CANCEL)
        if again:
            self._tell_stream(ticket, "engine_recovered")

    def _with(self, generation: int) -> list[Ticket]:
        """The requests that a worker has."""
        return [t for t in self._tickets if t.generation == generation and t.state in WITH_ENGINE]

    def _snapshot(self, ticket: Ticket) -> str | None:
        """What a `restore` takes, or a `save` replaces: what has that name now, whichever worker made it."""
        if isinstance(ticket.request, Save):
            return self._archive.snapshots.id_of(ticket.owner, ticket.request.snapshot)
        return ticket.snapshot

    def _send_file(self, ticket: Ticket, engine: Engine) -> None:
        """Of an `import`, which has no session."""
        assert ticket.request is not None
        ticket.sent_to(engine.generation)
        engine.send(Command(ticket.rid, ticket.request, owner=ticket.owner, snapshot=ticket.snapshot))

    def _adopt(self, session: Session, engine: Engine) -> None:
        """Tells a worker of a session that another one had."""
        ticket = self._tickets.open_own("adopt", None, session)
        ticket.model = engine.id
        ticket.sent_to(engine.generation)
        session.generation = engine.generation
        background = session.session_class == "background"
        tokens = session.tokens.tolist()
        engine.send(
            Adopt(
                ticket.rid,
                session.id,
                tokens,
                background,
                session.chat,
                session.kv,
                session.owner,
                session.trunk,
                session.trunk_length,
                session.snapshot,
            )
        )

    # ------------------------------------------------------------ two requests meet

    def _busy(self, ticket: Ticket, session: Session) -> Busy:
        other = self._tickets.get(session.held) or self._tickets.get(session.running)
        # A session without a request of its own that isn't idle is a child whose `fork` isn't answered yet.
        request: dict[str, object] = {"op": other.op if other else "fork"}
        if other is not None and other.peer is not None and other.peer is ticket.peer:
            request["id"] = other.id
        return Busy(
            f"The session is taken by a running `{request['op']}`; wait for its end, or cancel it.",
            field="session",
            request=request,
        )

    def _may_supersede(self, session: Session) -> bool:
        if session.state is SessionState.REPLACING:
            return True
        return session.state is SessionState.RUNNING and session.running_op in SUPERSEDED

    def _supersede(self, ticket: Ticket, session: Session) -> None:
        self._drop_held(session, "a newer sync replaced this one before it began")
        session.advance(SessionEvent.SUPERSEDE)
        session.held = ticket.rid
        ticket.record.waits("session")
        self._cancel_running(session)

    def _close(self, ticket: Ticket, session: Session) -> None:
        if session.state is SessionState.IDLE:
            session.advance(SessionEvent.CLOSE)
            self._free(ticket, session)
        elif session.state in (SessionState.RUNNING, SessionState.REPLACING):
            self._drop_held(session, "the session was closed before this sync began")
            session.advance(SessionEvent.CLOSE)
            session.held = ticket.rid
            ticket.record.waits("session")
            self._cancel_running(session)
        else:
            raise self._busy(ticket, session)

    def _close_own(self, session: Session) -> None:
        ticket = self._tickets.open_own("close", CloseRequest(session=session.id), session)
        self._close(ticket, session)

    def _drop_held(self, session: Session, why: str) -> None:
        """Ends the `sync` that waits in a session, if one does, as cancelled."""
        held = self._tickets.get(session.held)
        session.held = None
        if held is not None:
            self._tickets.reply(held, cut_short(held, why))

    def _cancel_running(self, session: Session) -> None:
        running = self._tickets.get(session.running)
        if running is not None:
            self.cancel(running)

    def _free(self, ticket: Ticket, session: Session) -> None:
        """Closes a session that nothing else has: through the engine if that knows it."""
        session.running, session.running_op = ticket.rid, "close"
        engine = self._supervisor.known(session.model)
        if engine is not None and engine.ready and session.generation == engine.generation:
            self._dispatch(ticket, engine)
        else:
            self._ended(ticket, CloseResult(freed_bytes=0))

    # ------------------------------------------------------------ requests are ended early

    def cancel(self, ticket: Ticket) -> bool:
        """Asks for the early end of a request; False if there is none."""
        session = ticket.session
        if ticket.state is not RequestState.HELD:
            if ticket.op in SHORT:
                return False
            self._tell_cancel(ticket, RequestEvent.CANCEL)
            return True
        if session is not None and session.held == ticket.rid:
            if ticket.op == "close":
                return False
            session.advance(SessionEvent.RELEASE)
            session.held = None
            self._tickets.reply(ticket, cut_short(ticket, "cancelled before it began"))
            return True
        if ticket.op in HELD_ENDS:
            self.queues.drop(ticket)
            self._ended(ticket, self._cut_short(ticket, "cancelled while no engine had it"))
            return True
        ticket.cancel_wanted = ticket.op not in (*SHORT, "load", "unload")
        return ticket.cancel_wanted

    def _tell_cancel(self, ticket: Ticket, event: RequestEvent) -> None:
        told = ticket.state is not RequestState.SENT
        if event is RequestEvent.VANISH:
            self._tickets.orphan(ticket)
        else:
            ticket.advance(event)
        engine = self._supervisor.engine(ticket.model or "")
        if not told and ticket.op not in SHORT and engine.generation == ticket.generation:
            engine.send(CancelCommand(ticket.rid))

    def vanish(self, peer: Peer) -> None:
        """A client is gone: its requests end as soon as they can, its sessions stay."""
        for ticket in list(peer.open.values()):
            session = ticket.session
            if ticket.state is RequestState.DONE:
                continue  # the end of one before it was its end, too
            if ticket.op == "watch":
                self._watchers.drop(ticket)
                self._tickets.orphan(ticket)
                self._tickets.reply(ticket, Result())
            elif ticket.state is not RequestState.HELD:
                self._tell_cancel(ticket, RequestEvent.VANISH)
            elif ticket.op in ("close", "load", "unload"):
                self._tickets.orphan(ticket)  # what it asked for still happens
            else:
                self._tickets.orphan(ticket)
                if session is not None and session.held == ticket.rid:
                    self.cancel(ticket)
                else:
                    self.queues.drop(ticket)
                    self._ended(ticket, GONE)

    def cut(self, peer: Peer) -> None:
        """A client does not read: its streams end, with `slow_consumer` as their last word."""
        for ticket in list(peer.open.values()):
            if not streams(ticket) or ticket.state in (RequestState.HELD, RequestState.CUT):
                continue
            self._metrics.count("streams_cut")
            if ticket.op == "watch":
                ticket.advance(RequestEvent.OVERFLOW)
                self._watchers.end(ticket)
            else:
                self._tell_cancel(ticket, RequestEvent.OVERFLOW)

    def expire(self) -> None:
        """Closes the sessions whose time is over, and ends trials that took long enough."""
        for model in self.queues.overdue():
            self._pump(self._supervisor.engine(model))
        for session in self._catalog.expired():
            self._metrics.count("sessions_expired")
            self._close_own(session)

    def end_all_held(self) -> None:
        """The daemon stops: what no engine has is refused, what one has is cancelled."""
        self._ending = True
        error = ShuttingDown("The daemon is stopping; nothing was changed.").body()
        for ticket in self._tickets:
            if ticket.state is RequestState.DONE:
                continue
            session = ticket.session
            if ticket.op == "watch":
                self._watchers.drop(ticket)
                self._tickets.reply(ticket, error)
            elif ticket.state is not RequestState.HELD:
                self.cancel(ticket)
            elif session is not None and session.held == ticket.rid:
                session.held = None
                session.advance(SessionEvent.RELEASE)
                self._tickets.reply(ticket, error)
            else:
                self.queues.drop(ticket)
                self._ended(ticket, self._last_word(ticket, "the daemon stops") if ticket.resumes else error)

    # ------------------------------------------------------------ engines speak

    def on_ready(self, engine: Engine) -> None:
        self._catalog.loaded(engine.id, engine.spec.spec)
        event = "engine_recovered" if engine.deaths > 0 else "engine_ready"
        again = sum(ticket.resumes > 0 for ticket in self.queues.of(engine.id))
        self._watchers.publish(Event(event=event, model=engine.id, details={"requests": again}))
        self._pump(engine)

    def _pump(self, engine: Engine) -> None:
        """Sends what waits for an engine, as far as it may go now."""
        if not engine.ready:
            return
        for ticket in self.queues.going(engine.id):
            if ticket.op == "load":
                self._tickets.reply(ticket, ModelResult(model=engine.info))
            else:
                self._send(ticket, engine)

    def on_kept(self, engine: Engine, kept: list[Kept], broken: list[str]) -> None:
        self._archive.on_kept(engine.id, kept, broken)

    def on_shelved(self, engine: Engine, shelved: Shelved) -> None:
        self._archive.on_shelved(engine.id, shelved)

    def on_answer(self, engine: Engine, answer: Answer) -> None:
        if answer.journal is not None:
            self._journal(engine, answer.journal)
        ticket = self._tickets.get(answer.rid)
        if ticket is None or ticket.generation != engine.generation:
            self._log.warning("answer to no request", model=engine.id, rid=answer.rid)
        elif isinstance(answer.body, Result | ErrorBody):
            if computes(ticket):
                self._got_on(ticket.session)
            self._ended(ticket, refused_again(ticket, answer.body))
            for journal in answer.born:
                self._journal(engine, journal)
        else:
            if isinstance(answer.body, TokenEvent):
                ticket.texts.append(answer.body.text)
            self._tickets.reply(ticket, answer.body)

    def on_journals(self, engine: Engine, journals: Journals) -> None:
        for change in journals.changes:
            self._journal(engine, change)

    def _journal(self, engine: Engine, change: Journal) -> None:
        session = self._catalog.get(change.session)
        if session is None or session.generation != engine.generation:
            return
        resident = session.resident
        self._catalog.journal(session, change)
        if change.tokens and session.running_op == "decode":  # it goes on there; a prefill begins again
            self._got_on(session, len(change.tokens))
        if session.resident is not resident and session.state is not SessionState.OPENING:
            self._metrics.count(f"moved.{session.tier}")
            details = {"tier": session.tier}
            if not session.resident:
                details["reason"] = self._evicted(change.left or "content")
            event = Event(event="session_moved", session=session.id, model=session.model, details=details)
            self._watchers.publish(event, session.owner)

    def _evicted(self, why: str) -> str:
        """Counts a session whose KV left the device; gives the reason as it is told."""
        if why == "budget" and self._supervisor.memory.pressure.most_bytes is not None:
            why = "pressure"
        self._metrics.count(f"evicted.{why}")
        return why

    def on_down(self, engine: Engine, generation: int, reason: str) -> None:
        """A worker process is no more; `reason` in words."""
        moved = self._orphaned(engine, generation)
        had = self._with(generation)
        again = self._part(engine, had, reason)
        # One event for all its sessions, whose KV is gone: one for each could flood a watcher.
        details = {"reason": reason, "sessions": moved, "requests": len(again)}
        event = "engine_stopped" if engine.stopping else "engine_lost"
        self._watchers.publish(Event(event=event, model=engine.id, details=details))
        for ticket in again:
            self._tell_stream(ticket, "engine_lost", reason=reason)
        for ticket in self.queues.take(engine.id, only="unload"):
            self._tickets.reply(ticket, ModelResult(model=engine.info))
        if self.queues.of(engine.id):
            try:
                self._supervisor.ensure(engine)
            except StateroomError as error:
                self._refuse_waiting(engine, error, spared=bool(had))

    def _orphaned(self, engine: Engine, generation: int) -> int:
        """What remains of the sessions of a worker is their tokens; how many they are."""
        moved = [session for session in self._catalog if session.generation == generation]
        if self._ending:
            why = "stopped"
        elif engine.stopping:
            why = "unused" if engine.unused else "unloaded"
        else:
            why = "lost"
        for session in moved:
            if session.resident:
                self._evicted(why)
            session.lost = why == "lost"
            self._catalog.forget_engine(session)
        return len(moved)

    def _part(self, engine: Engine, tickets: list[Ticket], reason: str) -> list[Ticket]:
        """Of the requests that a dead worker had: holds those that go on, and gives them; ends the others."""
        self.queues.down(engine.id)
        again: list[Ticket] = []
        if not engine.stopping and not self._ending:
            cause = self._blame(tickets, reason)
            again = [
                ticket
                for ticket in tickets
                if ticket.state is RequestState.SENT
                and goes_on(ticket)
                and (cause is None or ticket.session is not cause or not computes(ticket))
            ]
        # Those who were here last are most likely to wait in person.
        again.sort(key=lambda ticket: -ticket.session.used_s if ticket.session is not None else 0.0)
        for ticket in again:
            ticket.advance(RequestEvent.LOSE)
            ticket.generation, ticket.resumes = None, ticket.resumes + 1
            if not isinstance(ticket.request, Decode):
                self._take_back(ticket)
        self.queues.put_first(engine.id, again)
        self._metrics.count("requests_resumed", len(again))
        if tickets:
            self._log.warning(
                "requests interrupted",
                rids=[ticket.rid for ticket in tickets][:RIDS_LOGGED],
                requests=len(tickets),
                going_on=len(again),
                model=engine.id,
                reason=reason,
            )
        for ticket in tickets:
            if ticket.state in WITH_ENGINE:
                self._ended(ticket, self._last_word(ticket, reason))
        return [ticket for ticket in again if ticket.state is RequestState.HELD]

    def _blame(self, tickets: list[Ticket], reason: str) -> Session | None:
        """Counts a death; a session that is known to be its cause is put in quarantine, and given."""
        blamed = {t.session.id: t.session for t in tickets if t.session is not None and computes(t)}
        company = any(t.session is None or t.looks for t in tickets)  # an import, a verification of ours
        session = blamed.get(self.queues.suspicion.died(blamed, company) or "")
        if session is not None:
            self._metrics.count("sessions_quarantined")
            session.quarantined = why_quarantined(self.queues.suspicion.deaths(session.id), reason)
            self._catalog.record(session)
            rids = [ticket.rid for ticket in tickets if ticket.session is session]
            shown = short(session.id)
            self._log.error(
                "session quarantined", rids=rids, model=session.model, session=shown, reason=reason
            )
        return session

    def _last_word(self, ticket: Ticket, reason: str) -> Body:
        """The end of a request whose worker died, and which goes to no other."""
        if ticket.state in (RequestState.CANCELLING, RequestState.HELD) and ticket.op in CUT_SHORT:
            return self._cut_short(ticket, f"cancelled when its engine had stopped ({reason})")
        return lost(ticket, reason)

    def _cut_short(self, ticket: Ticket, why: str) -> Body:
        if not (isinstance(ticket.request, Decode) and ticket.request.stream):
            self._take_back(ticket)
        return cut_short(ticket, why)

    def _take_back(self, ticket: Ticket) -> None:
        """What a request added to a session and told nobody goes again; no engine has the request."""
        session = ticket.session
        if session is None or ticket.base is None or session.running != ticket.rid:
            return
        if session.length > ticket.base:
            self._catalog.journal(session, Journal(session.id, ticket.base, [], resident=False))
            if session.generation != NO_ENGINE:  # a read brought it there as it was
                self._adopt(session, self._supervisor.engine(session.model))

    def _tell_stream(self, ticket: Ticket, event: str, **details: object) -> None:
        """Tells who reads a stream what happens to it."""
        session = ticket.session
        if isinstance(ticket.request, Decode) and ticket.request.stream and session is not None:
            details["length"] = session.length
            told = Event(event=event, session=session.id, model=session.model, details=details)
            self._tickets.reply(ticket, told)

    def _got_on(self, session: Session | None, tokens: int | None = None) -> None:
        """A session drew so many tokens, or its request went on otherwise."""
        if session is not None and self.queues.got_on(session, tokens):
            self._pump(self._supervisor.engine(session.model))

    def on_failed(self, engine: Engine, message: str) -> None:
        """The model can't be loaded, for good."""
        self._watchers.publish(Event(event="engine_failed", model=engine.id, details={"reason": message}))
        self._refuse_waiting(engine, Unsupported(message, field="model"))

    def on_doing(self, engine: Engine, doing: list[Doing]) -> None:
        """How far its requests are; of a stream the broker counts what it tells."""
        now_s = self._supervisor.clock()
        for each in doing:
            ticket = self._tickets.get(each.rid)
            if ticket is None or not each.total:
                continue
            if not isinstance(ticket.request, Decode):
                ticket.done, ticket.total = each.done, each.total
            elif not ticket.request.stream:
                ticket.drew(each.done, now_s)

    def on_silent(self, engine: Engine, silent_s: float) -> None:
        details = {"silent_s": round(silent_s, 1)}
        self._watchers.publish(Event(event="engine_silent", model=engine.id, details=details))

    def _refuse_waiting(self, engine: Engine, error: StateroomError, spared: bool = False) -> None:
        """`spared`: what a worker served before waits on for the next; this one did serve."""
        for ticket in self.queues.take(engine.id):
            if spared and ticket.resumes:
                self.queues.add(engine.id, ticket)
            elif ticket.resumes:
                self._ended(ticket, lost(ticket, str(error)))
            else:
                self._ended(ticket, error.body())

    # ------------------------------------------------------------ requests end

    def _ended(self, ticket: Ticket, body: Body) -> None:
        """Settles what a final answer means for its sessions, replies, and lets in what waited."""
        session = ticket.session
        if session is not None and session.refusal is not None and isinstance(body, ErrorBody):
            body, session.refusal = session.refusal, None
        events = self._settlement.settle(ticket, body)
        if isinstance(body, VerifyResult) and session is not None:
            events += self._judged(ticket.rid, session, body)
        if session is not None and session.state is SessionState.CLOSED:
            self._archive.closed(session)
        self._tickets.reply(ticket, body)
        for event, owner in events:
            self._watchers.publish(event, owner)
        for orphan in abandoned(ticket, body):
            self._close_own(orphan)
        if session is not None and session.state is SessionState.CLOSED:
            self.queues.suspicion.forget(session.id)
        if self.queues.ended(ticket):
            self._pump(self._supervisor.engine(ticket.model or ""))
        if session is not None and session.running is None and session.held is not None:
            self._admit_held(session)

    def _admit_held(self, session: Session) -> None:
        held = self._tickets.get(session.held)
        session.held = None
        assert held is not None
        try:
            if held.op == "close":
                self._free(held, session)
            else:
                self._start(held, session)
        except StateroomError as error:
            self._tickets.reply(held, error.body())


def _names(request: Fork) -> list[str | None]:
    """Of the children."""
    return list(request.names) if request.names else [None] * request.n
