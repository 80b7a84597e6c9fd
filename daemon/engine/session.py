"""A session as the engine holds it: its tokens, and as much of their KV as is stored.

KV is a cache of tokens. It holds the first `stored` tokens, never more than all but the last: the
last token is *pending* and is fed by the next operation. Whatever is missing (after a worker died, or
where layers can't be trimmed) is computed before it is needed, so dropping KV is always legal.

Layers that can't be trimmed leave checkpoints on the session's trail; going back is exact at those and
wherever every layer can be trimmed, and from there the rest is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from stateroom.caches.checkpoints import Trail
from stateroom.caches.session import SessionCache
from stateroom.client.protocol import Source
from stateroom.daemon.engine.kv import Served
from stateroom.daemon.engine.speculation.guesser import Guesser
from stateroom.daemon.engine.speculation.lookup import GRAM_MAX
from stateroom.daemon.link import ChatTurn, Left

REPLACED_MAX = 4_096  # tokens that the last cut dropped, kept to guess from
NO_LIMIT = 2**62  # of tokens that a session may share with its owner's others

CHECKPOINT_EVERY = 256  # tokens between two checkpoints of a long prompt or answer, and at every prompt's end


@dataclass(slots=True, eq=False, weakref_slot=True)
class Session:
    """One session. While a stream runs, its row is lent to a batch: `cache` is None and `lent` is set."""

    id: str
    served: Served
    owner: str = ""
    background: bool = False
    tokens: list[int] = field(default_factory=list)
    cache: SessionCache | None = None
    _stored: int = 0
    trail: Trail = field(default_factory=Trail)
    lent: bool = False
    replaced: list[int] = field(default_factory=list)  # what the last cut dropped, and what stood before it
    guesser: Guesser | None = None  # while it speculates, and for a while afterwards
    origin: Source = "session"  # "fork" until the first operation after a fork
    trunk: str | None = None  # the published trunk that it is, or stems from: the first so many of its tokens
    trunk_length: int = 0
    # With whom it may share: all of its tokens, and the trunk's.
    realm: Hashable = None
    trunk_realm: Hashable = None
    moved: Callable[[Session], None] | None = None  # told when KV is of other tokens than before
    chat: list[ChatTurn] = field(default_factory=list)  # what was given as messages, oldest first
    chat_told: list[ChatTurn] = field(default_factory=list)  # as the broker last heard
    snapshot: str | None = None  # its own on disk, which nobody asked for
    snapshot_stored: int = 0  # tokens that have KV in it
    snapshot_length: int = 0  # tokens in it that the session still has, or may have: see `snapshot_sure`
    snapshot_sure: bool = False  # it was written, or its tokens were compared, in this process
    snapshot_told: str | None = None  # as the broker last heard
    parts_told: tuple[int, ...] = ()  # numbers of what it holds that others may, as the broker last heard
    quantised_told: bool | None = None  # how it is stored, as the broker last heard
    left: Left | None = None  # why its KV was last dropped
    used_ms: float = 0.0  # when a request last came for it or ended, by the engine's clock

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def stored(self) -> int:
        """Tokens whose KV is there and complete. Set it when tokens and KV agree on so many."""
        return self._stored

    @stored.setter
    def stored(self, tokens: int) -> None:
        self._stored = tokens
        if self.moved is not None:
            self.moved(self)

    def realms(self) -> Iterator[tuple[Hashable, int]]:
        """Where others may learn of its tokens: the realm, and of how many."""
        if self.realm is not None:
            yield self.realm, NO_LIMIT
        if self.trunk is not None:
            yield self.trunk_realm, self.trunk_length

    @property
    def missing(self) -> int:
        """Tokens to compute before the pending one can be fed."""
        return max(len(self.tokens) - 1, 0) - self.stored

    @property
    def kv_bytes(self) -> int:
        """What its rows take; checkpoints, which forks share, come on top."""
        return self.cache.nbytes_capacity if self.cache is not None else 0

    def cut(self, length: int) -> None:
        """Tokens beyond `length` go; the next version of a text is much like the one before."""
        if length >= len(self.tokens):
            return
        # What follows is its owner's own, though the trunk was longer.
        self.trunk_length = min(self.trunk_length, length)
        self.snapshot_length = min(self.snapshot_length, length)
        if self.guesser is not None:
            self.guesser.cut(self.tokens, length)
        self.replaced = self.tokens[max(length - GRAM_MAX, 0) : length + REPLACED_MAX]
        del self.tokens[length:]

    def snapshot_news(self) -> str | None:
        """Its own snapshot, if the broker hasn't heard of that: "" for none any more."""
        if self.snapshot == self.snapshot_told:
            return None
        self.snapshot_told = self.snapshot
        return self.snapshot or ""

    def drop_kv(self, why: Left = "content") -> None:
        """`why` is told with the next journal, if it isn't there again by then."""
        self.left = why
        self.cache = None
        self.stored = 0
        self.trail = Trail()

    def reachable(self, length: int) -> int:
        """The most of the first `length` tokens whose KV can be had exactly, without computing."""
        return reachable(self.cache, 0, self.trail, length) if self.cache is not None else 0

    def go_back(self, length: int) -> None:
        """KV goes back to `length` tokens, one that `reachable` gave; 0: all of it goes."""
        if not length or self.cache is None:
            self.drop_kv()
            return
        held = self.cache.offsets[0]
        if self.cache.can_trim(0, held - length):
            if held > length:
                self.cache.trim(0, held - length)
        else:
            checkpoint = self.trail.nearest(length)
            assert checkpoint is not None
            self.cache.restore(checkpoint)
        self.stored = length
        self.trail.cut(length)

    def nearest(self, length: int) -> int:
        """The length nearest to `length` that the session can be trimmed to without computing anything."""
        if self.cache is None:
            return self.length
        # A session of one token has no KV yet.
        lengths = [0, 1, *self.checkpoints, min(max(length, self.trim_floor), self.length)]
        return min(lengths, key=lambda n: (abs(n - length), -n))

    @property
    def trim_floor(self) -> int:
        """The length from which on the session can be trimmed at will. KV is of all but its last token."""
        floor = self.cache.trim_floor(0) if self.cache is not None else 0
        return floor + 1 if floor else 0

    @property
    def checkpoints(self) -> list[int]:
        """Lengths below `trim_floor` that it can be trimmed to."""
        floor = self.trim_floor
        return [n + 1 for n in self.trail.lengths if n + 1 < floor and self.reachable(n) == n]

    def settle(self) -> None:
        """After a row came back: KV beyond all but the last token goes, exactly, or all of it."""
        assert self.cache is not None
        self.go_back(self.reachable(min(self.cache.offsets[0], max(len(self.tokens) - 1, 0))))


