"""`stateroom top`: what the daemon does now, in a terminal."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from typing import Annotated

import typer

from stateroom.daemon.commands.completing import apps
from stateroom.daemon.commands.options import Endpoint
from stateroom.daemon.exits import OK
from stateroom.daemon.top.once import once
from stateroom.daemon.top.source import DaemonSource

INTERVAL_S = 1.0
WIDTH = 140  # columns of what is no terminal


def top(
    app: Annotated[
        str | None,
        typer.Option(
            metavar="APP",
            help="Sessions of this owner only; by default those of all.",
            show_default=False,
            autocompletion=apps,
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.2, max=3600, metavar="SECONDS", help="The least time between two looks.")
    ] = INTERVAL_S,
    only_once: Annotated[
        bool,
        typer.Option(
            "--once", help="Print what the screen would show, as text, and leave. So it does in a pipe."
        ),
    ] = False,
    endpoint: Endpoint = None,
) -> None:
    """Watch sessions, engines and memory live; cancel, park and close by key.

    Each session with its owner, length, bytes, tokens a second, where its KV
    is, what it does, and why it waits.

    Keys: s and r sort, / filters, enter shows details and requests, k cancels
    what runs, p parks, x closes, space pauses, ? helps, q quits. A terminal of
    80×24 will do, without a mouse.

    Where sessions are many they are read less often, so that this takes no
    more than 5 % of the daemon's time.
    """
    asyncio.run(_show(DaemonSource(endpoint, interval), app, interval, only_once))


async def _show(source: DaemonSource, app: str | None, interval_s: float, only_once: bool) -> None:
    # Textual draws on stderr; without all three there is nobody to look at it, or to press keys.
    seen = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    if seen and not only_once and os.environ.get("TERM", "dumb") != "dumb":
        from stateroom.daemon.top.screen import run  # takes 0.3 s to import, which no other command needs

        for size in ("COLUMNS", "LINES"):  # they would be believed still when the window has another one
            os.environ.pop(size, None)
        code = await run(source, app)
        if code != OK:
            raise typer.Exit(code)
        return
    width = shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH
    sys.stdout.write(await once(source, app, interval_s, width))
