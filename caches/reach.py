"""What a query may see of its own row, and therefore what a row may forget. Pure: no mlx.

Tokens are counted from a row's first; a row holds its `pinned` first tokens and, behind them, the tokens
from some point on. Kinds of attention layers differ in nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Full:
    """Every earlier token."""

    kind = "full"
    pinned = 0

    def first_seen(self, position: int) -> int:
        """The first token, of those behind the pinned ones, that the query at `position` sees."""
        return 0

    def floor(self, forgotten: int) -> int:
        """The shortest length whose next query sees nothing of the `forgotten` tokens."""
        return forgotten  # nothing is ever forgotten


@dataclass(frozen=True, slots=True)
class Window:
    """The last `size` tokens, the query's own among them; the first `pinned` of a row stay in sight."""

    size: int
    pinned: int = 0

    kind = "window"

    def __post_init__(self) -> None:
        if not 0 <= self.pinned < self.size:
            raise ValueError(f"a window of {self.size} can't pin its first {self.pinned} tokens")

    def first_seen(self, position: int) -> int:
        return max(position + 1 - (self.size - self.pinned), 0)

    def floor(self, forgotten: int) -> int:
        return forgotten + self.size - 1 if forgotten else 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of the query's own chunk; chunks of `size` follow each other from the row's first token."""

    size: int

    kind = "chunked"
    pinned = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"chunks of {self.size} tokens")

    def first_seen(self, position: int) -> int:
        return position // self.size * self.size

    def floor(self, forgotten: int) -> int:
        return -(-forgotten // self.size) * self.size


Reach = Full | Window | Chunk
FULL = Full()
