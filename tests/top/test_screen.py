"""The live view without a terminal: keys in, cells out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from rich.segment import Segment
from tests.top.scripted import Scripted, session, snapshot
from textual.geometry import Region
from textual.pilot import Pilot

from stateroom.client.errors import Busy, NoDaemon
from stateroom.daemon.exits import FAILED, Leave
from stateroom.daemon.top.once import once
from stateroom.daemon.top.picture import picture
from stateroom.daemon.top.screen import GAP, Canvas, Top, changes
from stateroom.daemon.top.text import HERE, PLAIN, Line
from stateroom.daemon.top.view import Act

SMALL = 80, 24
QUIET = 3_600.0  # seconds between looks of its own: a test looks when it wants to
FIRST = snapshot(session("a", length=10), session("b", owner="agents", idle_s=13.0, length=20), every_s=QUIET)

Drive = Callable[[Top, Pilot[int]], Awaitable[None]]


def drive(source: Scripted, through: Drive, owner: str | None = None) -> Top:
    async def driven() -> Top:
        app = Top(source, await source.look(), owner)
        async with app.run_test(size=SMALL) as pilot:
            await pilot.pause()
            await through(app, pilot)
        return app

    return asyncio.run(driven())


def seen(app: Top) -> list[str]:
    canvas = app.query_one(Canvas)
    return [canvas.render_line(y).text.rstrip() for y in range(canvas.size.height)]


def names(app: Top) -> list[str]:
    return [line[1:].split()[0] for line in seen(app)[7:-1] if line]


# ---------------------------------------------------------------- looks


def test_what_a_look_brings_is_shown() -> None:
    later = snapshot(session("a", length=4_321), session("c"), at_s=101.0, every_s=QUIET)

    async def through(app: Top, pilot: Pilot[int]) -> None:
        assert names(app) == ["a", "b"]
        await app.look()
        assert names(app) == ["a", "c"]
        assert "4321" in seen(app)[7]

    drive(Scripted(FIRST, later), through)


def test_a_daemon_that_goes_away_is_told_and_one_that_comes_back_is_shown() -> None:
    async def through(app: Top, pilot: Pilot[int]) -> None:
        await app.look()
        assert seen(app)[-1].startswith("No news for 0s, trying again. It is gone.")
        assert names(app) == ["a", "b"]
        await app.look()
        assert "too old" in seen(app)[-1]
        await app.look()
        assert seen(app)[-1].startswith("q quit")

    drive(Scripted(FIRST, NoDaemon("It is gone."), Leave(FAILED, "It is too old."), FIRST), through)


def test_it_looks_by_itself_as_often_as_it_was_told() -> None:
    often = snapshot(session("a"), at_s=100.0, every_s=0.01)
    later = snapshot(session("z"), at_s=101.0, every_s=QUIET)

    async def through(app: Top, pilot: Pilot[int]) -> None:
        async with asyncio.timeout(10):
            while names(app) != ["z"]:
                await pilot.pause(0.01)

    drive(Scripted(often, often, later), through)


def test_a_pause_keeps_what_is_there() -> None:
    async def through(app: Top, pilot: Pilot[int]) -> None:
        await pilot.press("space")
        await app.look()
        assert names(app) == ["a", "b"]
        assert seen(app)[5].endswith("PAUSED")

    drive(Scripted(FIRST, snapshot(at_s=101.0)), through)


def test_one_owner_alone() -> None:
    async def through(app: Top, pilot: Pilot[int]) -> None:
        assert names(app) == ["b"]

    drive(Scripted(FIRST), through, "agents")


# ---------------------------------------------------------------- keys


def test_keys_reach_the_view_whatever_textual_would_do_with_them() -> None:
    async def through(app: Top, pilot: Pilot[int]) -> None:
        await pilot.press("tab", "ctrl+p", "f1", "ctrl+q", "down")
        assert seen(app)[8].startswith(">b")
        await pilot.press("slash", "e", "d", "i", "t", "enter")
        assert names(app) == ["a"]
        await pilot.press("escape", "s", "s", "s")
        assert names(app) == ["b", "a"]
        await pilot.press("r")
        assert names(app) == ["a", "b"]
        await pilot.press("enter")
        assert seen(app)[6].startswith("a of editor")  # the filter had left it alone

    drive(Scripted(FIRST), through)


def test_acts_are_done_to_the_selected_session_and_their_outcome_is_told() -> None:
    source = Scripted(FIRST)

    async def through(app: Top, pilot: Pilot[int]) -> None:
        await pilot.press("down", "k", "n")
        assert source.acts == []
        await pilot.press("k", "y")
        await pilot.pause()
        assert source.acts == [(Act.CANCEL, "b")]
        assert seen(app)[-1] == "Done."
        source.answer = Busy("It runs.")
        await pilot.press("p")
        await pilot.pause()
        assert source.acts[1:] == [(Act.PARK, "b")]
        assert seen(app)[-1] == "b: It runs."

    drive(source, through)


def test_the_session_of_a_question_may_go_before_the_answer() -> None:
    source = Scripted(FIRST, snapshot(session("b", owner="agents", idle_s=13.0), at_s=101.0))

    async def through(app: Top, pilot: Pilot[int]) -> None:
        await pilot.press("x")
        await app.look()
        await pilot.press("y")
        assert (source.acts, seen(app)[-1]) == ([], "This session is gone.")

    drive(source, through)


def test_how_it_was_left_is_the_exit_code() -> None:
    for key, code in (("q", 0), ("ctrl+c", 130)):

        async def through(app: Top, pilot: Pilot[int], key: str = key) -> None:
            await pilot.press(key)

        assert drive(Scripted(FIRST), through).return_value == code


# ---------------------------------------------------------------- cells

styles = st.sampled_from([PLAIN, HERE])
lines = st.lists(st.tuples(st.sampled_from("ab"), styles), min_size=60, max_size=60)


def line_of(cells: list[tuple[str, object]]) -> Line:
    return tuple(Segment(text, style) for text, style in cells)  # type: ignore[arg-type]


@given(lines, st.dictionaries(st.integers(0, 59), styles))
def test_exactly_the_cells_that_differ_are_sent_and_few_beside_them(
    cells: list[tuple[str, object]], changed: dict[int, object]
) -> None:
    other = [("x", changed[x]) if x in changed else cell for x, cell in enumerate(cells)]
    sent = list(changes(line_of(cells), line_of(other)))
    covered = {x for start, width in sent for x in range(start, start + width)}
    assert covered >= set(changed)
    assert all(any(abs(x - near) <= GAP for near in changed) for x in covered)
    assert all(later > start + width for (start, width), (later, _) in pairwise(sent))


def test_a_line_with_wide_characters_is_sent_whole() -> None:
    assert list(changes((Segment("ab" * 5, PLAIN),), (Segment("日本" + "ab" * 3, PLAIN),))) == [(0, 10)]


def test_only_what_changed_is_drawn_again() -> None:
    """Over ssh every byte counts: one figure of one row, and not the screen."""
    later = snapshot(
        session("a", length=11),
        session("b", owner="agents", idle_s=13.0, length=20),
        at_s=101.0,
        every_s=QUIET,
    )

    async def through(app: Top, pilot: Pilot[int]) -> None:
        await pilot.pause()
        drawn: list[Region] = []
        canvas = app.query_one(Canvas)
        canvas.refresh = lambda *regions, **options: drawn.extend(regions)  # type: ignore[method-assign,assignment,return-value]
        await app.look()
        assert sum(region.area for region in drawn) <= 10
        assert {region.y for region in drawn} == {7}

    drive(Scripted(FIRST, later), through)


# ---------------------------------------------------------------- other outlets


def test_a_pipe_gets_one_frame() -> None:
    source = Scripted(snapshot(session("a", length=10)), snapshot(session("a", length=30), at_s=101.0))
    text = asyncio.run(once(source, None, 0.0, 140))
    assert text.splitlines()[7].split()[:4] == ["a", "editor", "i", "30"]
    assert " 20.0 " in text
    assert source.closed


def test_a_picture_is_an_svg_of_the_screen() -> None:
    source = Scripted(replace(FIRST, every_s=0.01))
    svg = picture(source, size=SMALL)
    assert svg.startswith("<svg")
    for part in ("stateroom", "agents", "SESSION"):
        assert part in svg
    assert source.closed
