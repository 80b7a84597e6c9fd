"""Where clients' messages arrive: parsed, admitted, answered on the spot or handed to `Work`.

`hello`, `list`, `requests`, `info`, `stats`, `cancel` and `watch` are answered from the catalog (`view`) and
never wait for an engine.
"""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from structlog.typing import FilteringBoundLogger

from stateroom.client.errors import (
    Capacity,
    Internal,
    Invalid,
    Malformed,
    NotFound,
    ShuttingDown,
    StateroomError,
)
from stateroom.client.limits import (
    REQUESTS_PER_CLIENT_MAX,
    REQUESTS_QUEUED_MAX,
    SUPPORTED_VERSIONS,
)
from stateroom.client.protocol import (
    Cancel,
    CancelResult,
    Decode,
    Export,
    Forget,
    Fork,
    Hello,
    HelloResult,
    Import,
    Info,
    InfoResult,
    Lease,
    LeaseResult,
    List,
    Load,
    ModelInfo,
    ModelResult,
    Open,
    Park,
    ParkResult,
    Prefill,
    Request,
    Requests,
    Restore,
    Save,
    ServerLimits,
    SessionRequest,
    Snapshots,
    Stats,
    Sync,
    Trace,
    Unload,
    Unpublish,
    Verify,
    Watch,
)
from stateroom.daemon.archive import Archive
from stateroom.daemon.carriage import Carriage
from stateroom.daemon.catalog import Catalog
from stateroom.daemon.keys import Guest
from stateroom.daemon.lifecycle import RequestEvent, RequestState, SessionState
from stateroom.daemon.logs import incident
from stateroom.daemon.metrics import Metrics
from stateroom.daemon.peers import Peer, Peers
from stateroom.daemon.quotas import surely_computes
from stateroom.daemon.requests import Parsed, Refused, parse, read_id
from stateroom.daemon.session import Session
from stateroom.daemon.shelf import Shelf
from stateroom.daemon.supervisor import Supervisor
from stateroom.daemon.tickets import AT_ONCE, Ticket, Tickets
from stateroom.daemon.traces import Traces
from stateroom.daemon.view import View
from stateroom.daemon.watchers import Watchers
from stateroom.daemon.work import Work

SERVER = "stateroom"
RETRY_AFTER_S = 1.0
ON_DISK = (Park, Save, Restore, Export, Import)  # of no use without a state directory


