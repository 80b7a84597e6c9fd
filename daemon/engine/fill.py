"""Bringing a session's KV up to its pending token, one bounded quantum at a time.

Open, prefill, sync, trim with replay, and the first step of a decode after KV was dropped all are a
`Fill`: an optional planned change of the content, then forward passes until nothing is missing. The
engine launches a quantum and awaits it in different turns of its loop, so that the device works while
tokens are published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
from mlx import nn

from stateroom.caches.group import Group
from stateroom.caches.session import SessionCache
from stateroom.client.protocol import Progress, Receipt, Source
from stateroom.daemon.engine.session import CHECKPOINT_EVERY, Change, Session, apply, chat_within
from stateroom.daemon.link import ChatTurn


@dataclass(slots=True, eq=False)
class Fill:
    """One request's prefill. `then` is called once: when it is done, or cancelled."""

    rid: int
    session: Session
    change: Change
    then: Callable[[Fill], None]
    received_ms: float
    progress: bool = False
    chat: bool = False  # its tokens are of chat messages appended to others
    most: int = 0  # tokens the session may come to by the decode that follows
    beside: int = 0  # bytes that the decode which follows needs besides: of the model that drafts for it
    opens: bool = False  # its session is new, and goes again if it fails
    shared: int = 0  # tokens whose KV came from another session, or from disk
    read: bool = False  # it was the disk
    fetched: bool = False  # the disk was asked, whatever came of it
    hoped: int = 0  # while it waits for another fill: tokens that it will share with that one
    applied: bool = False  # the change was carried out
    started_ms: float | None = None
    before: int = 0  # the session's length before the change
    computed: int = 0
    total: int = 0  # tokens to compute
    cancelled: bool = False

    def start(self, now_ms: float) -> None:
        self.started_ms = now_ms
        self.apply()
        self.total = self.session.missing

    def apply(self) -> None:
        """Carries the change out, if that isn't done."""
        if not self.applied:
            self.before = self.session.length
            apply(self.session, self.change)
            self.applied = True

    @property
    def tokens(self) -> list[int]:
        """What the session will hold."""
        held = self.session.tokens
        return held if self.applied else held[: self.change.keep] + self.change.tokens

    def borrow(self, loan: Session, *, read: bool = False) -> None:
        """Carries the change out and goes on from other KV than its own: another session's, or one `read`."""
        self.apply()
        session = self.session
        session.cache, session.trail = loan.cache, loan.trail
        session.stored = self.shared = loan.stored
        self.read = read
        whole = loan.stored + 1 >= self.change.keep or session.missing == 0
        # Of what it held itself it may have hoped for more; now nothing of that is computed.
        self.change = replace(self.change, kv_keep=loan.stored, why=None if whole else self.change.why)

    @property
    def computes(self) -> bool:
        """Something is missing, or will be when the change is carried out."""
        return max(self.change.length - 1, 0) > self.change.kv_keep

    @property
    def done(self) -> bool:
        return self.applied and self.session.missing == 0

    def end_cancelled(self) -> None:
        """Keeps what was there and what is finished: the tokens stored, and the next as pending."""
        if not self.applied:
            return
        session = self.session
        del session.tokens[max(self.change.keep, session.stored + 1) :]
        session.snapshot_length = min(session.snapshot_length, session.length)
        session.chat = chat_within(session.chat, session.length)
        if self.chat and session.length > self.change.keep:
            session.chat = [*session.chat, ChatTurn([], session.length, self.change.keep)]

    def receipt(self, now_ms: float) -> Receipt:
        """What was reused and computed; never more reuse than happened."""
        session, change = self.session, self.change
        since = self.received_ms if self.started_ms is None else self.started_ms
        ms = round(now_ms - since, 3)
        if not self.applied:
            there = session.length if not session.missing else session.stored
            return Receipt(reused=there, source=self.source(there), why="cancelled", ms=ms)
        reused = min(max(self.shared, change.reused), session.length)
        return Receipt(
            reused=reused,
            source=self.source(reused),
            # A trim without replay leaves what is missing to whoever needs it.
            prefilled=0 if session.missing else session.length - reused,
            trimmed=max(self.before - change.keep, 0),
            why="cancelled" if self.cancelled else change.why,
            ms=ms,
        )

    def progressed(self) -> Progress:
        return Progress(done=self.computed, total=self.total)

    def source(self, reused: int) -> Source:
        if self.shared and reused:
            return "snapshot" if self.read else "shared"
        return self.session.origin if reused else "none"

    # What the engine's loop asks of any device work done by quanta; `Score` answers the same.

    def end(self) -> None:
        self.then(self)

    @property
    def to_compute(self) -> int:
        """Tokens that are missing, or will be when the change is carried out."""
        if self.applied:
            return self.session.missing
        return max(self.change.length - 1 - self.change.kv_keep, 0)

    @property
    def remaining(self) -> int:
        return self.session.missing

    def piece(self, tokens: int) -> int:
        """How many of so many tokens to feed at once: up to where it is quantised, or leaves a checkpoint."""
        cache = self._cache()
        if cache.checkpointed:
            # At the same lengths in every session, however fast it is: those that others can share from.
            tokens = min(tokens, CHECKPOINT_EVERY - self.session.stored % CHECKPOINT_EVERY)
        return cache.piece(tokens)

    def _cache(self) -> SessionCache:
        if self.session.cache is None:
            self.session.cache = self.session.served.empty()
        return self.session.cache

    def launch(self, model: nn.Module, tokens: int) -> list[mx.array]:
        """Starts a forward pass over the next tokens; gives the arrays whose evaluation ends it."""
        cache = self.ready()
        # The logits are never evaluated: a prefill needs only the KV.
        cache.forward(model, mx.array([self.next(tokens)], dtype=mx.uint32))
        return cache.arrays()

    def ready(self) -> SessionCache:
        """The session's rows, to be fed."""
        cache = self._cache()
        cache.take_back()
        return cache

    def next(self, tokens: int) -> list[int]:
        """The tokens to feed next."""
        return self.session.tokens[self.session.stored : self.session.stored + tokens]

    def landed(self, tokens: int, arrays: list[mx.array]) -> None:
        self.session.stored += tokens
        self.computed += tokens


def launch_together(model: nn.Module, pieces: Sequence[tuple[Fill, int]]) -> list[mx.array]:
    """One pass over the next tokens of several fills, a row each, all of them or none.

    Rows are padded behind to the longest; what was fed too much is trimmed again, as their layers allow.
    """
    caches = [fill.ready() for fill, _ in pieces]
    width = max(tokens for _, tokens in pieces)
    rows = [[*fill.next(tokens), *[0] * (width - tokens)] for fill, tokens in pieces]
    Group(caches).forward(model, mx.array(rows, dtype=mx.uint32))
    for cache, (_, tokens) in zip(caches, pieces, strict=True):
        if tokens < width:
            cache.trim(0, width - tokens)
    return [array for cache in caches for array in cache.arrays()]
