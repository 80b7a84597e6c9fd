"""What a query may see and what a row still holds, token by token: the rule for layouts and masks."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from stateroom.caches.layout import Layout
from stateroom.caches.reach import FULL, Chunk, Full, Reach, Window

FREE = None


def visible(reach: Reach, position: int) -> set[int]:
    """The tokens of its row that the query at `position` sees, its own among them."""
    tokens = set(range(position + 1))
    if isinstance(reach, Full):
        return tokens
    if isinstance(reach, Chunk):
        return {t for t in tokens if t // reach.size == position // reach.size}
    near = reach.size - reach.pinned
    return {t for t in tokens if t < reach.pinned or position - t < near}


def held(reach: Reach, offset: int, forgotten: int) -> list[int]:
    """The tokens of a row that have a column, in the order of columns."""
    pinned = min(reach.pinned, offset)
    return [*range(pinned), *range(pinned + forgotten, offset)]


@dataclass
class Row:
    """A row's columns, each `FREE` or the number of the token that lies there; and how many tokens it had."""

    columns: list[int | None]
    offset: int

    @property
    def tokens(self) -> list[int]:
        return [token for token in self.columns if token is not FREE]

    @property
    def pad(self) -> int:
        return len(self.columns) - len(self.tokens)


@dataclass
class Columns:
    """A layout, spelled out."""

    rows: list[Row]
    reach: Reach = FULL

    @classmethod
    def of(cls, layout: Layout, reach: Reach = FULL) -> Columns:
        rows = zip(layout.left_pad, layout.offset, layout.forgotten, strict=True)
        return cls(
            [Row([FREE] * pad + held(reach, offset, gone), offset) for pad, offset, gone in rows], reach
        )

    def layout(self) -> Layout:
        """Fails where tokens lie out of order, or others are missing than those behind the pinned ones."""
        forgotten = []
        for row in self.rows:
            gone = row.offset - len(row.tokens)
            assert row.columns == [FREE] * row.pad + held(self.reach, row.offset, gone)
            forgotten.append(gone)
        return Layout(
            tuple(row.pad for row in self.rows), tuple(row.offset for row in self.rows), tuple(forgotten)
        )

    def without_front(self, cut: int) -> Columns:
        """The first `cut` columns are gone: of each row its padding, then tokens behind its pinned ones."""
        rows = []
        for row in self.rows:
            kept = row.columns[min(cut, row.pad) :]
            more = max(cut - row.pad, 0)
            pinned = self.reach.pinned if more else 0
            rows.append(Row([*kept[:pinned], *kept[pinned + more :]], row.offset))
        return Columns(rows, self.reach)


def reaches(chunks: bool = True) -> st.SearchStrategy[Reach]:
    windows = st.integers(1, 9).flatmap(
        lambda size: st.integers(0, size - 1).map(lambda pinned: Window(size, pinned))
    )
    kinds: list[st.SearchStrategy[Reach]] = [st.just(FULL), windows]
    return st.one_of(*kinds, *([st.integers(1, 7).map(Chunk)] if chunks else []))


@st.composite
def layouts(draw: st.DrawFn, reach: Reach = FULL, least_rows: int = 0, most_rows: int = 5) -> Layout:
    """Rows that have forgotten no token that their next query sees."""
    rows = []
    for _ in range(draw(st.integers(least_rows, most_rows))):
        offset = draw(st.integers(0, 24))
        seen = [token for token in visible(reach, offset) if token >= reach.pinned]
        most = max(min(seen, default=offset) - reach.pinned, 0) if offset > reach.pinned else 0
        rows.append((draw(st.integers(0, 7)), offset, draw(st.integers(0, most))))
    return Layout(*(tuple(row[i] for row in rows) for i in range(3)))
