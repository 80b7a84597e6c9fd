"""A listening socket from who started us: systemd's `LISTEN_FDS`, or launchd's `launch_activate_socket`.

The manager listens before we run, so that whoever comes first waits in its backlog and starts us. What it
hands over may be anything: it is checked to be the endpoint that we mean, and refused by name where it isn't.

Who owns what: the socket file is the manager's, and stays when we leave. The descriptor is ours until libzmq
has it, which closes it and, since it didn't bind it, leaves the file alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import socket
import stat
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stateroom.client.paths import ipc_path
from stateroom.daemon.exits import CONFIG, FORBIDDEN, Leave

FIRST = 3  # sd_listen_fds(3): the first descriptor; those before are stdin, stdout and stderr
HANDED_MOST = 16  # descriptors looked at; more are no mistake that anybody makes
LAUNCHD_NAME = b"Listeners"  # of the entry in our plist's `Sockets`
SYSTEMD = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "LISTEN_PIDFDID")
OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class Handed:
    """Descriptors from a manager, open and ours."""

    manager: str
    descriptors: tuple[int, ...]


def taken(
    endpoint: str, environment: MutableMapping[str, str] = os.environ, library: Any | None = None
) -> int:
    """The descriptor that listens at `endpoint`; no process that we start inherits it, or hears of it.

    `library`: of tests; what launchd's function is looked up in, this process by default.

    Raises:
        Leave: there is none, or it isn't what it should be.
    """
    path = ipc_path(endpoint)
    if path is None:
        raise Leave(CONFIG, f"A socket that is handed over is a local one, with a path; {endpoint} is not.")
    handed = from_systemd(environment, os.getpid()) or from_launchd(library or ctypes.CDLL(None))
    if handed is None:
        raise Leave(
            CONFIG,
            "No socket was handed over: --activated is for systemd and launchd; leave it out elsewhere.",
        )
    try:
        for descriptor in handed.descriptors:
            os.set_inheritable(descriptor, False)
        if len(handed.descriptors) != 1:
            raise Leave(
                CONFIG,
                f"{handed.manager} handed over {len(handed.descriptors)} sockets; it takes one, for {path}.",
            )
        check(handed.descriptors[0], path, handed.manager)
        os.set_blocking(handed.descriptors[0], False)
    except BaseException:
        for descriptor in handed.descriptors:
            os.close(descriptor)
        raise
    return handed.descriptors[0]


# ---------------------------------------------------------------- where from


def from_systemd(environment: MutableMapping[str, str], pid: int) -> Handed | None:
    """What sd_listen_fds(3) gives; the variables are gone afterwards, whomever they were for."""
    told = {name: environment.pop(name, "") for name in SYSTEMD}
    if told["LISTEN_PID"] != str(pid):
        return None  # none, or meant for a process above us
    count = int(told["LISTEN_FDS"]) if re.fullmatch("[0-9]{1,3}", told["LISTEN_FDS"]) else 0
    if not 0 < count <= HANDED_MOST:
        return None
    descriptors = range(FIRST, FIRST + count)
    if not all(_is_open(descriptor) for descriptor in descriptors):
        raise Leave(CONFIG, "systemd's variables name sockets that are not there; LISTEN_FDS is wrong.")
    return Handed("systemd", tuple(descriptors))


def from_launchd(library: Any) -> Handed | None:
    """What launch_activate_socket(3) gives.

    Raises:
        Leave: launchd knows us, and has no sockets of that name for us.
    """
    function = getattr(library, "launch_activate_socket", None)
    if function is None:
        return None
    descriptors, count = ctypes.POINTER(ctypes.c_int)(), ctypes.c_size_t(0)
    code = int(function(LAUNCHD_NAME, ctypes.byref(descriptors), ctypes.byref(count)))
    if code == errno.ESRCH:
        return None  # it isn't launchd that started us
    if code != 0:
        why = os.strerror(code)
        raise Leave(CONFIG, f"launchd has no socket {LAUNCHD_NAME.decode()!r} for this service: {why}.")
    try:
        return Handed("launchd", tuple(descriptors[at] for at in range(min(count.value, HANDED_MOST))))
    finally:
        library.free(descriptors)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


# ---------------------------------------------------------------- what it is


def check(descriptor: int, path: Path, manager: str) -> None:
    """Refuses what isn't a socket of ours that listens at `path`, and that nobody else can open.

    Raises:
        Leave: with what it is.
    """
    what = _described(descriptor)
    if what is not None:
        raise Leave(CONFIG, f"{manager} handed over {what}, not a socket that listens at {path}.")
    bound = _bound_path(descriptor)
    if bound is None or not _same(bound, path):
        raise Leave(
            CONFIG,
            f"{manager} handed over a socket at {bound or 'no path'}, and the endpoint is {path}; make them "
            "the same, in its file or with --endpoint.",
        )
    try:
        found = path.lstat()
    except OSError as error:
        raise Leave(
            CONFIG,
            f"{manager} listens at {path}, where nothing is any more ({error.strerror}): restart its socket.",
        ) from error
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & OTHERS:
        raise Leave(FORBIDDEN, f"The socket {path} of {manager} isn't ours alone; its mode should be 0600.")


def _described(descriptor: int) -> str | None:
    """What else than a listening local stream it is; None: it is one."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return "no socket"
    with _looked_at(descriptor) as found:
        if found.family != socket.AF_UNIX:
            return "a socket of a network"
        if found.type != socket.SOCK_STREAM:
            return "a socket that is no stream"
        if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return "a socket that doesn't listen"
    return None


def _bound_path(descriptor: int) -> Path | None:
    with _looked_at(descriptor) as found:
        name = found.getsockname()
    return Path(name) if isinstance(name, str) and name else None  # abstract names are bytes


@contextlib.contextmanager
def _looked_at(descriptor: int) -> Any:
    looked = socket.socket(fileno=descriptor)
    try:
        yield looked
    finally:
        looked.detach()


def _same(one: Path, other: Path) -> bool:
    """By the directory, whose path may go over a link (macOS: `/var`), and the name in it."""
    if one.name != other.name:
        return False
    try:
        return one == other or one.parent.samefile(other.parent)
    except OSError:
        return False
