"""Whether a model can be read, asked with a limit of time: a disk or macOS may let a read wait for ever.

macOS asks its user before a program may read what lies in Documents, on a network volume or on a removable
one, and until he has answered the read hangs, with nothing in any log; a disk that went away does the same.
So the look is had by a thread that is left behind if it has no end.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from stateroom.daemon.config import ModelSpec, model_specs
from stateroom.daemon.exits import CONFIG, FAILED, FORBIDDEN, Leave

T = TypeVar("T")

READABLE_S = 10.0  # a disk that sleeps is awake after about as long
FILES_LOOKED_AT = 256  # of a model's directory; the largest have some hundred
ALLOW = (
    "On macOS allow it in System Settings, Privacy & Security, Files and Folders, for {python}; or move the "
    "model below ~/.stateroom."
)


def readable_specs(given: list[str], models_dir: Path, limit_s: float = READABLE_S) -> tuple[ModelSpec, ...]:
    """`model_specs`, of models whose files can be read: a byte of each is, of those that lie here.

    Raises:
        Leave: as `model_specs`; or one can't be read, or isn't within `limit_s`, with what to allow.
    """
    allow = ALLOW.format(python=sys.executable)
    try:
        specs = within(limit_s, lambda: model_specs(given, models_dir))
        for spec in specs:
            path = Path(spec.spec)
            if path.is_absolute():  # else an id of a hub
                within(limit_s, partial(read_a_byte_of_each, path))
    except TimeoutError:
        named = " or ".join(given)
        raise Leave(
            FAILED,
            f"Reading {named} had no end within {limit_s:g} s: its disk does not answer, or a question waits "
            f"on the screen. {allow}",
        ) from None
    except OSError as error:
        code = FORBIDDEN if error.errno in (errno.EACCES, errno.EPERM) else CONFIG
        raise Leave(
            code, f"The model at {error.filename} can't be read: {error.strerror}. {allow}"
        ) from error
    return specs


def read_a_byte_of_each(path: Path) -> None:
    """Raises OSError for the first file that can't be read."""
    files = sorted(path.iterdir())[:FILES_LOOKED_AT] if path.is_dir() else [path]
    for file in files:
        if not file.is_dir():
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.read(descriptor, 1)
            finally:
                os.close(descriptor)


def within(limit_s: float, action: Callable[[], T]) -> T:
    """What `action` gives, or raises.

    Raises:
        TimeoutError: it had no end in time; it is left to itself.
    """
    answers: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(action())
        except BaseException as error:
            failures.append(error)

    # A daemon thread: the process must be able to leave beside it.
    thread = threading.Thread(target=run, name="readable", daemon=True)
    thread.start()
    thread.join(limit_s)
    if failures:
        raise failures[0]
    if not answers:
        raise TimeoutError
    return answers[0]
