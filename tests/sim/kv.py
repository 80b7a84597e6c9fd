"""KV as lengths and bytes: tails, trunks that forks share, and the pool that both are taken from.

A view is what one session sees: runs of trunks, each narrowed to so many tokens, and a tail of its own. The
pool's books are kept move by move; `problem` adds up what there is, and the two must agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

BYTES_PER_TOKEN = 16
STEP = 64  # tokens by which a tail's capacity grows
SHARED_MIN = 32  # a fork copies a shorter tail


@dataclass(eq=False)
class Trunk:
    number: int
    tokens: int
    holders: int


@dataclass
class Pool:
    """All KV of one worker. `budget_bytes`: what may be taken."""

    budget_bytes: int
    used_bytes: int = 0
    trunks: list[Trunk] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)

    def freeze(self, tokens: int) -> Trunk:
        trunk = Trunk(next(self._numbers), tokens, 1)
        self.trunks.append(trunk)
        self.used_bytes += tokens * BYTES_PER_TOKEN
        return trunk

    def release(self, trunk: Trunk) -> None:
        trunk.holders -= 1
        if not trunk.holders:
            self.trunks.remove(trunk)
            self.used_bytes -= trunk.tokens * BYTES_PER_TOKEN

    def problem(self, views: Iterable[View]) -> str | None:
        """What doesn't add up between the books and what the sessions hold."""
        held: dict[Trunk, int] = {}
        tails = 0
        for view in views:
            tails += view.capacity
            for trunk, seen in view.runs:
                if not 0 < seen <= trunk.tokens:
                    return f"a view of {seen} of a trunk's {trunk.tokens} tokens"
                held[trunk] = held.get(trunk, 0) + 1
            if not 0 <= view.tail <= view.capacity:
                return f"a tail of {view.tail} tokens in room for {view.capacity}"
        for trunk in self.trunks:
            if held.pop(trunk, 0) != trunk.holders:
                return f"a trunk of {trunk.tokens} tokens counts {trunk.holders} holders"
        if held:
            return "a session sees a trunk that was given back"
        there = (tails + sum(trunk.tokens for trunk in self.trunks)) * BYTES_PER_TOKEN
        if there != self.used_bytes:
            return f"the books say {self.used_bytes} bytes, and there are {there}"
        return None


@dataclass(eq=False)
class View:
    pool: Pool
    runs: list[tuple[Trunk, int]] = field(default_factory=list)
    tail: int = 0
    capacity: int = 0  # tokens that the tail has room for

    @property
    def length(self) -> int:
        return sum(seen for _, seen in self.runs) + self.tail

    @property
    def private_bytes(self) -> int:
        return (self.capacity + sum(t.tokens for t, _ in self.runs if t.holders == 1)) * BYTES_PER_TOKEN

    @property
    def shared_bytes(self) -> int:
        return sum(trunk.tokens for trunk, _ in self.runs if trunk.holders > 1) * BYTES_PER_TOKEN

    def append(self, tokens: int) -> None:
        self._take_back()
        self.tail += tokens
        self._hold(-(-self.tail // STEP) * STEP)

    def trim(self, length: int) -> None:
        """Narrows what is seen to the first `length` tokens."""
        drop = self.length - length
        assert drop >= 0
        cut = min(drop, self.tail)
        self.tail, drop = self.tail - cut, drop - cut
        while drop:
            trunk, seen = self.runs.pop()
            if seen > drop:
                self.runs.append((trunk, seen - drop))
                break
            drop -= seen
            self.pool.release(trunk)
        if not self.tail:
            self._hold(0)

    def branch(self) -> View:
        """A child that sees the same: a long tail becomes a trunk of both, a short one is copied."""
        if self.tail >= SHARED_MIN:
            self.runs.append((self.pool.freeze(self.tail), self.tail))
            self.tail = 0
            self._hold(0)
        child = View(self.pool, list(self.runs))
        for trunk, _ in child.runs:
            trunk.holders += 1
        if self.tail:
            child.append(self.tail)
        return child

    def _take_back(self) -> None:
        """A trunk at the end that nobody else sees any more becomes tail again."""
        while self.runs and self.runs[-1][0].holders == 1:
            trunk, seen = self.runs.pop()
            self.pool.release(trunk)
            self.tail += seen
            self._hold(max(self.capacity, -(-self.tail // STEP) * STEP))

    def _hold(self, capacity: int) -> None:
        self.pool.used_bytes += (capacity - self.capacity) * BYTES_PER_TOKEN
        self.capacity = capacity


def projected_bytes(view: View | None, length: int) -> int:
    """What a session still has to take to hold so many tokens, at the most."""
    capacity = (-(-length // STEP) + 1) * STEP
    held = view.capacity + sum(seen for _, seen in view.runs) if view is not None else 0
    return max(capacity - held, 0) * BYTES_PER_TOKEN
