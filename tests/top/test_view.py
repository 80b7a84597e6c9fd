"""Keys: what each does, and that no order of them leads anywhere wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateroom.daemon.top.board import ORDERS
from stateroom.daemon.top.view import FILTER_MAX, MOVES, Act, Mode, View, press, settled

IDS = [f"session-{number}" for number in range(30)]
PAGE = 10
LETTERS = "qskpxrS/? yn"


def typed(view: View, *keys: str, ids: list[str] = IDS) -> tuple[View, list[Act]]:
    """After these keys: a single character is itself, everything else the name of a key."""
    acts = []
    for key in keys:
        view, act = press(view, key, key if len(key) == 1 else None, ids, PAGE)
        view = settled(view, ids, PAGE, lines=30)
        acts += [act] if act is not None else []
    return view, acts


BEGIN = settled(View(), IDS, PAGE)


def test_the_cursor_moves_and_the_page_with_it() -> None:
    assert (BEGIN.selected, BEGIN.top) == (IDS[0], 0)
    for keys, cursor, top in (
        (["down"], 1, 0),
        (["up"], 0, 0),
        (["pagedown"], 10, 1),
        (["pagedown", "pagedown", "up"], 19, 11),
        (["end"], 29, 20),
        (["end", "down"], 29, 20),
        (["end", "home"], 0, 0),
    ):
        view, acts = typed(BEGIN, *keys)
        assert (view.cursor, view.top, view.selected, acts) == (cursor, top, IDS[cursor], [])


def test_the_cursor_stays_on_its_session_when_rows_move() -> None:
    view, _ = typed(BEGIN, "down", "down")
    view = settled(view, IDS[::-1], PAGE)
    assert (view.selected, view.cursor, view.top) == (IDS[2], 27, 18)


def test_a_session_that_is_gone_leaves_the_cursor_where_it_was() -> None:
    view, _ = typed(BEGIN, "end")
    view = settled(view, IDS[:-1], PAGE)
    assert (view.selected, view.cursor) == (IDS[28], 28)
    view = settled(view, [], PAGE)
    assert (view.selected, view.cursor, view.top) == (None, 0, 0)
    assert settled(view, IDS, PAGE).selected == IDS[0]


def test_orders_go_round_and_turn_round() -> None:
    view, seen = BEGIN, []
    for _ in ORDERS:
        seen.append(view.sort)
        view, _ = typed(view, "s")
    assert (tuple(seen), view.sort) == (ORDERS, ORDERS[0])
    view, _ = typed(view, "S", "r")
    assert (view.sort, view.reverse) == (ORDERS[-1], True)
    view, _ = typed(view, "s")
    assert (view.sort, view.reverse) == (ORDERS[0], False)


def test_a_filter_is_typed_kept_changed_and_dropped() -> None:
    view, acts = typed(BEGIN, "/", "q", "k", " ", "x")
    assert (view.mode, view.filter, acts) == (Mode.FILTER, "qk x", [])
    view, _ = typed(view, "backspace", "backspace", "enter")
    assert (view.mode, view.filter) == (Mode.TABLE, "qk")
    view, _ = typed(view, "/", "y")
    assert view.filter == "qky"
    view, _ = typed(view, "ctrl+u", "z", "enter", "escape")
    assert (view.mode, view.filter) == (Mode.TABLE, "")
    view, _ = typed(view, "/", *("a" * (FILTER_MAX + 5)))
    assert len(view.filter) == FILTER_MAX
    assert typed(view, "escape")[0].filter == ""


@pytest.mark.parametrize(("key", "act"), [("k", Act.CANCEL), ("x", Act.CLOSE)])
@pytest.mark.parametrize("where", [[], ["enter"]])
def test_what_cannot_be_taken_back_asks_first(key: str, act: Act, where: list[str]) -> None:
    before, _ = typed(BEGIN, *where)
    asking, acts = typed(before, key)
    assert (asking.mode, asking.asking, acts) == (Mode.ASK, act, [])
    done, acts = typed(asking, "y")
    assert (done.mode, acts) == (before.mode, [act])
    for other in ("n", "enter", "escape", "q", " "):
        left, acts = typed(asking, other)
        assert (left.mode, left.note, acts) == (before.mode, "Left as it is.", [])


def test_a_question_is_of_the_session_it_was_asked_of() -> None:
    """Also when that is gone meanwhile, and another has its place."""
    asking, _ = typed(BEGIN, "down", "k")
    asking = settled(asking, [each for each in IDS if each != IDS[1]], PAGE)
    assert asking.selected == IDS[1]


def test_parking_asks_nothing_and_nothing_is_done_to_no_session() -> None:
    assert typed(BEGIN, "p")[1] == [Act.PARK]
    for key in ("k", "x", "p", "enter"):
        view, acts = typed(settled(View(), [], PAGE), key, ids=[])
        assert (view.mode, acts) == (Mode.TABLE, [])


def test_details_and_help_are_read_and_left() -> None:
    for key, mode in (("enter", Mode.DETAILS), ("?", Mode.HELP)):
        view, _ = typed(BEGIN, key, "down", "down")
        assert (view.mode, view.scroll, view.cursor) == (mode, 2, 0)
        assert typed(view, "end")[0].scroll == 30 - PAGE - 1  # to its end, not beyond
        assert typed(view, "end", "up")[0].scroll == 30 - PAGE - 2
        for leave in ("escape", "q"):
            left, acts = typed(view, leave)
            assert (left.mode, left.scroll, acts) == (Mode.TABLE, 0, [])


def test_leaving() -> None:
    assert typed(BEGIN, "q")[1] == [Act.QUIT]
    for mode in Mode:
        assert typed(replace(BEGIN, mode=mode), "ctrl+c")[1] == [Act.INTERRUPT]


def test_a_pause_begins_and_ends() -> None:
    view, _ = typed(BEGIN, " ")
    assert view.paused
    assert not typed(view, " ")[0].paused


keys = st.one_of(
    st.sampled_from([*MOVES, "enter", "escape", "backspace", "tab", "f1"]), st.sampled_from(LETTERS)
)
lists = st.lists(st.sampled_from(IDS), unique=True, max_size=30)


@given(st.lists(st.tuples(keys, lists, st.integers(1, 40), st.integers(0, 50))))
def test_no_keys_and_no_news_lead_the_cursor_off_the_table(
    steps: list[tuple[str, list[str], int, int]],
) -> None:
    view, ids, page = View(), list[str](), 1
    for key, now, size, lines in steps:
        view, act = press(view, key, key if len(key) == 1 else None, ids, page)
        ids, page = now, size
        view = settled(view, ids, page, lines)
        assert (view.mode is Mode.ASK) == (view.asking is not None)
        assert 0 <= view.scroll <= max(lines - page - 1, 0)
        assert act is None or act in Act
        if view.mode in (Mode.DETAILS, Mode.ASK):
            assert view.selected is not None
        elif ids:
            assert ids[view.cursor] == view.selected
            assert view.top <= view.cursor < view.top + page
            assert view.top <= max(len(ids) - page, 0)
        else:
            assert view.selected is None or view.mode is not Mode.TABLE
