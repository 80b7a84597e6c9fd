"""A LaunchAgent: launchd starts the daemon at login, and again when it dies.

`launchctl` answers with numbers that its manual doesn't explain; those met here are named below. A session
without a screen (ssh) has no `gui/UID` domain; then the agent lives in `user/UID`, and the status says so.
"""

from __future__ import annotations

import os
import plistlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stateroom.deploy.programs import Run, Said, run
from stateroom.deploy.service import (
    OPEN_FILES,
    RESTART_S,
    STOP_S,
    Service,
    ServiceError,
    Status,
    User,
    clear_socket,
    written,
)

LABEL = "org.stateroom.daemon"
SOCKETS = "Listeners"  # by this name the daemon asks for its socket: `daemon/activation.py`
SYSTEM = Path("/Library/LaunchDaemons")
NOT_LOADED = (3, 113)  # no such process; could not find service
BUSY = (5, 36, 37)  # input/output error, in progress, already in progress: what was booted out isn't gone yet
NO_DOMAIN = (112, 125)  # could not find domain; it does not support that: no screen
PASSING = (*NOT_LOADED, *BUSY, *NO_DOMAIN)  # of a service that is there all the same
GONE_S = 20.0  # for what was booted out to be gone: the daemon's own time to stop, and some
TRIES = 5
PAUSE_S = 0.5
NO_SCREEN = "There is no desktop session: it runs in the background domain, and starts at your next login."

Plist = dict[str, Any]


def plist(service: Service, user: User | None = None) -> Plist:
    """What launchd is told of a service; of one that starts with the machine, as `user`."""
    made: Plist = {
        "Label": LABEL,
        "ProgramArguments": service.command,
        "EnvironmentVariables": {**service.environment, "STATEROOM_SERVICE": "launchd"},
        "WorkingDirectory": str(service.home),
        "ThrottleInterval": RESTART_S,
        "ExitTimeOut": STOP_S,
        "ProcessType": "Interactive",  # others are slowed down, and the GPU with them
        "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
        "Umask": 0o077,
        "StandardOutPath": str(service.log),
        "StandardErrorPath": str(service.log),
    }
    if service.socket is not None:
        # No KeepAlive, which would start it at once: it is back with its next client, died or not.
        made["Sockets"] = {SOCKETS: _socket(service.socket, user)}
    else:
        made["RunAtLoad"] = True
        # Left with 0: as asked, or because trying again can't help (see `daemon/exits.py`).
        made["KeepAlive"] = {"SuccessfulExit": False}
    if user is None:
        made["LimitLoadToSessionType"] = ["Aqua", "Background"]
    else:
        made["UserName"] = user.name
    return made


def _socket(path: Path, user: User | None) -> Plist:
    made: Plist = {"SockType": "stream", "SockPathName": str(path), "SockPathMode": 0o600}
    return made if user is None else {**made, "SockPathOwner": user.uid}


