"""A systemd user unit: started at login (or at boot, for a user that lingers), and again when it dies."""

from __future__ import annotations

import os
import re
from pathlib import Path

from stateroom.deploy.programs import Run, Said, run
from stateroom.deploy.service import OPEN_FILES, STOP_S, Service, ServiceError, Status, User, written

UNIT, SOCKET = "stateroom.service", "stateroom.socket"
SYSTEM = Path("/etc/systemd/system")
RESTART_S = 2
BACKLOG = 512  # clients that wait while it starts
STARTS, STARTS_S = 5, 60  # more than so many in so long, and systemd gives up
# Of `daemon/exits.py`: trying again can't help. A test compares them.
PERMANENT = (2, 64, 65, 69, 77)
NOT_HERE = "There is no systemd of this user here; start it with `stateroom serve`."


def unit(service: Service, user: User | None = None) -> str:
    """What systemd is told of a service; of one that starts with the machine, as `user`."""
    sections = {
        "Unit": [
            "Description=Stateroom: language-model sessions, resident",
            f"Documentation=file://{_plain(str(service.home))}",
            f"StartLimitIntervalSec={STARTS_S}",
            f"StartLimitBurst={STARTS}",
            *([] if service.socket is None else [f"Requires={SOCKET}", f"After={SOCKET}"]),
        ],
        "Service": [
            "Type=exec",
            *([] if user is None else [f"User={user.name}"]),
            f"ExecStart={' '.join(_quoted(word).replace('$', '$$') for word in service.command)}",
            *(f"Environment={_quoted(f'{name}={value}')}" for name, value in _environment(service).items()),
            f"WorkingDirectory={_plain(str(service.home))}",
            f"StandardOutput=append:{_plain(str(service.log))}",
            f"StandardError=append:{_plain(str(service.log))}",
            "Restart=on-failure",
            f"RestartSec={RESTART_S}",
            f"RestartPreventExitStatus={' '.join(map(str, PERMANENT))}",
            "KillMode=mixed",
            f"TimeoutStopSec={STOP_S}",
            f"LimitNOFILE={OPEN_FILES}",
            "UMask=0077",
            "NoNewPrivileges=true",
        ],
    }
    if service.socket is None:  # else its socket is what is started
        sections["Install"] = [f"WantedBy={'default.target' if user is None else 'multi-user.target'}"]
    return _text(sections)


def socket_unit(service: Service, user: User | None = None) -> str:
    """What systemd is told of the socket where it listens for a service."""
    return _text(
        {
            "Unit": ["Description=Stateroom: where its clients connect"],
            "Socket": [
                f"ListenStream={_plain(str(service.socket))}",
                *([] if user is None else [f"SocketUser={user.name}"]),
                "SocketMode=0600",
                "DirectoryMode=0700",
                f"Backlog={BACKLOG}",
                "RemoveOnStop=yes",
            ],
            "Install": ["WantedBy=sockets.target"],
        }
    )


def _environment(service: Service) -> dict[str, str]:
    return {**service.environment, "STATEROOM_SERVICE": "systemd"}


def _text(sections: dict[str, list[str]]) -> str:
    return "\n".join("\n".join([f"[{name}]", *lines, ""]) for name, lines in sections.items())


