"""The layout against a model that spells out every column."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateroom.caches.layout import CAPACITY_STEP, Layout, capacity_for

FREE = None


@dataclass
class Columns:
    """Each row a list of columns: `FREE`, or the number of the token that lies there."""

    rows: list[list[int | None]]

    @classmethod
    def of(cls, layout: Layout) -> Columns:
        pairs = zip(layout.left_pad, layout.offset, strict=True)
        return cls([[FREE] * pad + list(range(held)) for pad, held in pairs])

    def layout(self) -> Layout:
        held = [[c for c in row if c is not FREE] for row in self.rows]
        assert all(tokens == list(range(len(tokens))) for tokens in held), "tokens in order, none lost"
        pads = [len(row) - len(tokens) for row, tokens in zip(self.rows, held, strict=True)]
        return Layout(tuple(pads), tuple(map(len, held)))


def layouts(least_rows: int = 0) -> st.SearchStrategy[Layout]:
    pair = st.tuples(st.integers(0, 7), st.integers(0, 11))
    rows = st.lists(pair, min_size=least_rows, max_size=5)
    return rows.map(lambda pairs: Layout(tuple(p for p, _ in pairs), tuple(o for _, o in pairs)))


@given(layouts())
def test_ends_and_width_count_columns(layout: Layout) -> None:
    columns = Columns.of(layout)
    assert layout.ends == tuple(map(len, columns.rows))
    assert layout.width == max((len(row) for row in columns.rows), default=0)
    assert layout.ends_agree == (len({len(row) for row in columns.rows}) <= 1)
    padded = any(row[:1] == [FREE] for row in columns.rows)
    assert layout.level == (not padded and layout.ends_agree)


@given(layouts(), st.integers(0, 600))
def test_append(layout: Layout, n: int) -> None:
    columns = Columns.of(layout)
    for row in columns.rows:
        held = sum(c is not FREE for c in row)
        row.extend(range(held, held + n))
    assert layout.append(n) == columns.layout()


@given(layouts(1), st.data())
def test_trim(layout: Layout, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, layout.rows - 1))
    n = data.draw(st.integers(0, layout.offset[row]))
    columns = Columns.of(layout)
    columns.rows[row] = columns.rows[row][: len(columns.rows[row]) - n]
    assert layout.trim(row, n) == columns.layout()


@given(layouts(1), st.data())
def test_trim_refuses_what_a_row_does_not_hold(layout: Layout, data: st.DataObject) -> None:
    """X3: mlx-lm takes 5 from a row of 3 and leaves it at -2."""
    row = data.draw(st.integers(0, layout.rows - 1))
    n = data.draw(st.sampled_from([-1, -3, layout.offset[row] + 1, layout.offset[row] + 5]))
    with pytest.raises(ValueError, match=f"holds {layout.offset[row]}"):
        layout.trim(row, n)


@given(layouts(), st.data())
def test_filter(layout: Layout, data: st.DataObject) -> None:
    keep = data.draw(
        st.lists(st.sampled_from(range(layout.rows)), unique=True) if layout.rows else st.just([])
    )
    rows = [Columns.of(layout).rows[i] for i in keep]
    cut = 0
    while rows and all(row[:1] == [FREE] for row in rows):
        rows = [row[1:] for row in rows]
        cut += 1
    assert layout.filter(keep) == (Columns(rows).layout(), cut)


@pytest.mark.parametrize("keep", [[0, 0], [0, 2, 0]])
def test_filter_refuses_a_row_twice(keep: list[int]) -> None:
    with pytest.raises(ValueError, match="once"):
        Layout.empty(3).filter(keep)


@pytest.mark.parametrize("row", [-1, 3])
def test_rows_are_never_counted_from_the_end(row: int) -> None:
    with pytest.raises(IndexError):
        Layout.empty(3).filter([row])
    with pytest.raises(IndexError):
        Layout.empty(3).trim(row, 0)


@given(st.lists(layouts(), max_size=4))
def test_merge(layouts: list[Layout]) -> None:
    width = max((layout.width for layout in layouts), default=0)
    rows = []
    for layout in layouts:
        rows += [[FREE] * (width - layout.width) + row for row in Columns.of(layout).rows]
    merged, shifts = Layout.merge(layouts)
    assert merged == Columns(rows).layout()
    assert shifts == tuple(width - layout.width for layout in layouts)


@given(st.integers(0, 10_000))
def test_capacity_is_the_next_step(columns: int) -> None:
    capacity = capacity_for(columns)
    assert capacity % CAPACITY_STEP == 0
    assert columns <= capacity < columns + CAPACITY_STEP


@pytest.mark.parametrize(("pads", "offsets"), [((0,), ()), ((-1,), (0,)), ((0,), (-1,))])
def test_impossible_layouts_are_refused(pads: tuple[int, ...], offsets: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"pads|negative"):
        Layout(pads, offsets)


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        capacity_for(-1)
    with pytest.raises(ValueError, match="-2"):
        Layout.empty(1).append(-2)
