"""What the reader chose, and what keys do to it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from stateroom.daemon.top.board import ORDERS

FILTER_MAX = 64  # characters


class Mode(Enum):
    TABLE = "table"
    FILTER = "filter"  # a filter is being typed
    ASK = "ask"  # y or n
    DETAILS = "details"
    HELP = "help"


class Act(Enum):
    """What the screen is to do. `value`: as the question says it."""

    CANCEL = "Cancel what runs in"
    PARK = "Park"
    CLOSE = "Close for good"
    QUIT = "quit"
    INTERRUPT = "interrupt"
    REDRAW = "redraw"
    SUSPEND = "suspend"


ALWAYS = {"ctrl+c": Act.INTERRUPT, "ctrl+l": Act.REDRAW, "ctrl+z": Act.SUSPEND}
ASKED = {"k": Act.CANCEL, "x": Act.CLOSE}  # what can't be taken back asks first


@dataclass(frozen=True, slots=True)
class View:
    """Attributes:
    selected: a session, which the cursor stays on. `cursor`: its place, `top`: the first row shown.
    scroll: the first line shown of details or help.
    asking: what y would do, and `back` where the answer leads.
    """

    sort: str = ORDERS[0]
    reverse: bool = False
    filter: str = ""
    mode: Mode = Mode.TABLE
    selected: str | None = None
    cursor: int = 0
    top: int = 0
    scroll: int = 0
    paused: bool = False
    asking: Act | None = None
    back: Mode = Mode.TABLE
    note: str = ""


def settled(view: View, ids: list[str], page: int, lines: int = 0) -> View:
    """With the cursor on the selected session, or where that was, and on the screen of `page` rows.

    `lines`: of the details or the help, which don't scroll beyond their end.
    """
    view = replace(view, scroll=min(view.scroll, max(lines - page - 1, 0)))
    if not ids:
        return replace(view, cursor=0, top=0, selected=view.selected if view.mode is not Mode.TABLE else None)
    try:
        cursor = ids.index(view.selected) if view.selected is not None else view.cursor
    except ValueError:
        cursor = view.cursor
        if view.mode in (Mode.DETAILS, Mode.ASK):  # those are of one session, there or not
            return view
    return _at(view, cursor, ids, page)


def _at(view: View, cursor: int, ids: list[str], page: int) -> View:
    page = max(page, 1)
    cursor = min(max(cursor, 0), len(ids) - 1)
    top = min(max(view.top, cursor - page + 1, 0), cursor, max(len(ids) - page, 0))
    return replace(view, cursor=cursor, top=top, selected=ids[cursor])


def press(view: View, key: str, character: str | None, ids: list[str], page: int) -> tuple[View, Act | None]:
    """The view after a key, and what is to be done. `ids`: the sessions shown, in order."""
    if key in ALWAYS:
        return view, ALWAYS[key]
    view = replace(view, note="")
    if view.mode is Mode.FILTER:
        return _type(view, key, character), None
    if view.mode is Mode.ASK:
        yes = character in ("y", "Y")
        asked = view.asking
        return replace(view, mode=view.back, asking=None, note="" if yes else "Left as it is."), (
            asked if yes else None
        )
    if character == "q" and view.mode is Mode.TABLE:
        return view, Act.QUIT
    if character in ASKED and view.mode is not Mode.HELP and view.selected is not None:
        return replace(view, mode=Mode.ASK, asking=ASKED[character], back=view.mode), None
    if character == "p" and view.mode is not Mode.HELP and view.selected is not None:
        return view, Act.PARK
    if character == " ":
        return replace(view, paused=not view.paused), None
    if view.mode is not Mode.TABLE:
        return _read(view, key, character, page), None
    return _move(view, key, character, ids, page), None


def _type(view: View, key: str, character: str | None) -> View:
    if key == "escape":
        return replace(view, mode=Mode.TABLE, filter="")
    if key == "enter":
        return replace(view, mode=Mode.TABLE)
    if key == "backspace":
        return replace(view, filter=view.filter[:-1])
    if key == "ctrl+u":
        return replace(view, filter="")
    if character is not None and character.isprintable():
        return replace(view, filter=(view.filter + character)[:FILTER_MAX])
    return view


def _read(view: View, key: str, character: str | None, page: int) -> View:
    """In the details and the help."""
    if key in ("escape", "enter", "backspace") or character in ("q", "?"):
        return replace(view, mode=Mode.TABLE, scroll=0)
    return replace(view, scroll=max(view.scroll + (MOVES[key](page) if key in MOVES else 0), 0))


def _move(view: View, key: str, character: str | None, ids: list[str], page: int) -> View:
    if character == "?":
        return replace(view, mode=Mode.HELP, scroll=0)
    if character == "/":
        return replace(view, mode=Mode.FILTER)
    if character in ("s", "S"):
        step = 1 if character == "s" else -1
        return replace(view, sort=ORDERS[(ORDERS.index(view.sort) + step) % len(ORDERS)], reverse=False)
    if character == "r":
        return replace(view, reverse=not view.reverse)
    if key == "escape":
        return replace(view, filter="")
    if key == "enter" and view.selected is not None:
        return replace(view, mode=Mode.DETAILS, scroll=0)
    if key in MOVES and ids:
        return _at(view, view.cursor + MOVES[key](page), ids, page)
    return view


FAR = 2**31  # beyond any list
MOVES: dict[str, Callable[[int], int]] = {
    "up": lambda page: -1,
    "down": lambda page: 1,
    "pageup": lambda page: -page,
    "pagedown": lambda page: page,
    "home": lambda page: -FAR,
    "end": lambda page: FAR,
}
