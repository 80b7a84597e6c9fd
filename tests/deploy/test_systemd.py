"""The user unit: what systemd itself says of it, and the verbs, with a `systemctl` that records them."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from stateroom.daemon.exits import PERMANENT
from stateroom.deploy import systemd
from stateroom.deploy.programs import Said
from stateroom.deploy.service import STOP_S, Service, ServiceError, manager
from stateroom.deploy.systemd import UNIT, Systemd, unit


class Systemctl:
    """One unit, as systemd keeps it: whether it is enabled and runs, and a new process for each start."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.there = True
        self.enabled = False
        self.pid = 0
        self.starts = 0
        self.refuses: str | None = None

    def __call__(self, command: Sequence[str]) -> Said:
        if command[0] == "loginctl":
            return Said(0, "Linger=no\n", "")
        assert command[:2] == ["systemctl", "--user"]
        verb, *arguments = command[2:]
        self.calls.append(" ".join([verb, *arguments]))
        if not self.there:
            return Said(1, "", "Failed to connect to bus: No such file or directory")
        if verb == self.refuses:
            return Said(1, "", "Unit is masked.")
        if verb == "show" and arguments[0] == UNIT:
            state = "active" if self.pid else "inactive"
            return Said(0, f"ActiveState={state}\nMainPID={self.pid}\nResult=success\nExecMainStatus=0\n", "")
        if verb in ("restart", "start") and not (verb == "start" and self.pid):
            self.starts += 1
            self.pid = 100 + self.starts
        if verb == "stop" or "--now" in arguments:
            self.pid = 0
        if verb in ("enable", "disable"):
            self.enabled = verb == "enable"
        return Said(0, "", "")


@pytest.fixture
def service(short_folder: Path) -> Service:
    return Service(("--model=/m/my model",), short_folder / "home", short_folder / "run", short_folder, {})


def parsed(text: str) -> configparser.ConfigParser:
    # Names may be repeated in a unit file; the last one is enough here.
    made = configparser.ConfigParser(strict=False, interpolation=None)
    made.optionxform = str  # type: ignore[assignment,method-assign]
    made.read_string(text)
    return made


def test_systemd_itself_takes_the_unit(service: Service, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    file = tmp_path / UNIT
    file.write_text(unit(service))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--recursive-errors=no", str(file)],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
        timeout=60,
    )
    ours = [line for line in done.stderr.splitlines() if UNIT in line]
    assert (done.returncode, ours) == (0, []), done.stderr


def test_a_broken_unit_would_be_noticed(service: Service, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    file = tmp_path / UNIT
    file.write_text(unit(service).replace("ExecStart=", "ExecStrat="))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--recursive-errors=no", str(file)],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
        timeout=60,
    )
    assert done.returncode != 0 or "ExecStrat" in done.stderr


def test_what_the_unit_says(service: Service) -> None:
    told = parsed(unit(service))["Service"]
    assert told["Restart"] == "on-failure"
    assert told["RestartPreventExitStatus"].split() == [str(code) for code in PERMANENT]
    assert int(told["TimeoutStopSec"]) == STOP_S
    assert told["ExecStart"].endswith('"--model=/m/my model"')
    for name in service.environment:
        assert f'Environment="{name}=' in unit(service)


@pytest.mark.parametrize("odd", ['a "b"', "50%", "$HOME", "back\\slash", "two words", "it's"])
def test_words_are_taken_as_they_are(service: Service, odd: str) -> None:
    """As systemd reads a unit file: quotes and backslashes, then its `%` and `$`."""
    made = unit(Service((odd,), service.home, service.runtime, service.user_home, {}))
    line = re.search(r"^ExecStart=(.*)$", made, re.MULTILINE)
    assert line is not None
    words = re.findall(r'"((?:[^"\\]|\\.)*)"', line[1])
    last = re.sub(r"\\(.)", r"\1", words[-1]).replace("%%", "%").replace("$$", "$")
    assert last == odd


def test_install_twice_changes_nothing(service: Service, tmp_path: Path) -> None:
    systemctl = Systemctl()
    made = Systemd(systemctl, tmp_path)
    first = made.install(service)
    assert (first.installed, first.running, systemctl.enabled) == (True, True, True)
    assert made.install(service).pid == first.pid
    assert systemctl.calls.count("daemon-reload") == 1


def test_an_upgrade_starts_it_anew(service: Service, tmp_path: Path) -> None:
    systemctl = Systemctl()
    made = Systemd(systemctl, tmp_path)
    first = made.install(service)
    newer = Service(("--rows-max=4",), service.home, service.runtime, service.user_home, {})
    assert made.install(newer).pid != first.pid
    assert "--rows-max=4" in made.path.read_text()


def test_uninstall_leaves_nothing_and_may_be_repeated(service: Service, tmp_path: Path) -> None:
    systemctl = Systemctl()
    made = Systemd(systemctl, tmp_path)
    made.install(service)
    made.uninstall()
    made.uninstall()
    assert (systemctl.pid, systemctl.enabled, list(tmp_path.iterdir())) == (0, False, [])
    assert not made.status().installed


def test_start_stop_restart(service: Service, tmp_path: Path) -> None:
    systemctl = Systemctl()
    made = Systemd(systemctl, tmp_path)
    for verb in (made.start, made.stop, made.restart):
        with pytest.raises(ServiceError, match="service install"):
            verb()
    first = made.install(service).pid
    assert made.start().pid == first
    made.stop()
    assert not made.status().running
    assert made.start().running
    assert made.restart().pid != first


def test_without_systemd_it_says_so(service: Service, tmp_path: Path) -> None:
    systemctl = Systemctl()
    systemctl.there = False
    made = Systemd(systemctl, tmp_path)
    with pytest.raises(ServiceError, match="no systemd of this user"):
        made.install(service)
    assert list(tmp_path.iterdir()) == []
    assert made.status().note == systemd.NOT_HERE


def test_what_systemctl_refuses_is_told(service: Service, tmp_path: Path) -> None:
    systemctl = Systemctl()
    systemctl.refuses = "restart"
    with pytest.raises(ServiceError, match="masked"):
        Systemd(systemctl, tmp_path).install(service)


def test_codes_that_are_for_good() -> None:
    assert systemd.PERMANENT == PERMANENT


def test_this_machine_has_a_manager() -> None:
    assert manager().status().where.endswith((".service", ".plist"))
