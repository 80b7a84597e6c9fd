"""The shell around the pure parts: Textual gives keys and the terminal, and takes the cells that changed."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

from rich.cells import cell_len
from textual import events
from textual.app import App, ComposeResult
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from stateroom.client.errors import ClientError, StateroomError
from stateroom.daemon.exits import OK, Leave
from stateroom.daemon.top.board import Board, Row, arranged, board
from stateroom.daemon.top.frame import Status, frame, page, reading
from stateroom.daemon.top.rates import Rates
from stateroom.daemon.top.snapshot import Snapshot
from stateroom.daemon.top.source import Source
from stateroom.daemon.top.text import Line
from stateroom.daemon.top.view import Act, View, press, settled
from stateroom.daemon.top.words import clean

GAP = 8  # unchanged cells that are sent again rather than moving the cursor over them
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Canvas(Widget, can_focus=True):
    """Lines of text as they are. Sends only what differs from the lines before."""

    DEFAULT_CSS = "Canvas { width: 1fr; height: 1fr; background: ansi_default; }"

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[Line] = []

    def show(self, lines: list[Line]) -> None:
        before, self._lines = self._lines, lines
        if len(before) != len(lines):
            self.refresh()
            return
        for y, (old, new) in enumerate(zip(before, lines, strict=True)):
            if old != new:
                self.refresh(*(Region(x, y, width, 1) for x, width in changes(old, new)))

    def render_line(self, y: int) -> Strip:
        if y >= len(self._lines):
            return Strip.blank(self.size.width)
        return Strip(self._lines[y], cell_length(self._lines[y]))


def changes(old: Line, new: Line) -> Iterator[tuple[int, int]]:
    """Where two lines differ: (first cell, how many)."""
    one, other = (_cells(each) for each in (old, new))
    if len(one) != len(other) or any(cell_len(character) != 1 for character, _ in other):
        yield 0, max(cell_length(old), cell_length(new))  # no counting of cells where some take two
        return
    start = end = -1
    for x, (was, now) in enumerate(zip(one, other, strict=True)):
        if was == now:
            continue
        if start >= 0 and x - end > GAP:
            yield start, end - start
            start = x
        start, end = (x if start < 0 else start), x + 1
    if start >= 0:
        yield start, end - start


def _cells(line: Line) -> list[tuple[str, object]]:
    return [(character, segment.style) for segment in line for character in segment.text]


def cell_length(line: Line) -> int:
    return sum(segment.cell_length for segment in line)


class Top(App[int], inherit_bindings=False):
    """Looks again and again, and does what keys say. Its return value is the exit code.

    Attributes: looked: how often it has, the first look included.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = "Screen { background: ansi_default; }"

    def __init__(self, source: Source, first: Snapshot, owner: str | None = None) -> None:
        super().__init__(ansi_color=True)
        self._source, self._owner = source, owner
        self.looked = 1
        self._rates = Rates()
        self._board: Board = self._taken(first)
        self._rows: list[Row] = []
        self._order: tuple[Snapshot | None, str, bool, str] = (None, "", False, "")  # what the rows are by
        self._view = View()
        self._trouble: str | None = None
        self._seen_s = time.monotonic()
        self._acts: set[asyncio.Task[None]] = set()

    def compose(self) -> ComposeResult:
        yield Canvas()

    def on_mount(self) -> None:
        self.query_one(Canvas).focus()
        self.app_resume_signal.subscribe(self, self._redraw)  # after ctrl-z and fg
        loop = asyncio.get_running_loop()
        for which in SIGNALS:
            loop.add_signal_handler(which, self.exit, 128 + which)
        self.run_worker(self._look_on())

    def _redraw(self, app: App[object] | None = None) -> None:
        """All of it, whatever the terminal shows now."""
        self.query_one(Canvas).refresh()

    def on_resize(self, event: events.Resize) -> None:
        self._show()

    # ------------------------------------------------------------ looks

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(self._board.snapshot.every_s)
            if not self._view.paused:
                await self.look()

    async def look(self) -> None:
        """Once more, and shows what it brought, unless the reader wants to keep what is there."""
        try:
            snapshot = await self._source.look()
        except (ClientError, StateroomError, OSError) as error:
            self._trouble = str(error)
        except Leave as leaving:  # another daemon answers now, and is too old
            self._trouble = leaving.message
        else:
            self._trouble, self._seen_s = None, time.monotonic()
            if not self._view.paused:
                self._board = self._taken(snapshot)
        self.looked += 1
        self._show()

    def _taken(self, snapshot: Snapshot) -> Board:
        self._rates.take(snapshot)
        return board(snapshot, self._rates, self._owner)

    def _show(self) -> None:
        view, width, height = self._view, self.size.width, self.size.height
        order = (self._board.snapshot, view.sort, view.reverse, view.filter)
        if order[0] is not self._order[0] or order[1:] != self._order[1:]:  # else moving the cursor took long
            self._order, self._rows = order, arranged(self._board.rows, *order[1:])
        text = reading(self._board, view, width)
        self._view = settled(view, self._ids, self._page, len(text or ()))
        status = Status(self._trouble, time.monotonic() - self._seen_s)
        self.query_one(Canvas).show(frame(self._board, self._rows, self._view, status, width, height))

    @property
    def _ids(self) -> list[str]:
        return [row.id for row in self._rows]

    @property
    def _page(self) -> int:
        return page(self._board, self.size.height)

    # ------------------------------------------------------------ keys

    def on_key(self, event: events.Key) -> None:
        event.stop()
        event.prevent_default()
        self._view, act = press(self._view, event.key, event.character, self._ids, self._page)
        if act is Act.QUIT:
            self.exit(OK)
        elif act is Act.INTERRUPT:
            self.exit(128 + signal.SIGINT)
        elif act is Act.REDRAW:
            self._redraw()
        elif act is Act.SUSPEND:
            self.action_suspend_process()
        elif act is not None:
            self._begin(act)
        self._show()

    def _begin(self, act: Act) -> None:
        row = self._board.row(self._view.selected)
        if row is None:
            self._note("This session is gone.")
            return
        self._note(f"{act.value} {row.title} …")
        task = asyncio.get_running_loop().create_task(self._do(act, row))
        self._acts.add(task)
        task.add_done_callback(self._acts.discard)

    async def _do(self, act: Act, row: Row) -> None:
        try:
            self._note(await self._source.act(act, row.session))
        except (ClientError, StateroomError, OSError) as error:
            self._note(f"{row.title}: {error}")
        self._show()

    def _note(self, text: str) -> None:
        self._view = replace(self._view, note=clean(text))


async def run(source: Source, owner: str | None = None) -> int:
    """The live view until it is left; gives the exit code. Raises what the first look raises."""
    app: Top | None = None
    try:
        app = Top(source, await source.look(), owner)
        return await app.run_async(mouse=False) or OK
    finally:
        # Else its thread for keys outlives an end that Textual did not see to, on a terminal that is gone.
        ended = getattr(app and app._driver, "exit_event", None)
        if ended is not None:
            ended.set()
        await source.close()
