"""The user unit: what systemd itself says of it, and the verbs, with a `systemctl` that records them."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from stateroom.daemon.exits import PERMANENT
from stateroom.deploy import systemd
from stateroom.deploy.programs import Said
from stateroom.deploy.service import STOP_S, Service, ServiceError, User, manager
from stateroom.deploy.systemd import SOCKET, UNIT, Systemd, socket_unit, unit


class Systemctl:
    """One unit, as systemd keeps it: whether it is enabled and runs, and a new process for each start."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.there = True
        self.enabled = False
        self.pid = 0
        self.starts = 0
        self.refuses: str | None = None
        self.linger = "Linger=no\n"

    def __call__(self, command: Sequence[str]) -> Said:
        if command[0] == "loginctl":
            return Said(0, self.linger, "")
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


@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize("user", [None, User("root", 0, Path("/root"))])
def test_systemd_itself_takes_the_units(
    service: Service, tmp_path: Path, activated: bool, user: User | None
) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    if activated:
        service = replace(service, socket=service.runtime / "stateroom.sock")
    files = Systemd(folder=tmp_path).files(service, user)
    assert {path.name for path in files} == ({UNIT, SOCKET} if activated else {UNIT})
    for path, text in files.items():
        (tmp_path / path.name).write_text(text)
    done = subprocess.run(
        [
            "systemd-analyze",
            "verify",
            "--user" if user is None else "--system",
            "--recursive-errors=no",
            *(str(tmp_path / path.name) for path in files),
        ],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
        timeout=60,
    )
    ours = [line for line in done.stderr.splitlines() if "stateroom" in line]
    assert (done.returncode, ours) == (0, []), done.stderr


def test_a_unit_that_is_activated_is_started_by_its_socket_alone(service: Service) -> None:
    activated = replace(service, socket=service.runtime / "stateroom.sock")
    told, socket = parsed(unit(activated)), parsed(socket_unit(activated))
    assert told["Unit"]["Requires"] == told["Unit"]["After"] == SOCKET
    assert "Install" not in told
    assert "--activated" in told["Service"]["ExecStart"]
    assert f"--endpoint=ipc://{activated.socket}" in told["Service"]["ExecStart"]
    assert socket["Socket"]["ListenStream"] == str(activated.socket)
    assert socket["Socket"]["SocketMode"] == "0600"
    assert socket["Install"]["WantedBy"] == "sockets.target"


def test_a_unit_of_the_machine_runs_as_its_user(service: Service) -> None:
    user = User("ann", 1001, Path("/home/ann"))
    told = parsed(unit(service, user))
    assert told["Service"]["User"] == "ann"
    assert told["Install"]["WantedBy"] == "multi-user.target"
    activated = replace(service, socket=service.runtime / "stateroom.sock")
    assert parsed(socket_unit(activated, user))["Socket"]["SocketUser"] == "ann"
    assert "User=" not in unit(service) + socket_unit(activated)


def test_there_and_back_again(service: Service, tmp_path: Path) -> None:
    """What systemd is told, in order; `test_systemd_lives.py` has it done where a manager can run."""
    systemctl = Systemctl()
    made = Systemd(systemctl, tmp_path)
    made.install(service)
    systemctl.calls.clear()
    made.install(replace(service, socket=service.runtime / "stateroom.sock"))
    assert [call for call in systemctl.calls if not call.startswith(("show", "is-active", "reset"))] == [
        f"disable --now {UNIT}",
        "daemon-reload",
        "daemon-reload",
        f"enable {SOCKET}",
        f"stop {UNIT}",
        f"restart {SOCKET}",
    ]
    systemctl.calls.clear()
    made.install(service)
    assert [call for call in systemctl.calls if not call.startswith(("show", "is-active", "reset"))] == [
        f"disable --now {SOCKET} {UNIT}",
        "daemon-reload",
        "daemon-reload",
        f"enable {UNIT}",
        f"restart {UNIT}",
    ]
    assert [path.name for path in tmp_path.iterdir()] == [UNIT]


@pytest.mark.parametrize(("told", "says"), [("Linger=no\n", "enable-linger"), ("Linger=yes\n", "")])
def test_a_user_who_does_not_linger_is_told(service: Service, tmp_path: Path, told: str, says: str) -> None:
    systemctl = Systemctl()
    systemctl.linger = told
    note = Systemd(systemctl, tmp_path).install(service).note
    assert (says in note, bool(note)) == (True, bool(says))


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


@pytest.mark.parametrize("odd", ['a "b"', "50%", "$HOME", "back\\slash", "two words"])
def test_places_are_taken_as_they_are(service: Service, odd: str) -> None:
    """Nothing is put in for a `$` in the environment, so it isn't written twice there."""
    made = unit(replace(service, home=service.home / odd))
    line = re.search(r'^Environment="STATEROOM_HOME=(.*)"$', made, re.MULTILINE)
    assert line is not None
    assert re.sub(r"\\(.)", r"\1", line[1]).replace("%%", "%") == str(service.home / odd)


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


@pytest.mark.parametrize("activated", [False, True])
def test_an_upgrade_that_was_ended_half_way_is_done_when_it_is_asked_for_again(
    service: Service, tmp_path: Path, activated: bool
) -> None:
    """Wherever it was killed: else what ran before would run on, under files that say something else."""
    if activated:
        service = replace(service, socket=service.runtime / "stateroom.sock")
    upgraded = replace(service, arguments=("--model=/m/other",))
    for at in range(1, 100):
        control, folder = Systemctl(), tmp_path / str(at)
        Systemd(control, folder).install(service)
        done = 0

        def killed(command: Sequence[str], control: Systemctl = control, at: int = at) -> Said:
            nonlocal done
            done += 1
            if done == at:
                raise KeyboardInterrupt
            return control(command)

        try:
            Systemd(killed, folder).install(upgraded)
        except KeyboardInterrupt:
            Systemd(control, folder).install(upgraded)
        else:
            break  # that was the last one
        last = len(control.calls) - control.calls[::-1].index("daemon-reload") - 1
        assert any(call.startswith("restart") for call in control.calls[last:])
        control.calls.clear()
        Systemd(control, folder).install(upgraded)
        assert not any(call.startswith(("restart", "daemon-reload")) for call in control.calls)
        Systemd(control, folder).uninstall()
        assert list(folder.iterdir()) == []
    assert at > 5
