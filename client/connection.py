"""One connection's requests in flight: pure, without a socket, and without a clock but the `now` passed in.

The shell that owns the socket calls a method, hands the happenings it returns to whoever waits for
them, and then sends what `frames_to_send` gives. Any reply first passes the table below; only then
does anything change. A request's life:

    state       more         last     cancel                abandon            lose
    OPEN        OPEN         ENDED    CANCELLING, tell      ENDED, tell        ENDED
    CANCELLING  CANCELLING   ENDED    CANCELLING            ENDED              ENDED

"more" and "last" are replies that came in sequence; "abandon" is a timeout, a gap in the sequence, or a
reader too slow; "tell" sends the daemon a `cancel`. An ended request is forgotten and its id never
used again, so a reply that comes late belongs to no request and is dropped. But for one thing: sessions that
a late reply names, and that have no other name, are closed, since nobody will ever know of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from stateroom.client.errors import (
    Capacity,
    ClientError,
    Disconnected,
    RequestTimeout,
    StateroomError,
    StreamBroken,
    error_from,
)
from stateroom.client.limits import REQUESTS_PER_CLIENT_MAX
from stateroom.client.protocol import (
    Cancel,
    Close,
    ErrorBody,
    Event,
    Fork,
    ForkResult,
    Open,
    OpenResult,
    Progress,
    Request,
    Restore,
    Result,
    TokenEvent,
)
from stateroom.client.timeouts import CANCEL_TIMEOUT_S, Wait
from stateroom.client.wire import DecodeError, decode_reply, encode_request

GIVEN_UP_MAX = REQUESTS_PER_CLIENT_MAX  # of requests that were abandoned, whose sessions would be closed


class State(Enum):
    OPEN = auto()
    CANCELLING = auto()
    ENDED = auto()


class Input(Enum):
    MORE = auto()
    LAST = auto()
    CANCEL = auto()
    ABANDON = auto()
    LOSE = auto()


@dataclass(frozen=True)
class Step:
    state: State
    tell: bool = False  # send the daemon a `cancel`


TABLE: dict[tuple[State, Input], Step] = {
    (State.OPEN, Input.MORE): Step(State.OPEN),
    (State.OPEN, Input.LAST): Step(State.ENDED),
    (State.OPEN, Input.CANCEL): Step(State.CANCELLING, tell=True),
    (State.OPEN, Input.ABANDON): Step(State.ENDED, tell=True),
    (State.OPEN, Input.LOSE): Step(State.ENDED),
    (State.CANCELLING, Input.MORE): Step(State.CANCELLING),
    (State.CANCELLING, Input.LAST): Step(State.ENDED),
    (State.CANCELLING, Input.CANCEL): Step(State.CANCELLING),
    (State.CANCELLING, Input.ABANDON): Step(State.ENDED),
    (State.CANCELLING, Input.LOSE): Step(State.ENDED),
}


# ---------------------------------------------------------------- happenings, for the shell

Part = TokenEvent | Progress | Event


@dataclass(frozen=True)
class Update:
    """A reply that isn't the request's last."""

    request_id: int
    body: Part


@dataclass(frozen=True)
class Done:
    """The request's last reply: a result."""

    request_id: int
    result: Result


@dataclass(frozen=True)
class Failed:
    """The request has ended without a result."""

    request_id: int
    error: StateroomError | ClientError


class Why(Enum):
    LATE = "a reply to a request that has ended"
    STRANGER = "a reply to a request that was never made"
    NOBODY = "an error about a request whose id the daemon could not read"
    UNREADABLE = "a frame that is no reply"


@dataclass(frozen=True)
class Ignored:
    """A frame that belongs to no open request."""

    why: Why
    detail: str = ""


Happening = Update | Done | Failed | Ignored


# ---------------------------------------------------------------- the connection


@dataclass
class _InFlight:
    id: int
    op: str
    wait: Wait
    deadline: float | None
    state: State = State.OPEN
    seq_next: int = 0
    unnamed: bool = False  # it makes sessions that only its result names


