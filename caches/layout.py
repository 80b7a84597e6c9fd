"""Where the tokens of packed rows lie, as integers. Pure: no mlx.

A row's live tokens are the half-open columns `[left_pad, left_pad + offset)`. Positions are Python
integers on purpose: bookkeeping arrays that nobody evaluates grow the graph of a long decode without end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CAPACITY_STEP = 256  # columns; growing by less would copy the rows more often, by more would waste memory


def capacity_for(columns: int) -> int:
    """The smallest multiple of `CAPACITY_STEP` that holds `columns`."""
    if columns < 0:
        raise ValueError(f"columns must not be negative, got {columns}")
    return -(-columns // CAPACITY_STEP) * CAPACITY_STEP


@dataclass(frozen=True, slots=True)
class Layout:
    """Left padding and token count of each row. `offset[i]` is also the position of row i's next token."""

    left_pad: tuple[int, ...]
    offset: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.left_pad) != len(self.offset):
            raise ValueError(f"{len(self.left_pad)} left pads for {len(self.offset)} offsets")
        for name, values in (("left_pad", self.left_pad), ("offset", self.offset)):
            if values and min(values) < 0:
                raise ValueError(f"{name} must not be negative, got {values}")

    @classmethod
    def empty(cls, rows: int) -> Layout:
        """Rows that hold nothing."""
        return cls((0,) * rows, (0,) * rows)

    @property
    def rows(self) -> int:
        return len(self.offset)

    @property
    def ends(self) -> tuple[int, ...]:
        """The column after each row's last token."""
        return tuple(p + o for p, o in zip(self.left_pad, self.offset, strict=True))

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
        return not any(self.left_pad) and len(set(self.offset)) <= 1

    def append(self, n: int) -> Layout:
        """Every row holds `n` more tokens."""
        if n < 0:
            raise ValueError(f"can't append {n} tokens")
        return Layout(self.left_pad, tuple(o + n for o in self.offset))

    def trim(self, row: int, n: int) -> Layout:
        """`row` forgets its last `n` tokens."""
        self._check_row(row)
        held = self.offset[row]
        if not 0 <= n <= held:
            raise ValueError(f"can't trim {n} tokens from row {row}, which holds {held}")
        return Layout(self.left_pad, (*self.offset[:row], held - n, *self.offset[row + 1 :]))

    def filter(self, keep: Sequence[int]) -> tuple[Layout, int]:
        """The rows of `keep`, in its order, and the columns of padding cut off the front of all of them."""
        for row in keep:
            self._check_row(row)
        if len(set(keep)) != len(keep):
            raise ValueError(f"a row can be kept once, got {list(keep)}")
        kept = [(self.left_pad[i], self.offset[i]) for i in keep]
        cut = min((pad for pad, _ in kept), default=0)
        return Layout(tuple(pad - cut for pad, _ in kept), tuple(held for _, held in kept)), cut

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
        return cls(pads, tuple(o for layout in layouts for o in layout.offset)), shifts

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
