"""What runs in the simulated engine: sessions, prefills, streams; as in `daemon/engine` without tensors."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.sim.kv import BYTES_PER_TOKEN, View
from tests.sim.language import CONTEXT, EOS, next_token, spoken

from stateroom.client.protocol import Decode, DecodeResult, Finish, LengthResult, Receipt, TokenEvent, Usage
from stateroom.daemon.link import Journal, Part


@dataclass(eq=False)
class Session:
    """Its tokens, and the KV of the first `kv.length` of them. The last token is pending."""

    id: str
    owner: str
    background: bool
    kv: View
    tokens: array[int] = field(default_factory=lambda: array("I"))

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def missing(self) -> int:
        return max(len(self.tokens) - 1, 0) - self.kv.length

    def journal(self, keep: int) -> Journal:
        kv = self.kv
        return Journal(
            self.id,
            keep,
            self.tokens[keep:].tolist(),
            private_bytes=kv.capacity * BYTES_PER_TOKEN,
            parts=[Part(t.number, t.tokens * BYTES_PER_TOKEN, trunk=True) for t, _ in kv.runs],
            resident=kv.length > 0 or self.length <= 1,
        )


@dataclass(eq=False)
class Fill:
    """A change of a session's tokens, and the computing of what is missing then. `then` is called once."""

    rid: int
    session: Session
    keep: int
    tokens: list[int]
    then: Callable[[Fill], None]
    progress: bool = False
    opens: bool = False
    most: int = 0  # tokens that the session may come to by the decode that follows
    started: bool = False
    cancelled: bool = False
    before: int = 0
    reused: int = 0
    total: int = 0

    @property
    def to_compute(self) -> int:
        """Tokens that its passes feed, as long as it hasn't begun."""
        return max(self.keep + len(self.tokens) - 1, 0) - self._kept

    @property
    def _kept(self) -> int:
        length = self.keep + len(self.tokens)
        return min(self.session.kv.length, self.keep, max(length - 1, 0))

    def begin(self) -> None:
        if self.started:
            return
        session = self.session
        self.started, self.before = True, session.length
        session.kv.trim(self._kept)
        self.reused = self.keep if session.kv.length + 1 >= self.keep else session.kv.length
        del session.tokens[self.keep :]
        session.tokens.extend(self.tokens)
        self.total = session.missing

    @property
    def done(self) -> bool:
        return self.started and not self.session.missing

    def stop(self) -> None:
        """Cancelled in the midst: what is computed stays, and the next token as pending."""
        if self.started and not self.done:
            del self.session.tokens[max(self.keep, self.session.kv.length + 1) :]

    def receipt(self) -> Receipt:
        session = self.session
        if not self.started:
            there = session.length if not session.missing else session.kv.length
            return Receipt(reused=there, source="session" if there else "none", why="cancelled")
        reused = min(self.reused, session.length)
        return Receipt(
            reused=reused,
            source="session" if reused else "none",
            prefilled=0 if session.missing else session.length - reused,
            trimmed=max(self.before - self.keep, 0),
            why="cancelled" if self.cancelled else None,
        )

    def result(self) -> LengthResult:
        cut = self.cancelled and not self.done
        if cut:
            self.stop()
        return LengthResult(
            length=self.session.length, receipt=self.receipt(), finish="cancelled" if cut else "done"
        )


@dataclass(eq=False)
class Stream:
    rid: int
    session: Session
    request: Decode
    base: int = 0
    drawn: list[int] = field(default_factory=list)
    finish: Finish | None = None
    cancelled: bool = False

    @property
    def most(self) -> int:
        return min(self.base + self.request.max_tokens, CONTEXT)

    def step(self) -> TokenEvent:
        """Feeds the pending token and draws the next."""
        session = self.session
        session.kv.append(1)
        token = next_token(session.tokens)
        session.tokens.append(token)
        self.took(token)
        return TokenEvent(tokens=[token], text=spoken(token))

    def took(self, token: int) -> None:
        self.drawn.append(token)
        if token == EOS and not self.request.ignore_eos:
            self.finish = "stop_token"
        elif len(self.drawn) >= self.request.max_tokens:
            self.finish = "length"
        elif self.base + len(self.drawn) >= CONTEXT:
            self.finish = "context"

    def result(self) -> DecodeResult:
        return DecodeResult(
            finish=self.finish or "cancelled",
            tokens=self.drawn,
            text="".join(map(spoken, self.drawn)),
            length=self.session.length,
            usage=Usage(decoded=len(self.drawn), prefilled=1),
        )
