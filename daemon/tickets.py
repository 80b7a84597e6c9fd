"""Open requests, and their replies: exactly one final each.

A `Ticket` is one open request. Every reply goes through `Tickets.reply`, and every reply passes the
request's table first, so that a second final reply is an `IllegalEvent`, not a message.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from structlog.typing import FilteringBoundLogger

from stateroom.client.errors import SlowConsumer, StateroomError
from stateroom.client.protocol import (
    OPERATIONS,
    Body,
    Cancel,
    Decode,
    DecodeResult,
    ErrorBody,
    Forget,
    Hello,
    Info,
    LengthResult,
    List,
    OpenResult,
    Progress,
    Reply,
    Request,
    RequestInfo,
    Requests,
    Result,
    SessionRequest,
    Snapshots,
    Stats,
    TokenEvent,
    Trace,
    Verify,
)
from stateroom.client.wire import body_to_wire, encode_reply, to_wire
from stateroom.daemon.clock import Clock
from stateroom.daemon.lifecycle import REQUESTS, RequestEvent, RequestState, after
from stateroom.daemon.logs import Rate
from stateroom.daemon.metrics import Metrics
from stateroom.daemon.peers import Peer, Peers
from stateroom.daemon.quotas import Quotas
from stateroom.daemon.recorder import Record
from stateroom.daemon.requests import loggable
from stateroom.daemon.session import Session
from stateroom.daemon.shown import request_shown, short

REFUSALS_LOGGED_PER_S = 20  # of frames that never became a request: a broken client must not fill the disk
RECENT_MAX = 256  # requests that ended, remembered for `requests`
# Answered before the next message is read, so not counted, nor remembered.
AT_ONCE = (Hello, List, Requests, Info, Stats, Cancel, Snapshots, Forget)
UNREMEMBERED = (*AT_ONCE, Trace)
CLIENT_SHOWN = 64  # characters in the log of what a client calls itself
MUTE = (RequestState.CUT, RequestState.ORPHANED)  # nobody hears their replies but the last


@dataclass(slots=True, eq=False)
class Ticket:
    """One open request. Without a peer it is the broker's own, or its client is gone."""

    rid: int
    op: str
    request: Request | None  # None for `adopt`, which is the broker's own
    peer: Peer | None
    owner: str
    id: int | None
    delimited: bool  # the request carried REQ's empty frame, so the reply does
    started_s: float
    record: Record
    session: Session | None = None
    children: list[Session] = field(default_factory=list)
    state: RequestState = RequestState.HELD
    seq: int = 0
    model: str | None = None  # whose engine has it, or is waited for
    generation: int | None = None  # the worker that has it
    cancel_wanted: bool = False  # asked for while it could not be ended yet
    told_s: float | None = None  # when its last tokens were told
    snapshot: str | None = None  # that a `restore` takes; the path of what an `import` brought
    on_end: Callable[[], None] | None = None  # lets go of what it had
    base: int | None = None  # the session's length when it was first sent
    resumes: int = 0  # how often its worker died and it went to the next
    texts: list[str] = field(default_factory=list)  # of a stream: what its client was told
    account: str = ""  # the owner that it was counted for; "": the broker's own isn't
    client: str = ""  # what that calls itself
    done: int = 0  # of `total` tokens to compute or draw, as far as it is known
    total: int = 0
    first: int = 0  # `done` with the first tokens that were drawn, and when that was
    first_s: float | None = None

    @property
    def looks(self) -> bool:
        """It verifies a session that the daemon picked, which is no use of it."""
        return isinstance(self.request, Verify) and self.request.session is None

    @property
    def reads(self) -> bool:
        """It looks at its session and leaves it to whoever has it."""
        if isinstance(self.request, Verify):
            return self.looks
        return isinstance(self.request, SessionRequest) and not OPERATIONS[self.op].changes

    @property
    def forks_trunk(self) -> bool:
        """It looks at a published trunk, which any number may do at once."""
        return self.op == "fork" and self.session is not None and self.session.published_as is not None

    @property
    def unheard(self) -> bool:
        """Nobody gets its replies: its client is gone, or it is the broker's own."""
        return self.peer is None or self.peer.gone

    def advance(self, event: RequestEvent) -> None:
        self.state = after(REQUESTS, self.state, event)
        self.record.moved(event)

    def sent_to(self, generation: int) -> None:
        """A worker of its model has it from now on."""
        self.generation = generation
        self.advance(RequestEvent.SEND)
        self.record.sent(self.model or "", generation)

    def drew(self, done: int, now_s: float) -> None:
        """A decode has drawn so many tokens by now."""
        if done and (self.first_s is None or done < self.first):
            self.first, self.first_s = done, now_s
        self.done = done


