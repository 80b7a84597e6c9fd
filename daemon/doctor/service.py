"""The service of launchd or systemd: installed, running, and meant for the same places as this shell."""

from __future__ import annotations

import plistlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stateroom.client.paths import home_dir, runtime_dir
from stateroom.daemon.doctor.check import Check, noted, passed, problem
from stateroom.deploy.service import ServiceError, Status, manager

AGAIN = "stateroom service install (with the options that it had)"
SEE = "stateroom service logs"


@dataclass(frozen=True)
class Told:
    """What a manager was told to run, and with what environment."""

    command: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def models(self) -> list[str]:
        """Those that it is to load, as `serve` was given them."""
        return [word.partition("=")[2] for word in self.command if word.startswith("--model=")]


def service() -> Iterator[Check]:
    try:
        found = manager().status()
    except ServiceError as error:
        yield passed("service", f"not installed: {str(error).rstrip('.')}")
        return
    yield judged(found, told(Path(found.where)) if found.installed else Told())


def models() -> list[str]:
    """Those that an installed service is to load."""
    try:
        found = manager().status()
    except ServiceError:
        return []
    return told(Path(found.where)).models if found.installed else []


def waits_for_a_client() -> bool:
    """Whether the service manager listens, and so who connects would start a daemon."""
    try:
        found = manager().status()
    except ServiceError:
        return False
    return found.listening and not found.running


def judged(found: Status, asked: Told) -> Check:
    """What to think of it."""
    if not found.installed:
        return passed("service", "not installed; `stateroom service install` starts a daemon at each login")
    home, runtime = str(home_dir()), str(runtime_dir())
    for variable, here in (("STATEROOM_HOME", home), ("STATEROOM_RUNTIME_DIR", runtime)):
        there = asked.environment.get(variable, here)
        if there != here:
            return problem(
                "service",
                f"its {variable} is {there}, and here it is {here}",
                f"Set {variable} alike, or {AGAIN}",
            )
    if asked.command and not Path(asked.command[0]).exists():
        return problem("service", f"its Python, {asked.command[0]}, is gone", AGAIN)
    if not found.running and not found.listening:
        last = f"; its last exit: {found.last_exit}" if found.last_exit else ""
        return problem("service", f"installed, and not running{last}", f"{SEE}; then stateroom service start")
    state = f"process {found.pid}" if found.running else "its first client starts it"
    finding = f"{state}, {found.where}"
    return noted("service", finding, found.note) if found.note else passed("service", finding)


def told(path: Path) -> Told:
    """What a LaunchAgent's plist or a systemd unit of ours says; nothing where it can't be read."""
    try:
        content = path.read_bytes()
        if path.suffix == ".plist":
            agent = plistlib.loads(content)
            return Told(list(agent["ProgramArguments"]), dict(agent["EnvironmentVariables"]))
        return _unit(content.decode())
    except (OSError, ValueError, KeyError, plistlib.InvalidFileException):
        return Told()


def _unit(text: str) -> Told:
    command: list[str] = []
    environment: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key == "ExecStart":
            command = [word.replace("$$", "$") for word in _words(value)]
        elif key == "Environment":
            environment |= dict(word.partition("=")[::2] for word in _words(value))
    return Told(command, environment)


def _words(line: str) -> list[str]:
    """The quoted words of a unit's line, without what systemd takes off."""
    return [
        re.sub(r"\\(.)", r"\1", word).replace("%%", "%") for word in re.findall(r'"((?:[^"\\]|\\.)*)"', line)
    ]
