"""`stateroom logs`: the end of the daemon's log, and what comes."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from stateroom.client.paths import home_dir
from stateroom.daemon.commands.following import last_lines
from stateroom.daemon.commands.terminal import out, plain
from stateroom.daemon.exits import FAILED, Leave
from stateroom.daemon.log_file import log_path

LINES = 20
FIRST = ("timestamp", "level", "event")  # what every line begins with
STACKS = ("exception", "stack")
COLOURS = {"warning": "yellow", "error": "red"}


def logs(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=0, help="So many lines of its end.")
    ] = LINES,
    as_json: Annotated[bool, typer.Option("--json", help="The lines as they are in the file.")] = False,
) -> None:
    """Show the end of the daemon's log. It holds no prompts and no answers."""
    path = log_path(home_dir())
    try:
        for line in last_lines(path, lines, follow):
            _show(line, as_json)
    except FileNotFoundError:
        raise Leave(FAILED, f"There is no log at {path}: no daemon has run here.") from None


def _show(line: str, as_json: bool) -> None:
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if as_json or not isinstance(entry, dict):
        typer.echo(plain(line.rstrip("\n")))
        return
    when, level, event = (str(entry.pop(name, "")) for name in FIRST)
    rest = " ".join(f"{name}={_told(name, value)}" for name, value in entry.items())
    out.print(
        plain(f"{when[:19]} {level:7} {event:16} {rest}"),
        style=COLOURS.get(level, ""),
        soft_wrap=True,
        markup=False,
    )


def _told(name: str, value: object) -> str:
    """Text as it is where it can't be taken for another entry; a stack has lines."""
    bare = isinstance(value, str) and (name in STACKS or value.isprintable())
    return str(value) if bare else json.dumps(value)