class Launchd:
    """Args: `run`, `pause`, `uid`, `folder`: of tests."""

    def __init__(
        self,
        run: Run = run,
        pause: Callable[[float], None] = time.sleep,
        uid: int | None = None,
        folder: Path | None = None,
    ) -> None:
        self._run, self._pause = run, pause
        self._uid = os.getuid() if uid is None else uid
        folder = folder or Path("~/Library/LaunchAgents").expanduser()
        self.path = folder / f"{LABEL}.plist"

    def files(self, service: Service, user: User | None = None) -> dict[Path, str]:
        path = self.path if user is None else SYSTEM / self.path.name
        return {path: plistlib.dumps(plist(service, user)).decode()}

    # ------------------------------------------------------------ verbs

    def install(self, service: Service) -> Status:
        """In place of what was there; nothing is done when all is as it should be."""
        service.make_folders()
        domain = self._domain()
        left = self._socket_path()
        content = self.files(service)[self.path].encode()
        if self._loaded(domain) and not (self.path.exists() and self.path.read_bytes() == content):
            self._boot_out(domain)
        # Not before: what was refused half way is seen to be unfinished when it is asked for again.
        written(self.path, content)
        if not self._loaded(domain):
            clear_socket(left)
            clear_socket(service.socket)
            self._bootstrap(domain)
        return self.status()

    def uninstall(self) -> None:
        left = self._socket_path()
        for domain in self._domains():
            self._boot_out(domain)
        clear_socket(left)
        self.path.unlink(missing_ok=True)

    def start(self) -> Status:
        if not self.path.exists():
            raise ServiceError("The service isn't installed: `stateroom service install` does that.")
        domain, socket = self._domain(), self._socket_path()
        loaded = self._loaded(domain)
        if not loaded:
            clear_socket(socket)
            self._bootstrap(domain)
        if loaded or socket is not None:  # one that is activated doesn't run by being loaded
            self._checked(self._ctl("kickstart", f"{self._domain()}/{LABEL}"))
        return self.status()

    def stop(self) -> None:
        """It stays installed, and is back at the next login or `start`."""
        for domain in self._domains():
            self._boot_out(domain)
        clear_socket(self._socket_path())

    def restart(self) -> Status:
        domain = self._domain()
        if not self._loaded(domain):
            return self.start()
        self._checked(self._ctl("kickstart", "-k", f"{domain}/{LABEL}"))
        return self.status()

    def status(self) -> Status:
        for domain in self._domains():
            said = self._ctl("print", f"{domain}/{LABEL}")
            if said.ok:
                pid = _found(r"^\s*pid = (\d+)", said.out)
                return Status(
                    self.path.exists(),
                    pid is not None,
                    int(pid) if pid else None,
                    _found(r"^\s*last exit code = (.+)", said.out),
                    str(self.path),
                    NO_SCREEN if domain.startswith("user/") else "",
                    self._socket_path() is not None,
                )
        return Status(self.path.exists(), False, where=str(self.path))

    # ------------------------------------------------------------ launchctl

    def _socket_path(self) -> Path | None:
        """Where launchd listens for what is installed."""
        try:
            installed = plistlib.loads(self.path.read_bytes())
            return Path(installed["Sockets"][SOCKETS]["SockPathName"])
        except (OSError, ValueError, KeyError, TypeError, plistlib.InvalidFileException):
            return None

    def _ctl(self, *arguments: str) -> Said:
        return self._run(["launchctl", *arguments])

    def _domains(self) -> list[str]:
        return [f"gui/{self._uid}", f"user/{self._uid}"]

    def _domain(self) -> str:
        """Where the service belongs: beside the desktop, if there is one."""
        gui, user = self._domains()
        if self._loaded(user):
            return user  # where it was put when there was no desktop
        return gui if self._ctl("print", gui).ok else user

    def _loaded(self, domain: str) -> bool:
        return self._ctl("print", f"{domain}/{LABEL}").ok

    def _bootstrap(self, domain: str) -> None:
        said = self._ctl("bootstrap", domain, str(self.path))
        for _ in range(TRIES):
            if said.ok or self._loaded(domain):
                return
            if said.code in NO_DOMAIN and domain.startswith("gui/"):
                return self._bootstrap(f"user/{self._uid}")
            if said.code not in BUSY:
                break
            self._pause(PAUSE_S)
            said = self._ctl("bootstrap", domain, str(self.path))
        self._checked(said)

    def _boot_out(self, domain: str) -> None:
        """Returns once it is gone: launchd only begins to stop it, and may first refuse to."""
        said = self._ctl("bootout", f"{domain}/{LABEL}")
        waited_s = 0.0
        while self._loaded(domain):
            if not said.ok and said.code not in PASSING:
                self._checked(said)
            if waited_s >= GONE_S:
                raise ServiceError(f"launchd did not stop the service within {GONE_S:g} s; try again.")
            self._pause(PAUSE_S)
            waited_s += PAUSE_S
            if not said.ok:
                said = self._ctl("bootout", f"{domain}/{LABEL}")

    def _checked(self, said: Said) -> None:
        if not said.ok:
            raise ServiceError(f"launchctl refused ({said.code}): {said.words}")


def _found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1].strip() if match else None
