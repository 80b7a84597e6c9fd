"""The places on disk: endpoint and socket, who may reach them, room, and what is kept."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from stateroom.client.errors import BadConfig, BadEndpoint
from stateroom.client.paths import SOCKET_NAME, default_endpoint, home_dir, ipc_path, runtime_dir
from stateroom.daemon.commands.terminal import size
from stateroom.daemon.config import STATE_NAME
from stateroom.daemon.doctor.check import Check, noted, passed, problem
from stateroom.daemon.doctor.service import waits_for_a_client
from stateroom.daemon.keys import KEYS_NAME
from stateroom.daemon.lock import LOCK_NAME, OTHERS, holder
from stateroom.daemon.readable import within

DISK_BYTES_MIN = 2 * 2**30  # a small model with room to convert it
DISK_S = 10.0  # one that sleeps needs a few
WRITTEN = bytes(64 * 1024)
ELSEWHERE = "Set STATEROOM_RUNTIME_DIR to a directory of yours."
HOME_ELSEWHERE = "Free some, or set STATEROOM_HOME to a larger disk."


def endpoint() -> str:
    """As clients compute it; where the configuration file can't be used, that of the daemon that runs.

    Raises BadEndpoint.
    """
    try:
        return default_endpoint()
    except BadConfig:
        holds = holder(runtime_dir() / LOCK_NAME)
        return f"ipc://{runtime_dir() / SOCKET_NAME}" if holds is None else holds.endpoint


def socket() -> Iterator[Check]:
    """The endpoint, what is in its place, and whose it is."""
    try:
        here, lock = endpoint(), runtime_dir() / LOCK_NAME
        path = ipc_path(here)
        found = None if path is None else path.lstat()
    except BadEndpoint as error:
        yield problem("socket", str(error))
        return
    except FileNotFoundError:
        found = None
    except OSError as error:
        yield problem("socket", f"{path} can't be reached: {error.strerror}", ELSEWHERE)
        return
    holds = holder(lock)
    if found is not None and not stat.S_ISSOCK(found.st_mode):
        yield problem("socket", f"{path} is in the way and is no socket", "Move it elsewhere.")
    elif holds is not None and holds.endpoint != here:
        yield problem(
            "socket",
            f"{here}; but the daemon here, process {holds.pid}, listens at {holds.endpoint}",
            f"Set STATEROOM_ENDPOINT={holds.endpoint} for its clients, or unset it for the daemon.",
        )
    elif holds is not None:
        yield passed("socket", f"{here}, of process {holds.pid} since {holds.since}")
    elif found is not None and waits_for_a_client():
        yield passed("socket", f"{here}, where the service manager listens")
    elif found is not None:
        yield noted("socket", f"{here}, left by a daemon that is gone", "The next one removes it.")
    else:
        yield passed("socket", here)


def permissions() -> Iterator[Check]:
    """Who may reach the directories of the socket, of sessions and of keys: what the daemon insists on."""
    try:
        private = [runtime_dir(), home_dir() / STATE_NAME, home_dir() / KEYS_NAME]
    except BadEndpoint as error:
        yield problem("permissions", str(error))
        return
    there = []
    for folder in private:
        try:
            about = folder.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            yield problem("permissions", f"{folder} can't be looked at: {error.strerror}", ELSEWHERE)
            return
        there.append(folder)
        if not stat.S_ISDIR(about.st_mode):
            yield problem("permissions", f"{folder} is in the way and is no directory", "Move it elsewhere.")
            return
        if about.st_uid != os.getuid():
            yield problem("permissions", f"{folder} belongs to another user", ELSEWHERE)
            return
        if about.st_mode & OTHERS:
            yield problem("permissions", f"others can reach into {folder}", f"chmod 700 {folder}")
            return
        if (open_to_all := _replaceable(folder)) is not None:
            yield problem(
                "permissions",
                f"anybody can write to {open_to_all}, and so replace {folder}",
                f"chmod o-w {open_to_all}",
            )
            return
    if private[0] not in there:
        yield passed("permissions", f"{private[0]} isn't there yet; the daemon makes it")
    else:
        yield passed("permissions", f"{' and '.join(map(str, there))}: yours alone")


def _replaceable(folder: Path) -> Path | None:
    """A directory above in which anybody could put another one in its place."""
    for parent in folder.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return parent
    return None


def disk() -> Iterator[Check]:
    """Room for models and sessions, and that something can be written, in the home or where it would be."""
    home = home_dir()
    try:
        there = within(DISK_S, lambda: next(path for path in (home, *home.parents) if path.exists()))
        within(DISK_S, lambda: _try_to_write(there))
        free = within(DISK_S, lambda: shutil.disk_usage(there).free)
    except TimeoutError:
        yield problem("disk", f"{home} gives no answer within {DISK_S:g} s", "Is its disk there, and awake?")
        return
    except OSError as error:
        yield problem("disk", f"{home} can't be written: {error.strerror}", HOME_ELSEWHERE)
        return
    finding = f"{free / 2**30:.1f} GiB free at {home}"
    if free < DISK_BYTES_MIN:
        yield problem("disk", finding, HOME_ELSEWHERE)
    else:
        yield passed("disk", finding)


def _try_to_write(folder: Path) -> None:
    """Writes a file that has gone before anybody sees it."""
    if not os.access(folder, os.W_OK):  # said so, and not only of the file that could not be made
        raise PermissionError(13, "Permission denied", str(folder))
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(WRITTEN)
        file.flush()
        os.fsync(file.fileno())


def kept() -> Iterator[Check]:
    """What outlives the daemon, and what it takes on the disk."""
    folder = home_dir() / STATE_NAME
    if not folder.is_dir():
        yield passed("state", f"nothing is kept at {folder} yet")
        return
    parts = {"database": folder.glob("catalog.db*"), "snapshots": (folder / "snapshots").rglob("*")}
    try:
        os.listdir(folder)  # a closed folder is empty to `glob`
        sizes = {name: sum(map(_size, paths)) for name, paths in parts.items()}
        total = sum(map(_size, folder.rglob("*")))
    except OSError as error:
        yield problem("state", f"{folder} can't be read: {error.strerror}", f"chmod -R u+rwX {folder}")
        return
    told = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in sizes.items())
    yield passed("state", f"{size(total)} at {folder}: {told}")


def _size(path: Path) -> int:
    """Of a file; of one that went meanwhile nothing."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return 0
    return about.st_size if stat.S_ISREG(about.st_mode) else 0