def reachable(cache: SessionCache, row: int, trail: Trail, length: int) -> int:
    """The most of a row's first `length` tokens that it can go back to exactly."""
    if not length or cache.can_trim(row, cache.offsets[row] - length):
        return length
    checkpoint = trail.nearest(length)
    if checkpoint is None or not cache.can_restore(checkpoint):
        return 0
    return checkpoint.length


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
    if kv_keep < session.stored:
        reachable = session.reachable(kv_keep)
        if reachable < kv_keep and reachable + 1 < keep:  # a last token's own is computed in any case
            start = f"from the checkpoint at {reachable} tokens" if reachable else "from its first token"
            why = f"{_stiff(session)} can't go back to {kv_keep} tokens, so it is computed again {start}"
        kv_keep = reachable
    return Change(keep, kv_keep, tokens, why)


def _stiff(session: Session) -> str:
    """What of a session can't be trimmed at will."""
    kinds = sorted({kind.kind for kind in session.served.blueprint.kinds if kind.kind != "full"})
    after = session.served.blueprint.scheme.quantise_after
    return f"layers of kind {', '.join(kinds)}" if kinds else f"KV that was quantised at {after} tokens"


def apply(session: Session, change: Change) -> None:
    """Carries a plan out: back to where the plan found that every layer can go exactly."""
    if change.kv_keep < session.stored or not change.kv_keep:
        session.go_back(change.kv_keep)
    session.cut(change.keep)
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
