"""`stateroom logs`: the end of the daemon's log, and what comes."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TextIO

import typer

from stateroom.client.paths import home_dir
from stateroom.daemon.commands.terminal import out, plain
from stateroom.daemon.exits import FAILED, Leave
from stateroom.daemon.log_file import log_path

POLL_S = 0.25
LINES = 20
FIRST = ("timestamp", "level", "event")  # what every line begins with
COLOURS = {"warning": "yellow", "error": "red"}


def logs(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Of its end.")] = LINES,
    as_json: Annotated[bool, typer.Option("--json", help="As they are in the file.")] = False,
) -> None:
    """Show the end of the daemon's log. It holds no prompts and no answers."""
    path = log_path(home_dir())
    try:
        with open(path, errors="replace") as file:
            for line in deque(file, maxlen=lines):
                _show(line, as_json)
            for line in _coming(path, file) if follow else ():
                _show(line, as_json)
    except FileNotFoundError:
        raise Leave(FAILED, f"There is no log at {path}: no daemon has run here.") from None


def _coming(path: Path, file: TextIO) -> Iterator[str]:
    """Lines as they are written, also when the file has made room for the next one."""
    begun = ""
    while True:
        piece = file.readline()
        if piece.endswith("\n"):
            yield begun + piece
            begun = ""
        elif piece:
            begun += piece
        elif _replaced(path, file):
            file.close()
            file = open(path, errors="replace")  # noqa: SIM115  (closed here, or by the process's end)
        else:
            time.sleep(POLL_S)


def _replaced(path: Path, file: TextIO) -> bool:
    try:
        return os.stat(path).st_ino != os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False  # in the instant between two names


def _show(line: str, as_json: bool) -> None:
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if as_json or not isinstance(entry, dict):
        typer.echo(plain(line.rstrip("\n")))
        return
    when, level, event = (str(entry.pop(name, "")) for name in FIRST)
    rest = " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in entry.items()
    )
    out.print(
        plain(f"{when[:19]} {level:7} {event:16} {rest}"),
        style=COLOURS.get(level, ""),
        soft_wrap=True,
        markup=False,
    )
