"""The layout against a model that spells out every column."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.caches.tokens import FREE, Columns, Row, held, layouts, reaches, visible

from stateroom.caches.layout import CAPACITY_STEP, Layout, capacity_for
from stateroom.caches.reach import FULL, Chunk, Reach, Window

REACHED = reaches().flatmap(lambda reach: st.tuples(st.just(reach), layouts(reach)))
REACHED_ROW = reaches().flatmap(lambda reach: st.tuples(st.just(reach), layouts(reach, least_rows=1)))


@given(REACHED)
def test_ends_and_width_count_columns(reached: tuple[Reach, Layout]) -> None:
    reach, layout = reached
    rows = Columns.of(layout, reach).rows
    assert layout.ends == tuple(len(row.columns) for row in rows)
    assert layout.held == tuple(len(row.tokens) for row in rows)
    assert layout.width == max((len(row.columns) for row in rows), default=0)
    assert layout.ends_agree == (len({len(row.columns) for row in rows}) <= 1)
    assert layout.level == (not any(row.pad for row in rows) and len({str(row) for row in rows}) <= 1)


@given(REACHED, st.integers(0, 600))
def test_append(reached: tuple[Reach, Layout], n: int) -> None:
    reach, layout = reached
    columns = Columns.of(layout, reach)
    longer = [Row([*row.columns, *range(row.offset, row.offset + n)], row.offset + n) for row in columns.rows]
    assert layout.append(n) == Columns(longer, reach).layout()


@given(REACHED_ROW, st.data())
def test_a_row_is_trimmed_where_its_next_query_misses_nothing(
    reached: tuple[Reach, Layout], data: st.DataObject
) -> None:
    """B32, B34: within the pinned tokens too, as long as everything that is seen then is there."""
    reach, layout = reached
    row = data.draw(st.integers(0, layout.rows - 1), "row")
    n = data.draw(st.integers(0, layout.offset[row]), "n")
    length = layout.offset[row] - n
    there = held(reach, layout.offset[row], layout.forgotten[row])
    sees = {token for token in visible(reach, length) if token < length}
    exact = sees <= set(there)
    if reach.pinned < length < reach.pinned + layout.forgotten[row]:
        exact = False  # it could be, where a query begins anew; but the row would hold less than no tokens
    assert layout.can_trim(row, n, reach) == exact
    if not exact:
        with pytest.raises(ValueError, match="forgotten"):
            layout.trim(row, n, reach)
        return
    columns = Columns.of(layout, reach)
    left = [token for token in there if token < length]
    columns.rows[row] = Row([FREE] * columns.rows[row].pad + left, length)
    assert layout.trim(row, n, reach) == columns.layout()


@given(REACHED_ROW, st.data())
def test_the_floor_is_the_shortest_length_behind_the_pinned_tokens(
    reached: tuple[Reach, Layout], data: st.DataObject
) -> None:
    reach, layout = reached
    row = data.draw(st.integers(0, layout.rows - 1), "row")
    offset, floor = layout.offset[row], layout.trim_floor(row, reach)
    can = [layout.can_trim(row, offset - length, reach) for length in range(offset + 1)]
    assert all(can[floor:])
    assert can[: floor + 1] == [length <= reach.pinned or length == floor for length in range(floor + 1)]


@given(REACHED_ROW, st.data())
def test_trim_refuses_what_a_row_does_not_hold(reached: tuple[Reach, Layout], data: st.DataObject) -> None:
    """X3: mlx-lm takes 5 from a row of 3 and leaves it at -2."""
    reach, layout = reached
    row = data.draw(st.integers(0, layout.rows - 1))
    n = data.draw(st.sampled_from([-1, -3, layout.offset[row] + 1, layout.offset[row] + 5]))
    assert not layout.can_trim(row, n, reach)
    with pytest.raises(ValueError, match=f"holds {layout.offset[row]}"):
        layout.trim(row, n, reach)


@given(REACHED, st.data())
def test_what_no_query_will_see_can_be_cut_off(reached: tuple[Reach, Layout], data: st.DataObject) -> None:
    """`unseen` is a cut that takes nothing from any query at or behind the given lengths, and the largest."""
    reach, layout = reached
    lengths = [data.draw(st.integers(max(offset - 9, 0), offset)) for offset in layout.offset]
    columns = Columns.of(layout, reach)

    def exact(cut: int) -> bool:
        for old, new, length in zip(columns.rows, columns.without_front(cut).rows, lengths, strict=True):
            gone = set(old.tokens) - set(new.tokens)
            # What later queries see of what is there now, the one at `length` sees as well.
            if cut - old.pad > max(len(old.tokens) - reach.pinned, 0) or gone & visible(reach, length):
                return False
        return True

    unseen = layout.unseen(reach, lengths)
    assert not layout.rows or exact(unseen)
    floors = [max(layout.trim_floor(row, reach), reach.pinned + 1) for row in range(layout.rows)]
    if floors and all(length >= floor for length, floor in zip(lengths, floors, strict=True)):
        assert not exact(unseen + 1)


@given(REACHED, st.data())
def test_forget(reached: tuple[Reach, Layout], data: st.DataObject) -> None:
    reach, layout = reached
    cut = data.draw(st.integers(0, layout.unseen(reach, layout.offset)))
    assert layout.forget(cut) == Columns.of(layout, reach).without_front(cut).layout()


@given(REACHED_ROW, st.data())
def test_the_first_column_seen(reached: tuple[Reach, Layout], data: st.DataObject) -> None:
    reach, layout = reached
    row = data.draw(st.integers(0, layout.rows - 1))
    position = data.draw(st.integers(layout.offset[row], layout.offset[row] + 9))
    sees = visible(reach, position)
    behind = [t for t in sees if t >= reach.pinned or isinstance(reach, Chunk)]
    columns = Columns.of(layout, reach).rows[row].columns
    there = [c for c, token in enumerate(columns) if token is not FREE and token in behind]
    first = layout.first_seen(reach, position, row)
    # With nothing hidden the pinned tokens are seen like all others, from the row's first column on.
    if min(behind, default=0) <= reach.pinned and not layout.forgotten[row]:
        assert first <= min(there, default=len(columns))
        assert all(token is FREE or token in sees for token in columns[first:])
    else:
        assert first == min(there, default=len(columns))


@given(REACHED, st.data())
def test_filter(reached: tuple[Reach, Layout], data: st.DataObject) -> None:
    reach, layout = reached
    keep = data.draw(
        st.lists(st.sampled_from(range(layout.rows)), unique=True) if layout.rows else st.just([])
    )
    rows = [Columns.of(layout, reach).rows[i] for i in keep]
    cut = min((row.pad for row in rows), default=0)
    kept = [Row(row.columns[cut:], row.offset) for row in rows]
    assert layout.filter(keep) == (Columns(kept, reach).layout(), cut)


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


@given(reaches().flatmap(lambda reach: st.tuples(st.just(reach), st.lists(layouts(reach), max_size=4))))
def test_merge(reached: tuple[Reach, list[Layout]]) -> None:
    reach, layouts = reached
    width = max((layout.width for layout in layouts), default=0)
    rows = []
    for layout in layouts:
        for row in Columns.of(layout, reach).rows:
            rows.append(Row([*[FREE] * (width - layout.width), *row.columns], row.offset))
    merged, shifts = Layout.merge(layouts)
    assert merged == Columns(rows, reach).layout()
    assert shifts == tuple(width - layout.width for layout in layouts)


@given(st.integers(0, 10_000))
def test_capacity_is_the_next_step(columns: int) -> None:
    capacity = capacity_for(columns)
    assert capacity % CAPACITY_STEP == 0
    assert columns <= capacity < columns + CAPACITY_STEP


@pytest.mark.parametrize(
    ("pads", "offsets", "forgotten"),
    [
        ((0,), (), ()),
        ((-1,), (0,), ()),
        ((0,), (-1,), ()),
        ((0,), (4,), (5,)),
        ((0,), (4,), (-1,)),
        ((0,), (4,), (0, 0)),
    ],
)
def test_impossible_layouts_are_refused(
    pads: tuple[int, ...], offsets: tuple[int, ...], forgotten: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"pads|negative|forgotten"):
        Layout(pads, offsets, forgotten)


@pytest.mark.parametrize(("size", "pinned"), [(0, 0), (8, 8), (8, 9), (4, -1)])
def test_impossible_windows_are_refused(size: int, pinned: int) -> None:
    """B34: with keep >= window nothing could ever be discarded."""
    with pytest.raises(ValueError, match=f"window of {size}"):
        Window(size, pinned)


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        capacity_for(-1)
    with pytest.raises(ValueError, match="-2"):
        Layout.empty(1).append(-2)
    with pytest.raises(ValueError, match="chunks of 0"):
        Chunk(0)
    assert FULL.floor(0) == 0
