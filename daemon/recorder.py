"""What the broker saw of each request: when it waited here, who had it, what was told of it. Pure.

The worker's part is remembered there (`engine/recorder.py`); `trace` puts the two together. Every ticket has
a `Record`, which its lifecycle's events reach; those of the last requests outlive their tickets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stateroom.client.protocol import Span
from stateroom.daemon.clock import Clock
from stateroom.daemon.lifecycle import RequestEvent
from stateroom.daemon.link import Recorded

Detail = str | int | float

SPANS_MAX = 128  # of one request; later ones are counted, but for its end
SENDS_MAX = SPANS_MAX // 2  # when there are so many spans, further replies go with those before them
PAUSE_S = 1.0  # between two replies: longer, and they are told as two spans
MOMENTS: Mapping[RequestEvent, str] = {
    RequestEvent.CANCEL: "cancelled",
    RequestEvent.OVERFLOW: "cut",  # its client does not read
    RequestEvent.VANISH: "client gone",
}


@dataclass(frozen=True, slots=True)
class Seen:
    """`start_s` and `end_s` by the broker's clock."""

    name: str
    start_s: float
    end_s: float
    details: dict[str, Detail]


@dataclass(slots=True)
class _Sends:
    """Replies, one soon after the other."""

    start_s: float
    end_s: float
    replies: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Record:
    """Of one request.

    Args:
        on: False: it takes nothing, as for requests that nobody will ask about.

    Attributes:
        workers: those that had it, by model and generation.
        dropped: spans that there were too many of.
    """

    clock: Clock
    on: bool = True
    workers: list[tuple[str, int]] = field(default_factory=list)
    dropped: int = 0
    _seen: list[Seen] = field(default_factory=list)
    _open: dict[str, tuple[float, dict[str, Detail]]] = field(default_factory=dict)  # since when, by name
    _sends: _Sends | None = None
    _told: bool = False  # it had tokens

    def moved(self, event: RequestEvent) -> None:
        """An event of its lifecycle."""
        if not self.on:
            return
        if event is RequestEvent.LOSE:
            self._end("worker", lost="yes")
            self.waits("engine")
        elif event in MOMENTS:
            self._add(Seen(MOMENTS[event], now_s := self.clock(), now_s, {}))

    def waits(self, why: str) -> None:
        """It is held, for a reason that is a word of `client.protocol.WAITING`."""
        self._end("queued")
        self._begin("queued", why=why)

    def sent(self, model: str, generation: int) -> None:
        """A worker has it from now on."""
        self._end("queued")
        self._end("worker")
        if self.on and len(self.workers) < SPANS_MAX:
            self.workers.append((model, generation))
        self._begin("worker", model=model, generation=generation)

    def replied(self, nbytes: int, *, tokens: bool, waits: bool) -> None:
        """A reply was sent, or `waits` for the client to read those before it."""
        if not self.on:
            return
        now_s = self.clock()
        if tokens and not self._told:
            self._told = True
            self._add(Seen("first token", now_s, now_s, {}))
        sends = self._sends
        if sends is not None and (now_s - sends.end_s <= PAUSE_S or len(self._seen) >= SENDS_MAX):
            sends.end_s = now_s
            sends.replies += 1
            sends.nbytes += nbytes
        else:
            self._close_sends()
            self._sends = _Sends(now_s, now_s, 1, nbytes)
        if waits:
            self._begin("unread")
        elif "unread" in self._open:
            self._end("unread")

    def ended(self, code: str) -> None:
        """It had its final reply."""
        if not self.on:
            return
        now_s = self.clock()
        for name in list(self._open):
            self._end(name)
        self._close_sends()
        self._add(Seen("ended", now_s, now_s, {"code": code}), last=True)

    def seen(self) -> list[Seen]:
        """So far, in the order of their starts; what goes on ends now."""
        now_s = self.clock()
        made = [
            *self._seen,
            *(Seen(name, since_s, now_s, told) for name, (since_s, told) in self._open.items()),
        ]
        if self._sends is not None:
            made.append(_of_sends(self._sends))
        return sorted(made, key=lambda seen: seen.start_s)

    # ------------------------------------------------------------ spans

    def _begin(self, name: str, **details: Detail) -> None:
        """Nothing changes where it is under way already."""
        if self.on and name not in self._open:
            self._open[name] = self.clock(), details

    def _end(self, name: str, **details: Detail) -> None:
        began = self._open.pop(name, None)
        if began is not None:
            self._add(Seen(name, began[0], self.clock(), began[1] | details))

    def _close_sends(self) -> None:
        if self._sends is not None:
            self._add(_of_sends(self._sends))
            self._sends = None

    def _add(self, seen: Seen, *, last: bool = False) -> None:
        if len(self._seen) < SPANS_MAX or last:
            self._seen.append(seen)
        else:
            self.dropped += 1


def _of_sends(sends: _Sends) -> Seen:
    return Seen("sends", sends.start_s, sends.end_s, {"replies": sends.replies, "bytes": sends.nbytes})


def timeline(began_s: float, seen: list[Seen], recorded: Recorded | None) -> list[Span]:
    """Both parts on one clock, which is the machine's: milliseconds since the request arrived."""
    made = [
        Span(
            name=each.name,
            where="broker",
            start_ms=_ms((each.start_s - began_s) * 1000.0),
            ms=_ms((each.end_s - each.start_s) * 1000.0),
            details=each.details,
        )
        for each in seen
    ]
    if recorded is not None:
        made += [
            Span(
                name=mark.name,
                where="engine",
                start_ms=_ms(mark.start_ms - began_s * 1000.0),
                ms=_ms(mark.ms),
                details={
                    name: _ms(told) if isinstance(told, float) else told
                    for name, told in mark.details.items()
                },
            )
            for mark in recorded.marks
        ]
    return sorted(made, key=lambda span: span.start_ms)


def _ms(ms: float) -> float:
    return round(ms, 3)