class Connection:
    """The requests of one connection. Not for several threads at once: its shell sees to that.

    Args:
        first_id: ids count up from here; a shell that connects again goes on from `next_id`, so that an id
            names one request in all its life.
        cancel_s: how long a cancelled request may take to end.
    """

    def __init__(self, *, first_id: int = 1, cancel_s: float = CANCEL_TIMEOUT_S) -> None:
        self.next_id = first_id
        self.closed = False
        self._cancel_s = cancel_s
        self._first_id = first_id
        self._in_flight: dict[int, _InFlight] = {}
        self._ops: dict[int, str] = {}  # of the same requests and of those given up, for `decode_reply`
        self._given_up: dict[int, None] = {}  # makers of sessions, the oldest first
        self._frames: list[bytes] = []

    @property
    def open_requests(self) -> int:
        return len(self._in_flight)

    @property
    def next_deadline(self) -> float | None:
        """When `expire` has something to do, if nothing comes before."""
        return min((r.deadline for r in self._in_flight.values() if r.deadline is not None), default=None)

    def frames_to_send(self) -> list[bytes]:
        """What the shell must send now, in order; each frame is given once."""
        frames, self._frames = self._frames, []
        return frames

    def start(self, request: Request, wait: Wait, now: float) -> int:
        """Opens a request and returns its id.

        Raises:
            Invalid: it can't be sent (see `encode_request`); nothing was.
            Capacity: `REQUESTS_PER_CLIENT_MAX` requests are open.
            Disconnected: the connection is lost.
        """
        if self.closed:
            raise Disconnected("The connection to the daemon is closed.")
        if len(self._in_flight) >= REQUESTS_PER_CLIENT_MAX:
            raise Capacity(
                f"{REQUESTS_PER_CLIENT_MAX} requests are open on this connection; let some end first."
            )
        frame = encode_request(self.next_id, request)
        opened = _InFlight(self.next_id, request.op, wait, _after(now, wait.timeout_s))
        opened.unnamed = makes_unnamed(request)
        self.next_id += 1
        self._frames.append(frame)
        self._in_flight[opened.id] = opened
        self._ops[opened.id] = opened.op
        return opened.id

    def receive(self, frame: bytes | memoryview, now: float) -> list[Happening]:
        """Takes one frame from the daemon."""
        try:
            reply = decode_reply(frame, self._ops)
        except DecodeError as error:
            if error.request_id not in self._in_flight:
                return [Ignored(Why.UNREADABLE, str(error))]
            broken = StreamBroken(f"The daemon sent a reply that this library can't read: {error}")
            return self.abandon(error.request_id, broken)
        body = reply.body
        if reply.id is None:
            return [Ignored(Why.NOBODY, body.message if isinstance(body, ErrorBody) else "")]
        request = self._in_flight.get(reply.id)
        if request is None:
            known = self._first_id <= reply.id < self.next_id
            if reply.id in self._given_up and isinstance(body, Result | ErrorBody):
                del self._given_up[reply.id], self._ops[reply.id]
                self.discard(body)
            return [Ignored(Why.LATE if known else Why.STRANGER, f"request {reply.id}")]
        if reply.seq != request.seq_next:
            gap = (
                f"Reply {reply.seq} of `{request.op}` came where {request.seq_next} was due; some were lost."
            )
            return self.abandon(request.id, StreamBroken(gap))
        if isinstance(body, Result | ErrorBody):
            self._take(request, Input.LAST)
            if isinstance(body, ErrorBody):
                return [Failed(request.id, error_from(body))]
            return [Done(request.id, body)]
        self._take(request, Input.MORE)
        request.seq_next += 1
        if request.wait.each and request.state is State.OPEN:
            request.deadline = _after(now, request.wait.timeout_s)
        return [Update(request.id, body)]

    def cancel(self, request_id: int, now: float) -> None:
        """Asks the daemon to end a request; its last reply still comes. Nothing, if it has ended already."""
        request = self._in_flight.get(request_id)
        if request is not None and request.state is State.OPEN:
            self._take(request, Input.CANCEL)
            request.deadline = _after(now, self._cancel_s)

    def abandon(self, request_id: int, error: StateroomError | ClientError) -> list[Happening]:
        """Ends a request here and now, whatever the daemon still says of it."""
        request = self._in_flight.get(request_id)
        if request is None:
            return []
        self._take(request, Input.ABANDON)
        return [Failed(request_id, error)]

    def discard(self, made: Result | ErrorBody) -> None:
        """Closes the sessions that a result names, which nobody will ever know of."""
        if isinstance(made, OpenResult):
            self._forget(Close(session=made.session))
        elif isinstance(made, ForkResult):
            for session in made.sessions:
                self._forget(Close(session=session))

    def expire(self, now: float) -> list[Happening]:
        """Abandons the requests whose deadline has passed."""
        late = [r for r in self._in_flight.values() if r.deadline is not None and r.deadline <= now]
        return [
            happening for request in late for happening in self.abandon(request.id, self._timeout_of(request))
        ]

    def lose(self, why: str) -> list[Happening]:
        """The socket is gone: ends every request with `Disconnected(why)`, and the connection."""
        self.closed = True
        self._frames.clear()
        requests = list(self._in_flight.values())
        for request in requests:
            self._take(request, Input.LOSE)
        return [Failed(request.id, Disconnected(why)) for request in requests]

    def _take(self, request: _InFlight, given: Input) -> None:
        step = TABLE[request.state, given]
        request.state = step.state
        if step.tell:
            self._forget(Cancel(request=request.id))
        if step.state is State.ENDED:
            del self._in_flight[request.id], self._ops[request.id]
        if given is Input.ABANDON and request.unnamed:
            self._ops[request.id] = request.op
            self._given_up[request.id] = None
            if len(self._given_up) > GIVEN_UP_MAX:
                oldest = next(iter(self._given_up))
                del self._given_up[oldest], self._ops[oldest]

    def _forget(self, request: Request) -> None:
        """Sent and forgotten: that it happens is the answer. The reply is dropped as a late one."""
        self._frames.append(encode_request(self.next_id, request))
        self.next_id += 1

    def _timeout_of(self, request: _InFlight) -> RequestTimeout:
        if request.state is State.CANCELLING:
            return RequestTimeout(f"The cancelled `{request.op}` did not end within {self._cancel_s:g} s.")
        what = "No further reply" if request.seq_next else "No reply"
        return RequestTimeout(
            f"{what} to `{request.op}` within {request.wait.timeout_s:g} s; it was cancelled. "
            "Give a longer timeout_s if it may take so long."
        )


def makes_unnamed(request: Request) -> bool:
    """Whether the sessions that it makes can be known by its result alone."""
    if isinstance(request, Fork):
        return request.names is None
    return isinstance(request, Open | Restore) and request.name is None


def _after(now: float, timeout_s: float | None) -> float | None:
    return None if timeout_s is None else now + timeout_s
