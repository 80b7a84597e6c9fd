"""Stateroom as a service of the user: what is run, by whichever manager (`launchd.py`, `systemd.py`).

A service manager starts with an almost empty environment, in `/`, and expands nothing: every path here is
absolute, every variable spelt out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from stateroom.client.paths import home_dir, runtime_dir

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
OPEN_FILES = 8_192  # one a client, a few a worker; launchd gives 256
STOP_S = 15  # from SIGTERM to SIGKILL; the daemon parks its sessions and leaves within 5
RESTART_S = 10  # between two starts at the least
LOG_NAME = "service.log"  # what is written before the daemon has its own log, and crashes
# Of the environment that it is installed from.
INHERITED = ("STATEROOM_CONFIG", "HF_HOME", "LANG")


class ServiceError(Exception):
    """One sentence that says what went wrong and what to do."""


@dataclass(frozen=True)
class User:
    """Whom a service of the whole machine runs as."""

    name: str
    uid: int
    home: Path


@dataclass(frozen=True)
class Service:
    """What is to run: the daemon, and with what."""

    arguments: Sequence[str] = ()  # of `stateroom serve`
    home: Path = field(default_factory=home_dir)
    runtime: Path = field(default_factory=runtime_dir)
    user_home: Path = field(default_factory=Path.home)
    inherited: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = sys.executable
    socket: Path | None = None  # the manager listens there, and starts it for its first client

    @property
    def command(self) -> list[str]:
        return [*self.program, "serve", "--log", "json", *self.arguments, *self.activation]

    @property
    def program(self) -> list[str]:
        return [self.python, "-m", "stateroom.daemon.cli"]

    @property
    def activation(self) -> list[str]:
        return [] if self.socket is None else ["--activated", f"--endpoint=ipc://{self.socket}"]

    @property
    def environment(self) -> dict[str, str]:
        """All that it gets."""
        own = {
            "HOME": str(self.user_home),
            "PATH": PATH,
            "STATEROOM_HOME": str(self.home),
            "STATEROOM_RUNTIME_DIR": str(self.runtime),
        }
        return own | {name: self.inherited[name] for name in INHERITED if self.inherited.get(name)}

    @property
    def log(self) -> Path:
        return self.home / "logs" / LOG_NAME

    def make_folders(self) -> None:
        """Those that the manager expects to be there."""
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.log.parent.mkdir(mode=0o700, exist_ok=True)
        if self.socket is not None:
            self.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)


@dataclass(frozen=True)
class Status:
    """`installed`: it starts by itself; `running`: there is a process, `pid`; `listening`: or will be one.

    The manager listens, and starts it for its first client.
    """

    installed: bool
    running: bool
    pid: int | None = None
    last_exit: str | None = None  # in the manager's words
    where: str = ""  # the file that says what is run
    note: str = ""  # what the user should know
    listening: bool = False


class Manager(Protocol):
    """launchd or systemd, for this user. Each verb may be repeated, and raises `ServiceError`."""

    def install(self, service: Service) -> Status: ...
    def uninstall(self) -> None: ...
    def start(self) -> Status: ...
    def stop(self) -> None: ...
    def restart(self) -> Status: ...
    def status(self) -> Status: ...
    def files(self, service: Service, user: User | None = None) -> dict[Path, str]:
        """What says what is run; with `user`, as a service of the whole machine, from its start on."""


def manager() -> Manager:
    """That of this machine.

    Raises `ServiceError` where there is none that is known.
    """
    if sys.platform == "darwin":
        from stateroom.deploy.launchd import Launchd

        return Launchd()
    from stateroom.deploy.systemd import Systemd

    return Systemd()


def clear_socket(path: Path | None) -> None:
    """Removes a socket that nobody listens at any more, and nothing else."""
    if path is not None and path.is_socket():
        path.unlink(missing_ok=True)


def written(path: Path, content: bytes) -> bool:
    """Writes a file, whole or not at all; False when it was like that already."""
    if path.exists() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.new")
    staged.write_bytes(content)
    staged.chmod(0o644)
    staged.replace(path)
    return True
