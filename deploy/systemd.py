"""A systemd user unit: started at login (or at boot, for a user that lingers), and again when it dies."""

from __future__ import annotations

import os
import re
from pathlib import Path

from stateroom.deploy.programs import Run, Said, run
from stateroom.deploy.service import OPEN_FILES, STOP_S, Service, ServiceError, Status, written

UNIT = "stateroom.service"
RESTART_S = 2
STARTS, STARTS_S = 5, 60  # more than so many in so long, and systemd gives up
# Of `daemon/exits.py`: trying again can't help. A test compares them.
PERMANENT = (64, 65, 69, 77)
NOT_HERE = "There is no systemd of this user here; start it with `stateroom serve`."


def unit(service: Service) -> str:
    """What systemd is told of a service."""
    environment = "\n".join(
        f"Environment={_quoted(f'{name}={value}')}" for name, value in service.environment.items()
    )
    return f"""\
[Unit]
Description=Stateroom: language-model sessions, resident
Documentation=file://{_plain(str(service.home))}
StartLimitIntervalSec={STARTS_S}
StartLimitBurst={STARTS}

[Service]
Type=exec
ExecStart={" ".join(map(_quoted, service.command))}
{environment}
WorkingDirectory={_plain(str(service.home))}
Restart=on-failure
RestartSec={RESTART_S}
RestartPreventExitStatus={" ".join(map(str, PERMANENT))}
KillMode=mixed
TimeoutStopSec={STOP_S}
LimitNOFILE={OPEN_FILES}
UMask=0077
NoNewPrivileges=true

[Install]
WantedBy=default.target
"""


def _quoted(word: str) -> str:
    """As one word of a unit file, taken as it is."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _plain(path: str) -> str:
    return path.replace("%", "%%")


class Systemd:
    """Args: `run`, `folder`: of tests."""

    def __init__(self, run: Run = run, folder: Path | None = None) -> None:
        self._run = run
        config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
        self.path = (folder or Path(config).expanduser() / "systemd" / "user") / UNIT

    # ------------------------------------------------------------ verbs

    def install(self, service: Service) -> Status:
        """In place of what was there; a running one is started anew only when what it is told has changed."""
        self._there()
        service.make_folders()
        changed = written(self.path, unit(service).encode())
        if changed:
            self._checked(self._ctl("daemon-reload"))
        self._checked(self._ctl("enable", UNIT))
        self._ctl("reset-failed", UNIT)
        self._checked(self._ctl("restart" if changed else "start", UNIT))
        return self.status()

    def uninstall(self) -> None:
        self._there()
        if self.path.exists():
            self._checked(self._ctl("disable", "--now", UNIT))
            self.path.unlink()
            self._checked(self._ctl("daemon-reload"))
            self._ctl("reset-failed", UNIT)

    def start(self) -> Status:
        self._installed()
        self._ctl("reset-failed", UNIT)
        self._checked(self._ctl("start", UNIT))
        return self.status()

    def stop(self) -> None:
        self._installed()
        self._checked(self._ctl("stop", UNIT))

    def restart(self) -> Status:
        self._installed()
        self._ctl("reset-failed", UNIT)
        self._checked(self._ctl("restart", UNIT))
        return self.status()

    def status(self) -> Status:
        told = self._ctl("show", UNIT, "--property=ActiveState,MainPID,Result,ExecMainStatus")
        if not told.ok:
            return Status(self.path.exists(), False, where=str(self.path), note=NOT_HERE)
        facts = dict(re.findall(r"^(\w+)=(.*)$", told.out, re.MULTILINE))
        pid = int(facts.get("MainPID", "0") or 0)
        result = facts.get("Result", "success")
        last = None if result == "success" else f"{result} ({facts.get('ExecMainStatus', '?')})"
        running = facts.get("ActiveState") in ("active", "activating", "reloading") and pid > 0
        return Status(self.path.exists(), running, pid or None, last, str(self.path), self._note())

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

    def _note(self) -> str:
        said = self._run(["loginctl", "show-user", str(os.getuid()), "--property=Linger"])
        if said.ok and "Linger=no" in said.out:
            return "It runs while you are logged in; `loginctl enable-linger` keeps it beyond that."
        return ""

    def _checked(self, said: Said) -> None:
        if not said.ok:
            raise ServiceError(f"systemctl refused ({said.code}): {said.words}")
