"""Which columns of packed rows hold tokens: of row i those of [starts[i], ends[i])."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx

from stateroom.kernels.source import small_input


@dataclass(frozen=True)
class Spans:
    """Made once a forward and shared by its layers, and so are its masks. An empty span is legal."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    _masks: dict[tuple[int, ...], mx.array] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, starts: Sequence[int], ends: Sequence[int]) -> Spans:
        return cls(tuple(starts), tuple(ends))

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.ends) or not self.starts:
            raise ValueError(f"{len(self.starts)} starts and {len(self.ends)} ends")
        if any(not 0 <= start <= end for start, end in zip(self.starts, self.ends, strict=True)):
            raise ValueError(f"no spans: {self.starts} to {self.ends}")

    def length_max(self, count: int, window: int | None) -> int:
        """The most columns that the last `count` tokens of any row may see together."""
        longest = max(end - start for start, end in zip(self.starts, self.ends, strict=True))
        return longest if window is None else min(longest, window + count - 1)

    @cached_property
    def table(self) -> mx.array:
        """int32 [2 B and padding]: start and end of each row in turn."""
        return small_input([at for span in zip(self.starts, self.ends, strict=True) for at in span])

    def live(self, stored: int) -> mx.array:
        """bool [B, S]: the columns that hold tokens."""
        if (stored,) not in self._masks:
            starts, ends = mx.array(self.starts)[:, None], mx.array(self.ends)[:, None]
            column = mx.arange(stored)[None]
            self._masks[(stored,)] = (starts <= column) & (column < ends)
        return self._masks[(stored,)]

    def seen(self, count: int, stored: int, window: int | None) -> mx.array:
        """bool [B, N, S]: what each of the last N tokens of a row sees, itself included."""
        key = (count, stored, -1 if window is None else window)
        if key not in self._masks:
            # One past the last column that a query sees: [B, N, 1].
            ends = mx.array(self.ends)[:, None, None] - count + 1 + mx.arange(count)[None, :, None]
            column = mx.arange(stored)[None, None]
            seen = (mx.array(self.starts)[:, None, None] <= column) & (column < ends)
            self._masks[key] = seen if window is None else seen & (column >= ends - window)
        return self._masks[key]