def _quoted(word: str) -> str:
    """As one word of a unit file, taken as it is but for `$`, which means something in commands alone."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _plain(path: str) -> str:
    return path.replace("%", "%%")


class Systemd:
    """Args: `run`, `folder`: of tests."""

    def __init__(self, run: Run = run, folder: Path | None = None) -> None:
        self._run = run
        config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
        self.folder = folder or Path(config).expanduser() / "systemd" / "user"
        self.path, self.socket_path = self.folder / UNIT, self.folder / SOCKET
        # Made before a file is changed, and gone once systemd has been told: see `install`.
        self._unfinished = self.folder / f".{UNIT}.unfinished"

    def files(self, service: Service, user: User | None = None) -> dict[Path, str]:
        folder = self.folder if user is None else SYSTEM
        made = {folder / UNIT: unit(service, user)}
        if service.socket is not None:
            made[folder / SOCKET] = socket_unit(service, user)
        return made

    # ------------------------------------------------------------ verbs

    def install(self, service: Service) -> Status:
        """In place of what was there; a running one is started anew only when what it is told has changed."""
        self._there()
        service.make_folders()
        if self.path.exists() and self._activated != (service.socket is not None):
            self._take_out()
        # What was refused, or ended, half way is done when it is asked for again.
        changed = self._unfinished.exists() or self._differs(service)
        if changed:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._unfinished.touch()
            for path, text in self.files(service).items():
                written(path, text.encode())
            self._checked(self._ctl("daemon-reload"))
        first = SOCKET if self._activated else UNIT
        self._checked(self._ctl("enable", first))
        self._ctl("reset-failed", *self._units)
        if changed and self._activated:
            self._checked(self._ctl("stop", UNIT))  # it has the socket, which can't be made anew meanwhile
        self._checked(self._ctl("restart" if changed else "start", first))
        self._unfinished.unlink(missing_ok=True)
        return self.status()

    def uninstall(self) -> None:
        self._there()
        if self.path.exists():
            self._take_out()
        self._unfinished.unlink(missing_ok=True)

    def start(self) -> Status:
        self._installed()
        self._ctl("reset-failed", *self._units)
        self._checked(self._ctl("start", *self._units))
        return self.status()

    def stop(self) -> None:
        self._installed()
        self._checked(self._ctl("stop", *self._units))

    def restart(self) -> Status:
        self._installed()
        self._ctl("reset-failed", *self._units)
        self._checked(self._ctl("restart", UNIT))
        return self.status()

    def status(self) -> Status:
        told = self._ctl("show", UNIT, "--property=ActiveState,MainPID,Result,ExecMainStatus")
        if not told.ok:
            return Status(self.path.exists(), False, where=str(self.path), note=NOT_HERE)
        facts = dict(re.findall(r"^(\w+)=(.*)$", told.out, re.MULTILINE))
        pid = int(facts.get("MainPID", "0") or 0)
        result = facts.get("Result", "success")
        return Status(
            self.path.exists(),
            facts.get("ActiveState") in ("active", "activating", "reloading") and pid > 0,
            pid or None,
            None if result == "success" else f"{result} ({facts.get('ExecMainStatus', '?')})",
            str(self.path),
            self._note(),
            self._listening(),
        )

    # ------------------------------------------------------------ systemctl

    def _ctl(self, *arguments: str) -> Said:
        return self._run(["systemctl", "--user", *arguments])

    def _there(self) -> None:
        if not self._ctl("show", "--property=Version").ok:
            raise ServiceError(NOT_HERE)

    def _installed(self) -> None:
        self._there()
        if not self.path.exists():
            raise ServiceError("The service isn't installed: `stateroom service install` does that.")

    def _differs(self, service: Service) -> bool:
        files = self.files(service).items()
        return any(not path.exists() or path.read_bytes() != text.encode() for path, text in files)

    @property
    def _activated(self) -> bool:
        return self.socket_path.exists()

    @property
    def _units(self) -> list[str]:
        """The socket first: it may not start beside a service that runs without it."""
        return [SOCKET, UNIT] if self._activated else [UNIT]

    def _listening(self) -> bool:
        return self._activated and self._ctl("is-active", SOCKET).ok

    def _take_out(self) -> None:
        units = self._units
        self._checked(self._ctl("disable", "--now", *units))
        self.socket_path.unlink(missing_ok=True)
        self.path.unlink()  # last: while it is there, what was ended half way can be done again
        self._checked(self._ctl("daemon-reload"))
        self._ctl("reset-failed", *units)

    def _note(self) -> str:
        said = self._run(["loginctl", "show-user", str(os.getuid()), "--property=Linger"])
        if said.ok and "Linger=no" in said.out:
            return "It runs while you are logged in; `loginctl enable-linger` keeps it beyond that."
        return ""

    def _checked(self, said: Said) -> None:
        if not said.ok:
            raise ServiceError(f"systemctl refused ({said.code}): {said.words}")
