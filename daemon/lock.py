"""The places of a daemon on disk: its runtime directory, its lock, its socket file.

The lock is taken before anything is bound, and dies with the process, so that a second daemon can't take the
socket of the first, and a socket file that is left over is known to be nobody's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from stateroom.daemon.exits import FORBIDDEN, RUNNING, Leave

LOCK_NAME = "stateroom.lock"
TRIES = 5
TRY_S = 0.02
ENGINE_SOCKETS = "engine-*.sock"
OTHERS = stat.S_IRWXG | stat.S_IRWXO
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class Holder:
    """Who holds a lock: written into it by the daemon that took it."""

    pid: int
    endpoint: str
    since: str  # UTC, ISO 8601


def make_private(directory: Path, others: int = OTHERS) -> None:
    """Makes the directory with mode 0700, or sees that the one there is ours alone.

    `others`: what nobody else may do there, by default anything. A directory above it that everybody can
    write to must have the sticky bit (`/tmp` has), or ours could be replaced.

    Raises:
        Leave: it isn't. Nothing is changed: whoever opened it may have had a reason.
    """
    for parent in directory.resolve().parents:
        mode = parent.stat().st_mode if parent.exists() else 0
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise Leave(
                FORBIDDEN,
                f"Anybody can write to {parent}, and so replace {directory}; chmod o-w {parent}.",
            )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise Leave(FORBIDDEN, f"The directory {directory} can't be made: {error.strerror}.") from error
    if found.st_uid != os.getuid():
        raise Leave(FORBIDDEN, f"The directory {directory} belongs to another user; name one of your own.")
    if found.st_mode & others:
        raise Leave(FORBIDDEN, f"{directory} is open to other users; make it private: chmod 700 {directory}.")


class Lock:
    """A lock file, held from `take` until `release` or the end of the process, however that comes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def take(self, endpoint: str) -> None:
        """Takes the lock and writes who has it.

        Raises:
            Leave: another process holds it, or the file can't be opened.
        """
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise Leave(FORBIDDEN, f"The lock file {self.path} can't be opened: {error.strerror}.") from error
        file = os.fdopen(descriptor, "r+", encoding="utf-8")
        if not _exclusive(file):
            file.close()
            raise Leave(RUNNING, f"A daemon is running already{_described(holder(self.path))}.")
        since = datetime.now(UTC).isoformat(timespec="seconds")
        file.truncate(0)
        json.dump(asdict(Holder(os.getpid(), endpoint, since)), file)
        file.flush()
        self._file = file

    def release(self) -> None:
        """Lets go. The file stays: removing it would let two daemons hold two files of one name."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None


def _exclusive(file: TextIO) -> bool:
    """Takes the lock; tried again a few times, since `holder` takes it for a moment to look."""
    for _ in range(TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(TRY_S)
        else:
            return True
    return False


def holder(path: Path) -> Holder | None:
    """Who holds the lock at `path`; None if nobody does, or it can't be read."""
    with contextlib.suppress(OSError, ValueError, TypeError), path.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return Holder(**json.load(file))
    return None


def _described(found: Holder | None) -> str:
    if found is None:
        return ""
    return f": process {found.pid}, at {found.endpoint}, since {found.since}; `stateroom stop` ends it"


def clear_socket(path: Path) -> None:
    """Removes a socket file that a daemon left; the lock must be ours.

    Raises:
        Leave: what is there isn't a socket. It is not touched.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise Leave(
            FORBIDDEN, f"{path} is no socket, so it was left alone; move it away or set STATEROOM_ENDPOINT."
        )
    path.unlink()


def make_socket_private(path: Path) -> None:
    """Mode 0600 for a socket that was just bound, and a look at what is there now.

    Raises:
        Leave: it isn't a socket of ours that others can't open.
    """
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)
    found = path.lstat()
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & OTHERS:
        raise Leave(FORBIDDEN, f"The socket {path} can't be made private there; choose another place for it.")


def clear_engine_sockets(runtime_dir: Path) -> None:
    """Removes the link sockets of workers that died with their daemon; the lock must be ours."""
    for path in runtime_dir.glob(ENGINE_SOCKETS):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink(missing_ok=True)
