"""Which rows are stored together: never at more waste than the bound, never for less than it costs."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from stateroom.daemon.scheduler.packing import WASTE_MAX, Costs, Part, Row, Tally, by_kind, partition

TOKEN = 1_000  # bytes
FASTER = Costs(
    part_ms=2.0, column_ms=0.007, beside_ms=0.004, byte_ms=1e-6
)  # together: a GPU, or like lengths
SLOWER = Costs(part_ms=-0.5, column_ms=0.007, beside_ms=0.004, byte_ms=1e-6)


def row(
    columns: int, *, trunk: str = "", kind: str | None = "dense", steps: int = 500, view: int = 2048
) -> Row:
    trunks = ((trunk, view),) if trunk else ()
    return Row(columns, columns * TOKEN, trunks, kind, steps)


def apart(rows: list[Row]) -> list[Part]:
    return [(i,) for i in range(len(rows))]


rows_of = st.lists(
    st.builds(
        row,
        st.integers(0, 3_000),
        trunk=st.sampled_from(["", "", "a", "b"]),
        kind=st.sampled_from(["dense", "affine8", None]),
        steps=st.integers(1, 2_000),
        view=st.sampled_from([64, 500, 2_048]),
    ),
    min_size=1,
    max_size=12,
)
costs_of = st.builds(
    Costs,
    part_ms=st.floats(-1.0, 5.0),
    column_ms=st.floats(0.0, 0.1),
    beside_ms=st.floats(0.0, 0.1),
    byte_ms=st.floats(0.0, 1e-3),
)


@st.composite
def placed(draw: st.DrawFn) -> tuple[list[Row], list[Part]]:
    """Rows in any parts, of one kind each, however wasteful."""
    rows = draw(rows_of)
    named = [draw(st.integers(0, 4)) for _ in rows]
    parts: dict[object, list[int]] = {}
    for i, each in enumerate(rows):
        parts.setdefault((named[i], each.kind), []).append(i)
    return rows, [tuple(part) for part in parts.values()]


@given(placed(), costs_of)
@settings(deadline=None)
def test_what_always_holds(given_: tuple[list[Row], list[Part]], costs: Costs) -> None:
    rows, present = given_
    wanted = partition(rows, present, costs)
    assert Counter(i for part in wanted for i in part) == Counter(range(len(rows))), "each row once"
    for part in wanted:
        some = [rows[i] for i in part]
        assert Tally.of(some).waste <= WASTE_MAX
        assert len({each.kind for each in some}) == 1
        assert len(part) == 1 or some[0].kind is not None, "rows that are due to be quantised stand alone"
    assert partition(rows, wanted, costs) == wanted, "nothing moves when nothing has changed"


@given(placed(), costs_of)
@settings(deadline=None)
def test_what_is_brought_together_pays(given_: tuple[list[Row], list[Part]], costs: Costs) -> None:
    """A step never gets slower, and what was moved is made up for before the last but one of them ends."""
    rows, _ = given_
    for part in partition(rows, apart(rows), costs):
        some = [rows[i] for i in part]
        if len(some) > 1:
            saved = sum(Tally.of([each]).step_ms(costs) for each in some) - Tally.of(some).step_ms(costs)
            moved = sum(each.nbytes for each in some) * (len(some) + 1) / 2 * costs.byte_ms  # in, and out
            assert saved * max(each.steps for each in some) >= moved - 1e-6


def test_a_lone_row_stays_alone() -> None:
    for each in (row(0), row(1_000, trunk="a")):
        assert partition([each], [(0,)], FASTER) == [(0,)]


def test_rows_over_one_trunk_come_together() -> None:
    rows = [row(3, trunk="a"), row(900), row(40, trunk="a"), row(1, trunk="b"), row(10, trunk="a")]
    for costs in (FASTER, SLOWER):
        assert partition(rows, apart(rows), costs) == [(0, 2, 4), (1,), (3,)]


def test_not_over_a_trunk_that_is_shorter_than_what_they_pad_each_other() -> None:
    rows = [row(800, trunk="a", view=64), row(3, trunk="a", view=64)]
    assert partition(rows, apart(rows), FASTER) == apart(rows)


def test_rows_of_like_length_come_together_where_that_is_faster() -> None:
    rows = [row(1_000), row(300), row(990), row(310), row(960, kind="affine8")]
    assert partition(rows, apart(rows), FASTER) == [(0, 2), (1, 3), (4,)]
    assert partition(rows, apart(rows), SLOWER) == apart(rows)


def test_nobody_moves_for_the_last_few_steps() -> None:
    rows = [row(1_000, steps=1), row(1_000)]
    dear = Costs(part_ms=2.0, column_ms=0.007, byte_ms=1e-5)
    assert partition(rows, apart(rows), dear) == apart(rows)
    rows = [row(1_000), row(1_000)]
    assert partition(rows, apart(rows), dear) == [(0, 1)]


def test_one_more_joins_a_part_only_when_moving_all_of_it_pays() -> None:
    rows = [row(1_000, steps=5_000), row(1_000, steps=5_000), row(1_000, steps=10)]
    dear = Costs(part_ms=2.0, column_ms=0.007, byte_ms=1e-5)
    assert partition(rows, [(0, 1), (2,)], dear) == [(0, 1), (2,)]


def test_what_wastes_too_much_is_parted_by_length() -> None:
    rows = [row(1_000), row(10), row(950), row(12)]
    assert partition(rows, [(0, 1, 2, 3)], SLOWER) == [(0, 2), (1, 3)]


def test_the_fewest_parts() -> None:
    rows = [row(5), row(900, kind=None), row(1_000), row(3, kind=None), row(7, kind="affine8")]
    assert by_kind(rows) == [(0, 2), (1,), (3,), (4,)]
