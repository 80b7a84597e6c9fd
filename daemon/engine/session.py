"""A session as the engine holds it: its tokens, and as much of their KV as is stored.

KV is a cache of tokens. It holds the first `stored` tokens, never more than all but the last: the
last token is *pending* and is fed by the next operation. Whatever is missing (after a worker died, or
where layers can't be trimmed) is computed before it is needed, so dropping KV is always legal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stateroom.caches.session import SessionCache
from stateroom.client.protocol import Source
from stateroom.daemon.link import ChatTurn


@dataclass(slots=True, eq=False)
class Session:
    """One session. While a stream runs, its row is lent to a batch: `cache` is None and `lent` is set."""

    id: str
    background: bool = False
    tokens: list[int] = field(default_factory=list)
    cache: SessionCache | None = None
    stored: int = 0
    lent: bool = False
    origin: Source = "session"  # "fork" until the first operation after a fork
    chat: list[ChatTurn] = field(default_factory=list)  # what was given as messages, oldest first
    chat_told: list[ChatTurn] = field(default_factory=list)  # as the broker last heard

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def missing(self) -> int:
        """Tokens to compute before the pending one can be fed."""
        return max(len(self.tokens) - 1, 0) - self.stored

    @property
    def kv_bytes(self) -> int:
        return self.cache.nbytes_capacity if self.cache is not None else 0

    def drop_kv(self) -> None:
        self.cache = None
        self.stored = 0

    def settle(self) -> None:
        """After a row came back: KV beyond all but the last token goes, exactly, or all of it."""
        assert self.cache is not None
        held = self.cache.offsets[0]
        wanted = min(held, max(len(self.tokens) - 1, 0))
        if self.cache.broken or not self.cache.can_trim(0, held - wanted):
            self.drop_kv()
            return
        if held > wanted:
            self.cache.trim(0, held - wanted)
        self.stored = wanted


@dataclass(frozen=True)
class Change:
    """A planned change of a session's content; nothing happens before `apply`."""

    keep: int  # tokens that stay
    kv_keep: int  # of their KV
    tokens: list[int]  # that follow
    why: str | None  # why less KV stays than could be hoped

    @property
    def length(self) -> int:
        return self.keep + len(self.tokens)

    @property
    def reused(self) -> int:
        """Tokens that stay without being computed again; a pending token counts as it is computed once."""
        return self.keep if self.kv_keep + 1 >= self.keep else self.kv_keep


def plan(session: Session, keep: int, tokens: list[int]) -> Change:
    """Keeps the first `keep` tokens and appends `tokens`; finds how much KV can stay."""
    length = keep + len(tokens)
    kv_keep = min(session.stored, keep, max(length - 1, 0))
    why = None
    if session.missing > 0:
        why = f"the KV of {session.missing} tokens was no longer on the device"
    drop = session.stored - kv_keep
    if drop and kv_keep and session.cache is not None and not session.cache.can_trim(0, drop):
        kinds = ", ".join(sorted({kind.kind for kind in session.cache.kinds() if kind.kind != "full"}))
        why = f"layers of kind {kinds} can't be trimmed by {drop} tokens, so all of it is computed again"
        kv_keep = 0
    return Change(keep, kv_keep, tokens, why)


def apply(session: Session, change: Change) -> None:
    """Carries a plan out. The trim is exact in every layer or, by plan, the KV goes as a whole."""
    drop = session.stored - change.kv_keep
    if change.kv_keep == 0:
        session.drop_kv()
    elif drop and session.cache is not None:
        session.cache.trim(0, drop)
        session.stored = change.kv_keep
    del session.tokens[change.keep :]
    session.tokens.extend(change.tokens)
    session.chat = chat_within(session.chat, change.keep)


def chat_within(chat: list[ChatTurn], length: int) -> list[ChatTurn]:
    """The turns of a session's first `length` tokens."""
    return [
        turn if turn.end <= length else ChatTurn([], length, turn.start)
        for turn in chat
        if turn.end <= length or turn.start < length
    ]


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix; by halves, so that equal lists compare at C speed."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    low, high = 0, size
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
