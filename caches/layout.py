"""Where the tokens of packed rows lie, as integers. Pure: no mlx.

A row's live tokens are the half-open columns `[left_pad, end)`. A row that sees a window only may have
forgotten tokens: it holds its pinned first ones, which the window's `Reach` counts, and then those from some
later point on, without a gap between their columns. Positions are Python integers on purpose: bookkeeping
arrays that nobody evaluates grow the graph of a long decode without end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stateroom.caches.reach import FULL, Reach

CAPACITY_STEP = 256  # columns; growing by less would copy the rows more often, by more would waste memory


def capacity_for(columns: int) -> int:
    """The smallest multiple of `CAPACITY_STEP` that holds `columns`."""
    if columns < 0:
        raise ValueError(f"columns must not be negative, got {columns}")
    return -(-columns // CAPACITY_STEP) * CAPACITY_STEP


@dataclass(frozen=True, slots=True)
class Layout:
    """Left padding, token count and forgotten tokens of each row; `offset[i]` is row i's next position."""

    left_pad: tuple[int, ...]
    offset: tuple[int, ...]
    forgotten: tuple[int, ...] = ()  # none, when not given

    def __post_init__(self) -> None:
        if not self.forgotten:
            object.__setattr__(self, "forgotten", (0,) * len(self.offset))
        if not len(self.left_pad) == len(self.offset) == len(self.forgotten):
            raise ValueError(f"{self} has not as many pads as offsets")
        for name in ("left_pad", "offset", "forgotten"):
            values = getattr(self, name)
            if values and min(values) < 0:
                raise ValueError(f"{name} must not be negative, got {values}")
        if any(held < 0 for held in self.held):
            raise ValueError(f"{self.forgotten} tokens forgotten of {self.offset}")

    @classmethod
    def empty(cls, rows: int) -> Layout:
        """Rows that hold nothing."""
        return cls((0,) * rows, (0,) * rows)

    @property
    def rows(self) -> int:
        return len(self.offset)

    @property
    def held(self) -> tuple[int, ...]:
        """Tokens of each row that have a column."""
        return tuple(o - f for o, f in zip(self.offset, self.forgotten, strict=True))

    @property
    def ends(self) -> tuple[int, ...]:
        """The column after each row's last token."""
        return tuple(p + held for p, held in zip(self.left_pad, self.held, strict=True))

    @property
    def width(self) -> int:
        """The columns in use: the largest end; 0 without rows."""
        return max(self.ends, default=0)

    @property
    def ends_agree(self) -> bool:
        """Every row's next token goes to the same column."""
        return len(set(self.ends)) <= 1

    @property
    def level(self) -> bool:
        """No padding and equal lengths: rows look like one row to masks and positions."""
        equal = len(set(self.offset)) <= 1 and len(set(self.forgotten)) <= 1
        return equal and not any(self.left_pad)

    def first_seen(self, reach: Reach, position: int, row: int) -> int:
        """The first column, behind the pinned ones, that a query of `row` at `position` sees."""
        token = max(reach.first_seen(position) - self.forgotten[row], 0)
        return self.left_pad[row] + min(token, self.held[row])

    def append(self, n: int) -> Layout:
        """Every row holds `n` more tokens."""
        if n < 0:
            raise ValueError(f"can't append {n} tokens")
        return Layout(self.left_pad, tuple(o + n for o in self.offset), self.forgotten)

    def trim_floor(self, row: int, reach: Reach) -> int:
        """The shortest length that `row` can be trimmed to; so can it to what is within its pinned tokens."""
        self._check_row(row)
        return min(reach.floor(self.forgotten[row]), self.offset[row])

    def can_trim(self, row: int, n: int, reach: Reach = FULL) -> bool:
        """`trim` of that much would leave everything that the row's next query sees."""
        length = self.offset[row] - n
        within_pinned = 0 <= length <= reach.pinned and n >= 0
        return within_pinned or self.trim_floor(row, reach) <= length <= self.offset[row]

    def trim(self, row: int, n: int, reach: Reach = FULL) -> Layout:
        """`row` forgets its last `n` tokens; ValueError when its next query would miss some."""
        self._check_row(row)
        offset, forgotten = self.offset[row], self.forgotten[row]
        if not self.can_trim(row, n, reach):
            raise ValueError(
                f"can't trim {n} tokens from row {row}, which holds {offset}"
                + (f" and has forgotten {forgotten} of them" if forgotten else "")
            )
        if offset - n <= reach.pinned:
            forgotten = 0
        return self._with(row, offset - n, forgotten)

    def narrow(self, row: int, length: int) -> Layout:
        """`row` goes back to `length` tokens, all of which lie before its columns."""
        self._check_row(row)
        first = self.forgotten[row]
        if not 0 <= length <= first:
            raise ValueError(f"{length} tokens aren't all before the columns of a row that begin at {first}")
        return self._with(row, length, length)

    def with_offsets(self, offset: Sequence[int]) -> Layout:
        """Each row at another length, within what it holds."""
        return Layout(self.left_pad, tuple(offset), self.forgotten)

    def _with(self, row: int, offset: int, forgotten: int) -> Layout:
        return Layout(
            self.left_pad,
            (*self.offset[:row], offset, *self.offset[row + 1 :]),
            (*self.forgotten[:row], forgotten, *self.forgotten[row + 1 :]),
        )

    def unseen(self, reach: Reach, lengths: Sequence[int]) -> int:
        """Columns that can be cut off the front: no query at or behind `lengths` sees them."""
        cuts = []
        for row, length in enumerate(lengths):
            first = self.first_seen(reach, length, row)
            pinned = min(reach.pinned, self.held[row])
            cuts.append(max(first - pinned, self.left_pad[row]))
        return min(cuts, default=0)

    def forget(self, cut: int) -> Layout:
        """The layout without its first `cut` columns: padding first, then tokens behind the pinned ones."""
        forgotten = tuple(f + max(cut - pad, 0) for f, pad in zip(self.forgotten, self.left_pad, strict=True))
        return Layout(tuple(max(pad - cut, 0) for pad in self.left_pad), self.offset, forgotten)

    def align(self, left_pad: Sequence[int]) -> Layout:
        """The same rows at other columns."""
        return Layout(tuple(left_pad), self.offset, self.forgotten)

    def filter(self, keep: Sequence[int]) -> tuple[Layout, int]:
        """The rows of `keep`, in its order, and the columns of padding cut off the front of all of them."""
        for row in keep:
            self._check_row(row)
        if len(set(keep)) != len(keep):
            raise ValueError(f"a row can be kept once, got {list(keep)}")
        kept = Layout(*(tuple(of[i] for i in keep) for of in (self.left_pad, self.offset, self.forgotten)))
        cut = min(kept.left_pad, default=0)
        return kept.align([pad - cut for pad in kept.left_pad]), cut

    @classmethod
    def merge(cls, layouts: Sequence[Layout]) -> tuple[Layout, tuple[int, ...]]:
        """All rows side by side, each layout shifted right so that its width meets the widest.

        Returns the layout and the columns each input moves by.
        """
        width = max((layout.width for layout in layouts), default=0)
        shifts = tuple(width - layout.width for layout in layouts)
        pads = tuple(
            p + shift for layout, shift in zip(layouts, shifts, strict=True) for p in layout.left_pad
        )
        offset = tuple(o for layout in layouts for o in layout.offset)
        return cls(pads, offset, tuple(f for layout in layouts for f in layout.forgotten)), shifts

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
