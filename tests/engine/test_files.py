"""The thread that does files: in order, never losing what came of it."""

from __future__ import annotations

import select
import threading
import weakref
from collections.abc import Iterator

import pytest

from stateroom.daemon.engine.files import Files

S = 10.0


@pytest.fixture
def files() -> Iterator[Files]:
    made = Files()
    yield made
    made.close()


def until(files: Files, taken: list[object], count: int) -> None:
    """Sleeps as the worker's loop does; each sleep ends because something is there."""
    while len(taken) < count:
        if not files.ready:
            assert select.select([files.fileno()], [], [], S)[0], "nobody woke the loop"
        files.turn()


def test_what_was_asked_is_done_in_order_and_handed_over_one_by_one(files: Files) -> None:
    taken: list[object] = []
    for n in range(5000):
        files.ask(lambda n=n: n, taken.append)  # type: ignore[misc]
    until(files, taken, 5000)
    assert taken == list(range(5000))


def test_it_is_another_thread_and_the_answer_comes_on_ours(files: Files) -> None:
    taken: list[object] = []
    files.ask(threading.get_ident, lambda other: taken.extend((other, threading.get_ident())))
    until(files, taken, 2)
    other, here = taken
    assert here == threading.get_ident() != other


def test_what_is_raised_is_an_outcome(files: Files) -> None:
    taken: list[object] = []
    files.ask(lambda: 1 // 0, taken.append)
    files.ask(lambda: "next", taken.append)
    until(files, taken, 2)
    assert isinstance(taken[0], ZeroDivisionError)
    assert taken[1] == "next"


def test_nothing_is_there_until_it_was_done(files: Files) -> None:
    go, taken = threading.Event(), list[object]()
    files.ask(go.wait, taken.append)
    assert not files.wait(0.0)
    files.turn()
    assert not taken
    go.set()
    assert files.wait(S)
    until(files, taken, 1)


def test_what_was_done_is_held_no_longer(files: Files) -> None:
    """It may have had a copy of a session in view."""

    class Copy:
        pass

    copy = Copy()
    there = weakref.ref(copy)
    files.ask(lambda copy=copy: copy, lambda _: None)  # type: ignore[misc]
    del copy
    assert select.select([files.fileno()], [], [], S)[0]
    files.turn()
    assert there() is None


def test_closing_ends_what_was_begun() -> None:
    files, done = Files(), list[int]()
    for n in range(20):
        files.ask(lambda n=n: done.append(n), lambda _: None)  # type: ignore[misc]
    files.close()
    assert done == list(range(20))