class Told(NamedTuple):
    """A request as it is told of, open or ended: when it arrived, what it is, and what was seen of it."""

    began_s: float
    info: RequestInfo
    record: Record

    def aged(self, now_s: float) -> Told:
        """With its age."""
        return self._replace(info=replace(self.info, age_s=now_s - self.began_s))


class Tickets:
    """All open requests by the broker's own number. `on_overflow(peer)`: it does not read its streams.

    Attributes:
        recent: those that ended last, the latest first.
    """

    def __init__(
        self,
        peers: Peers,
        metrics: Metrics,
        clock: Clock,
        log: FilteringBoundLogger,
        on_overflow: Callable[[Peer], None],
        log_content: bool = False,
        quotas: Quotas | None = None,
        record: bool = True,
    ) -> None:
        self._recording = record
        self._peers, self._metrics, self._clock, self._log = peers, metrics, clock, log
        self._on_overflow = on_overflow
        self._log_content = log_content
        self._quotas = Quotas() if quotas is None else quotas
        self._refusals = Rate(clock, REFUSALS_LOGGED_PER_S)
        self._rids = itertools.count(1)
        self._open: dict[int, Ticket] = {}
        self.recent: deque[Told] = deque(maxlen=RECENT_MAX)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(list(self._open.values()))

    def get(self, rid: int | None) -> Ticket | None:
        return None if rid is None else self._open.get(rid)

    def ended(self, rid: int) -> Told | None:
        """A request that ended not long ago."""
        return next((ended for ended in self.recent if ended.info.rid == rid), None)

    def open(self, peer: Peer, request_id: int, request: Request, delimited: bool) -> Ticket:
        ticket = Ticket(
            rid=next(self._rids),
            op=request.op,
            request=request,
            peer=peer,
            owner=peer.app,
            account=peer.app,
            client=peer.client,
            total=request.max_tokens if isinstance(request, Decode) else 0,
            id=request_id,
            delimited=delimited,
            started_s=self._clock(),
            record=Record(self._clock, self._recording and not isinstance(request, AT_ONCE)),
        )
        self._quotas.add(ticket.account, "requests", 1)
        self._open[ticket.rid] = peer.open[request_id] = ticket
        return ticket

    def open_own(self, op: str, request: Request | None, session: Session) -> Ticket:
        """A request of the broker itself: an adoption, or the close of an expired session."""
        ticket = Ticket(
            rid=next(self._rids),
            op=op,
            request=request,
            peer=None,
            owner=session.owner,
            id=None,
            delimited=False,
            started_s=self._clock(),
            record=Record(self._clock, self._recording),
            session=session,
        )
        self._open[ticket.rid] = ticket
        return ticket

    def reply(self, ticket: Ticket, body: Body) -> None:
        """Sends one reply of an open request.

        Raises:
            IllegalEvent: the request had its final reply already.
        """
        final = isinstance(body, Result | ErrorBody)
        before = ticket.state
        ticket.advance(RequestEvent.FINAL if final else RequestEvent.REPLY)
        if final:
            if before is RequestState.CUT:
                body = _slow_consumer(ticket)
            self._ended(ticket, body)
        elif before in MUTE:
            return
        elif isinstance(body, TokenEvent):
            self._time(ticket, len(body.tokens))
        elif isinstance(body, Progress):
            ticket.done, ticket.total = body.done, body.total
        if ticket.peer is None or before is RequestState.ORPHANED:
            return
        frame = encode_reply(Reply(id=ticket.id, seq=ticket.seq, body=body))
        if self._peers.send(ticket.peer, [b"", frame] if ticket.delimited else [frame], final):
            ticket.seq += 1
            self._metrics.count("replies")
            if not final:
                waits = bool(ticket.peer.outbox)
                ticket.record.replied(len(frame), tokens=isinstance(body, TokenEvent), waits=waits)
        else:
            self._on_overflow(ticket.peer)

    def _time(self, ticket: Ticket, tokens: int) -> None:
        now_s, timings = self._clock(), self._metrics.timings
        ticket.drew(ticket.done + tokens, now_s)
        if ticket.told_s is None:
            timings.first_token.add(now_s - ticket.started_s)
        else:
            timings.token_gap.add(now_s - ticket.told_s)
        ticket.told_s = now_s

    def orphan(self, ticket: Ticket) -> None:
        """Its client is gone. A request that an engine has goes on until the engine ends it."""
        if ticket.peer is not None and ticket.id is not None:
            ticket.peer.open.pop(ticket.id, None)
        ticket.peer = None
        if ticket.state is not RequestState.HELD:
            ticket.advance(RequestEvent.VANISH)

    def refuse(
        self, peer: Peer, delimited: bool, request_id: int | None, op: str | None, error: StateroomError
    ) -> None:
        """Answers a frame that never became a request."""
        frame = encode_reply(Reply(id=request_id, seq=0, body=error.body()))
        self._peers.send(peer, [b"", frame] if delimited else [frame], final=True)
        self._metrics.count("replies")
        self._metrics.request(op or "none", error.code)
        passes, unlogged = self._refusals.passes()
        self._metrics.count("log_lines_withheld", not passes)
        if passes:
            self._log.info(
                "request",
                id=request_id,
                client=peer.client[:CLIENT_SHOWN] or None,
                op=op,
                owner=peer.app,
                code=error.code,
                field=loggable(error.field),
                ms=0.0,
                unlogged=unlogged,
            )

    def _ended(self, ticket: Ticket, body: Body) -> None:
        del self._open[ticket.rid]
        if ticket.account:
            self._quotas.add(ticket.account, "requests", -1)
        if ticket.on_end is not None:
            ticket.on_end()
        if ticket.peer is not None and ticket.id is not None:
            ticket.peer.open.pop(ticket.id, None)
            ticket.peer.recent.append(ticket.id)
        code: str = body.code if isinstance(body, ErrorBody) else "ok"
        if ticket.peer is None and ticket.id is not None:
            code = "gone"  # its client went away before the end
        self._remember(ticket, body, code)
        if ticket.id is None:
            self._metrics.count(f"own.{ticket.op}.{code}")  # nobody asked for it
        else:
            self._metrics.request(ticket.op, code)
            self._count_tokens(body)
        said = {
            "rid": ticket.rid,
            "id": ticket.id,
            "client": ticket.client[:CLIENT_SHOWN] or None,
            "op": ticket.op,
            "owner": ticket.owner,
            "session": short(ticket.session.id) if ticket.session else None,
            "code": code,
            "ms": round((self._clock() - ticket.started_s) * 1000, 1),
            **_figures(body),
        }
        if self._log_content:
            said["asked"] = to_wire(ticket.request)
            said["answered"] = body_to_wire(body)
        self._log.info("request", **said)

    def _remember(self, ticket: Ticket, body: Body, code: str) -> None:
        ticket.record.ended(code)
        if isinstance(ticket.request, UNREMEMBERED):
            return
        now_s = self._clock()
        if isinstance(body, DecodeResult):
            ticket.done = body.usage.decoded
        elif isinstance(body, OpenResult | LengthResult) and body.receipt is not None:
            ticket.done = body.receipt.prefilled
            ticket.total = max(ticket.total, ticket.done)
        ended = replace(request_shown(ticket, now_s), ms=(now_s - ticket.started_s) * 1000, code=code)
        self.recent.appendleft(Told(ticket.started_s, ended, ticket.record))

    def _count_tokens(self, body: Body) -> None:
        if isinstance(body, DecodeResult):
            self._metrics.count("tokens_decoded", body.usage.decoded)
            self._metrics.timings.queue.add(body.usage.queue_ms / 1000)
            self._metrics.count("tokens_prefilled", body.usage.prefilled)
        elif isinstance(body, OpenResult | LengthResult) and body.receipt is not None:
            self._metrics.receipt(body.receipt)


def _slow_consumer(ticket: Ticket) -> ErrorBody:
    length = ticket.session.length if ticket.session else 0
    message = "The stream was stopped because its replies were not read; read faster, or use stream: false."
    return SlowConsumer(message, length=length).body()


def _figures(body: Body) -> dict[str, object]:
    """What of a reply may stand in the log: counts, never tokens or text."""
    if isinstance(body, DecodeResult):
        usage = body.usage
        return {"finish": body.finish, "decoded": usage.decoded, "length": body.length}
    if isinstance(body, OpenResult | LengthResult) and body.receipt is not None:
        receipt = body.receipt
        return {
            "reused": receipt.reused,
            "prefilled": receipt.prefilled,
            "trimmed": receipt.trimmed,
            "length": body.length,
        }
    if isinstance(body, ErrorBody):
        return {"field": loggable(body.field)} if body.field else {}
    return {}