class Desk:
    """Takes messages of clients. Whatever one sends, it gets its answer and the daemon lives."""

    def __init__(
        self,
        peers: Peers,
        tickets: Tickets,
        catalog: Catalog,
        supervisor: Supervisor,
        work: Work,
        watchers: Watchers,
        view: View,
        traces: Traces,
        shelf: Shelf,
        archive: Archive,
        carriage: Carriage | None,
        metrics: Metrics,
        log: FilteringBoundLogger,
    ) -> None:
        self._peers, self._tickets, self._catalog = peers, tickets, catalog
        self._supervisor, self._work = supervisor, work
        self._watchers, self._view, self._traces = watchers, view, traces
        self._shelf, self._archive, self._carriage = shelf, archive, carriage
        self._metrics, self._log = metrics, log
        self.admitting = True
        self._version = _version()  # at the start: an upgrade changes the files, not what runs

    def receive(
        self, routing_id: bytes, descriptor: int, frames: list[bytes], guest: Guest | None = None
    ) -> None:
        """One message: `[body]` of a DEALER, `[b"", body]` of a REQ. `guest`: who came with a key."""
        peer, new = self._peers.of(routing_id, descriptor, guest)
        if new:
            self._metrics.count("clients_seen")
        if peer.deaf:
            self._metrics.count("requests_dropped")
            return
        delimited = len(frames) > 1 and frames[0] == b""
        if len(frames) != 1 + delimited:
            self._metrics.count("frames_refused")
            error = Malformed(f"A request is one frame; this message has {len(frames) - delimited}.")
            self._tickets.refuse(peer, delimited, read_id(frames[-1]), None, error)
            return
        try:
            parsed = parse(frames[-1])
        except Refused as refused:
            self._metrics.count("frames_refused")
            self._tickets.refuse(peer, delimited, refused.request_id, refused.op, refused.error)
            return
        except Exception as bug:
            self._tickets.refuse(peer, delimited, read_id(frames[-1]), None, self._incident(bug))
            return
        self._admit(peer, parsed, delimited)

    def _admit(self, peer: Peer, parsed: Parsed, delimited: bool) -> None:
        problem = self._inadmissible(peer, parsed)
        if problem is not None:
            self._tickets.refuse(peer, delimited, parsed.id, parsed.op, problem)
            return
        ticket = self._tickets.open(peer, parsed.id, parsed.request, delimited)
        try:
            self._serve(ticket, peer, parsed.request)
        except StateroomError as error:
            self._tickets.reply(ticket, error.body())
        except Exception as bug:
            internal = self._incident(bug, ticket)
            if ticket.state is not RequestState.DONE:
                self._tickets.reply(ticket, internal.body())

    def _inadmissible(self, peer: Peer, parsed: Parsed) -> StateroomError | None:
        if peer.name_chosen:
            return Invalid(
                "Your socket chose its routing id; another may choose the same and get your late replies. "
                "Leave ZMQ_ROUTING_ID unset."
            )
        if not self.admitting:
            return ShuttingDown("The daemon is stopping; nothing was changed.")
        if parsed.id in peer.open:
            return Invalid(
                f"The id {parsed.id} is that of an open request of yours; take another.", field="id"
            )
        if isinstance(parsed.request, AT_ONCE):
            return None
        if len(peer.open) >= REQUESTS_PER_CLIENT_MAX:
            return Capacity(
                f"{REQUESTS_PER_CLIENT_MAX} requests of one connection may be open at once; await some.",
                retry_after_s=RETRY_AFTER_S,
            )
        if len(self._tickets) >= REQUESTS_QUEUED_MAX:
            return Capacity(
                f"{REQUESTS_QUEUED_MAX} requests are open already; try again later.",
                retry_after_s=RETRY_AFTER_S,
            )
        try:
            self._catalog.quotas.check(peer.app, "requests")
        except Capacity as full:
            return full
        return None

    def _within_quota(self, owner: str, request: Request, session: Session | None = None) -> None:
        """Raises Capacity: what it surely adds to KV or on disk is more than its owner may have."""
        quotas, length = self._catalog.quotas, 0 if session is None else session.length
        tokens = surely_computes(request, length)
        if tokens is not None:
            # Of the session's own tokens; those of a new one aren't known before they are there.
            each = session.live_bytes / length if session is not None and length else 0.0
            quotas.check(owner, "bytes", math.ceil(tokens * each) or 1)
        if isinstance(request, Save) and session is not None:
            there = self._archive.snapshots.id_of(owner, request.snapshot) if request.replace else None
            freed = 0 if there is None else self._archive.snapshots.find(owner, request.snapshot).nbytes
            quotas.check(owner, "disk", max(session.live_bytes, 1) - freed)
        elif isinstance(request, Import) and request.offset == 0:
            quotas.check(owner, "disk", request.total)

    def _incident(self, bug: Exception, ticket: Ticket | None = None) -> Internal:
        name, rid = incident(), None if ticket is None else ticket.rid
        self._log.error("internal error", incident=name, rid=rid, exc_info=bug)
        message = f"This is a bug of the daemon; its log tells more at {name}."
        return Internal(message, incident=name) if rid is None else Internal(message, incident=name, rid=rid)

    # ------------------------------------------------------------ operations

    def _serve(self, ticket: Ticket, peer: Peer, request: Request) -> None:
        if isinstance(request, ON_DISK):
            self._archive.need()
        if isinstance(request, Open | Restore | Import):
            self._within_quota(peer.app, request)
        if isinstance(request, Hello):
            self._hello(ticket, peer, request)
        elif isinstance(request, List):
            self._tickets.reply(ticket, self._view.sessions(peer, request))
        elif isinstance(request, Requests):
            self._tickets.reply(ticket, self._view.requests(peer, request))
        elif isinstance(request, Stats):
            self._tickets.reply(ticket, self._view.stats(peer.app))
        elif isinstance(request, Cancel):
            self._cancel(ticket, peer, request)
        elif isinstance(request, Trace):
            self._traces.begin(ticket, peer, request)
        elif isinstance(request, Watch):
            ticket.advance(RequestEvent.SEND)
            self._watchers.add(ticket, request, self._view.sight(peer, request.everyone))
        elif isinstance(request, Load):
            self._work.load(ticket, self._supervisor.engine_for(self._shelf.find(request.model)))
        elif isinstance(request, Unload):
            self._unload(ticket, request)
        elif isinstance(request, Open):
            self._work.open(ticket, request, self._supervisor.engine_for(self._shelf.find(request.model)))
        elif isinstance(request, Fork) and request.trunk is not None:
            self._work.fork_trunk(ticket, self._catalog.trunk(peer.app, request.trunk), request)
        elif isinstance(request, Fork):
            self._work.run(ticket, self._catalog.find(peer.app, request.session or ""))
        elif isinstance(request, Snapshots | Forget | Restore | Export | Import):
            self._serve_snapshots(ticket, request)
        elif isinstance(request, Unpublish):
            self._work.unpublish(ticket, self._catalog.published(peer.app, request.name))
        elif isinstance(request, Verify) and request.session is None:
            self._work.look_at(ticket, self._work.checks.pick())
        elif isinstance(request, SessionRequest | Prefill | Sync | Verify):
            session = self._catalog.find(peer.app, request.session or "")
            if isinstance(request, Info):
                ticket.session = session
                self._tickets.reply(ticket, InfoResult(info=self._view.info(session)))
            elif isinstance(request, Lease):
                ticket.session = session
                self._tickets.reply(
                    ticket, LeaseResult(expires_in_s=self._catalog.lease(session, request.ttl_s))
                )
            elif isinstance(request, Park) and session.state is SessionState.IDLE and not session.resident:
                ticket.session = session
                self._tickets.reply(ticket, _parked(session))
            else:
                self._within_quota(peer.app, request, session)
                if isinstance(request, Decode):
                    ticket.request = self._with_drafter(request)
                self._work.run(ticket, session)
        else:
            raise AssertionError(f"{request.op} is in OPERATIONS and has no place here")

    def _serve_snapshots(
        self, ticket: Ticket, request: Snapshots | Forget | Restore | Export | Import
    ) -> None:
        archive, owner = self._archive, ticket.owner
        if isinstance(request, Snapshots):
            self._tickets.reply(ticket, archive.listed(owner))
        elif isinstance(request, Forget):
            self._tickets.reply(ticket, archive.forget(owner, request.snapshot))
        elif isinstance(request, Restore):
            self._work.restore(ticket, request, archive.snapshots.find(owner, request.snapshot))
        elif self._carriage is None:
            archive.need()
        elif isinstance(request, Export):
            self._carriage.export(ticket, request)
        else:
            self._carriage.receive(
                ticket, request, lambda: self._supervisor.engine_for(self._shelf.find(request.model))
            )

    def _with_drafter(self, request: Decode) -> Decode:
        """As the worker takes it: the model that drafts by what it is loaded from, not by its name.

        Raises `NotFound` for one that isn't here.
        """
        asked = request.speculate
        if asked is None or asked.model is None:
            return request
        try:
            spec = self._shelf.find(asked.model).spec
        except NotFound as error:
            raise NotFound(str(error), field="speculate.model") from None
        return replace(request, speculate=replace(asked, model=spec))

    def _hello(self, ticket: Ticket, peer: Peer, request: Hello) -> None:
        if request.app is not None:
            peer.call_itself(request.app)
            ticket.owner = peer.app
        peer.client = request.client or peer.client
        body = HelloResult(
            server=SERVER,
            version=self._version,
            protocol=list(SUPPORTED_VERSIONS),
            app=peer.app,
            models=self._view.models(),
            limits=ServerLimits(),
        )
        self._tickets.reply(ticket, body)

    def _cancel(self, ticket: Ticket, peer: Peer, request: Cancel) -> None:
        if request.session is not None:
            session = self._catalog.find(peer.app, request.session)
            ticket.session = session
            # The one that waits first: ending the other would let it in.
            targets = [self._tickets.get(session.held), self._tickets.get(session.running)]
        else:
            assert request.request is not None
            if request.request not in peer.open and request.request not in peer.recent:
                raise NotFound("You have no such request open.", field="request")
            targets = [peer.open.get(request.request)]
        done = [self._end(target) for target in targets if target is not None and target is not ticket]
        self._tickets.reply(ticket, CancelResult(cancelled=any(done)))

    def _end(self, target: Ticket) -> bool:
        if target.op == "watch":
            self._watchers.end(target)
            return True
        return self._work.cancel(target)

    def _unload(self, ticket: Ticket, request: Unload) -> None:
        engine = self._supervisor.known(self._shelf.find(request.model).id)
        if engine is None:
            info = ModelInfo(id=self._shelf.find(request.model).id, loaded=False)
            self._tickets.reply(ticket, ModelResult(model=info))
        else:
            self._work.unload(ticket, engine)


def _parked(session: Session) -> ParkResult:
    """Of one whose KV isn't on the device."""
    return ParkResult(tier=session.tier, length=session.length, bytes=session.snapshot_bytes, freed_bytes=0)


def _version() -> str:
    try:
        return version("stateroom")
    except PackageNotFoundError:
        return "0"
