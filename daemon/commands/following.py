"""The end of a file that another process writes lines to, and what comes."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

POLL_S = 0.25


def last_lines(path: Path, lines: int, follow: bool) -> Iterator[str]:
    """The last `lines` of them; with `follow` for ever those that come, too.

    Raises FileNotFoundError where there is no such file.
    """
    with open(path, errors="replace") as file:
        yield from deque(file, maxlen=lines)
        if follow:
            yield from coming(path, file)


def coming(path: Path, file: TextIO) -> Iterator[str]:
    """Lines as they are written, also once the file has made room for the next or was cut off in place."""
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
        elif os.fstat(file.fileno()).st_size < file.tell():
            file.seek(0)
        else:
            time.sleep(POLL_S)


def _replaced(path: Path, file: TextIO) -> bool:
    try:
        return os.stat(path).st_ino != os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False  # in the instant between two names
