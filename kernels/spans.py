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

    def reach(self, count: int, window: int | None) -> tuple[int, int]:
        """[first, stop): the columns between which the last `count` tokens of all rows see anything."""
        seen = [
            (start if window is None else max(start, end - count + 1 - window), end)
            for start, end in zip(self.starts, self.ends, strict=True)
            if start < end
        ]
        return (min(first for first, _ in seen), max(end for _, end in seen)) if seen else (0, 0)

    def level(self, count: int, window: int | None) -> bool:
        """Whether every row sees all of `reach`, but for the causal order of its last `count` tokens."""
        start, end = self.starts[0], self.ends[0]
        same = set(self.starts) == {start} and set(self.ends) == {end}
        return same and start < end and (count == 1 or window is None or end - start <= window)

    def live(self, stop: int, first: int = 0) -> mx.array:
        """bool [B, stop - first]: the columns from `first` on that hold tokens."""
        if (first, stop) not in self._masks:
            starts, ends = mx.array(self.starts)[:, None], mx.array(self.ends)[:, None]
            column = mx.arange(first, stop)[None]
            self._masks[(first, stop)] = (starts <= column) & (column < ends)
        return self._masks[(first, stop)]

    def seen(self, count: int, stop: int, window: int | None, first: int = 0) -> mx.array:
        """bool [B, N, stop - first]: what each of the last N tokens of a row sees, itself included."""
        key = (count, first, stop, -1 if window is None else window)
        if key not in self._masks:
            # One past the last column that a query sees: [B, N, 1].
            ends = mx.array(self.ends)[:, None, None] - count + 1 + mx.arange(count)[None, :, None]
            column = mx.arange(first, stop)[None, None]
            seen = (mx.array(self.starts)[:, None, None] <= column) & (column < ends)
            self._masks[key] = seen if window is None else seen & (column >= ends - window)
        return self._masks[key]
