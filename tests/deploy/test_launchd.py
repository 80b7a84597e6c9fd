"""The LaunchAgent: what launchd is told, and all of its life with a stand-in that runs the real daemon.

B78 (what can't work isn't started again for ever), B79 (time to stop), B80 (an empty environment, `/`), B82
(no desktop session).
"""

from __future__ import annotations

import json
import os
import plistlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.tiny import write_tiny_model

from stateroom.client import connect
from stateroom.client.errors import ClientError
from stateroom.daemon.config import Patience
from stateroom.daemon.exits import CONFIG
from stateroom.deploy.launchd import BUSY, LABEL, NO_DOMAIN, NO_SCREEN, TRIES, Launchd, plist
from stateroom.deploy.programs import Said, run
from stateroom.deploy.service import PATH, STOP_S, Service, ServiceError

ANSWER_S = 60.0
UID = 501
FAKE = Path(__file__).parent / "fake_launchctl.py"
KEYS = {  # of launchd.plist(5), with the type of each
    "Label": str,
    "ProgramArguments": list,
    "EnvironmentVariables": dict,
    "WorkingDirectory": str,
    "RunAtLoad": bool,
    "KeepAlive": dict,
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "SoftResourceLimits": dict,
    "Umask": int,
    "StandardOutPath": str,
    "StandardErrorPath": str,
    "LimitLoadToSessionType": list,
}


class Mac:
    """A home, and launchd's stand-in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "launchd"
        self.agents = folder / "LaunchAgents"
        (self.folder / "agents").mkdir(parents=True)
        self.domains(f"gui/{UID}", f"user/{UID}")
        self.pauses = 0

    def domains(self, *names: str) -> None:
        (self.folder / "domains").write_text(" ".join(names))

    def fail(self, *failures: tuple[str, int]) -> None:
        (self.folder / "failures.json").write_text(json.dumps(failures))

    @property
    def transcript(self) -> list[str]:
        file = self.folder / "transcript"
        return file.read_text().splitlines() if file.exists() else []

    def launchd(self) -> Launchd:
        os.environ["FAKE_LAUNCHD"] = str(self.folder)

        def program(command: Any) -> Said:
            assert command[0] == "launchctl"
            return run([sys.executable, str(FAKE), *command[1:]])

        return Launchd(program, self._pause, UID, self.agents)

    def _pause(self, seconds: float) -> None:
        self.pauses += 1
        time.sleep(seconds / 10)

    def end(self) -> None:
        for file in (self.folder / "agents").glob("*/state.json"):
            state = json.loads(file.read_text())
            for pid in (state["own"], state["pid"]):
                if pid and psutil.pid_exists(pid):
                    for process in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):
                        process.kill()


@pytest.fixture
def mac(tmp_path: Path) -> Iterator[Mac]:
    made = Mac(tmp_path)
    yield made
    made.end()
    os.environ.pop("FAKE_LAUNCHD", None)


@pytest.fixture
def service(short_folder: Path) -> Service:
    """Of something that stays and does nothing, until a test wants the daemon."""
    return Sleeper(
        home=short_folder / "home", runtime=short_folder / "run", user_home=short_folder, inherited={}
    )


class Sleeper(Service):
    @property
    def command(self) -> list[str]:
        return [self.python, "-c", "import time; time.sleep(60)", *self.arguments]


def until(so: Callable[[], bool], seconds: float = ANSWER_S) -> None:
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


# ---------------------------------------------------------------- what launchd is told


def test_the_plist_is_one(service: Service) -> None:
    made = plist(service)
    assert plistlib.loads(plistlib.dumps(made)) == made
    assert {key: type(value) for key, value in made.items()} == KEYS
    assert made["ProcessType"] != "Background"
    assert made["KeepAlive"] == {"SuccessfulExit": False}


def test_nothing_is_left_to_launchd_to_find(short_folder: Path) -> None:
    """B80: absolute paths, no `~`, no variable to expand, its own PATH."""
    made = plist(Service(("--model=/m/x",), short_folder / "h", short_folder / "r", short_folder, {}))
    paths = [made["ProgramArguments"][0], made["WorkingDirectory"], made["StandardErrorPath"]]
    paths += [
        made["EnvironmentVariables"][name] for name in ("HOME", "STATEROOM_HOME", "STATEROOM_RUNTIME_DIR")
    ]
    assert all(Path(path).is_absolute() for path in paths)
    words = [*made["ProgramArguments"], *made["EnvironmentVariables"].values(), *paths]
    assert not any("~" in word or "$" in word for word in words)
    assert made["EnvironmentVariables"]["PATH"] == PATH


def test_it_has_time_to_stop() -> None:
    """B79: more than the daemon takes at the most."""
    patience = Patience()
    assert patience.finals_s + patience.leave_s + patience.kill_s < STOP_S


# ---------------------------------------------------------------- verbs


def test_install_twice_changes_nothing(mac: Mac, service: Service) -> None:
    launchd = mac.launchd()
    first = launchd.install(service)
    assert (first.installed, first.running) == (True, True)
    again = launchd.install(service)
    assert again.pid == first.pid
    assert sum(line.startswith("bootstrap") for line in mac.transcript) == 1


def test_an_upgrade_takes_the_place_of_the_old_one(mac: Mac, service: Service) -> None:
    launchd = mac.launchd()
    first = launchd.install(service)
    newer = Sleeper(("--new",), service.home, service.runtime, service.user_home, {})
    second = launchd.install(newer)
    assert second.running
    assert second.pid != first.pid
    assert first.pid is not None
    assert not psutil.pid_exists(first.pid)
    assert second.pid is not None
    assert "--new" in psutil.Process(second.pid).cmdline()


def test_uninstall_leaves_nothing_and_may_be_repeated(mac: Mac, service: Service) -> None:
    launchd = mac.launchd()
    pid = launchd.install(service).pid
    launchd.uninstall()
    launchd.uninstall()
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert list(mac.agents.iterdir()) == []
    assert list((mac.folder / "agents").iterdir()) == []
    found = launchd.status()
    assert (found.installed, found.running, found.pid) == (False, False, None)


def test_start_stop_restart(mac: Mac, service: Service) -> None:
    launchd = mac.launchd()
    with pytest.raises(ServiceError, match="service install"):
        launchd.start()
    first = launchd.install(service).pid
    assert launchd.start().pid == first
    launchd.restart()
    until(lambda: launchd.status().pid not in (None, first))
    launchd.stop()
    stopped = launchd.status()
    assert (stopped.installed, stopped.running) == (True, False)
    assert launchd.start().running


# ---------------------------------------------------------------- what launchctl complains of


@pytest.mark.parametrize("code", BUSY)
def test_what_is_not_gone_yet_is_waited_for(mac: Mac, service: Service, code: int) -> None:
    mac.fail(("bootstrap", code), ("bootstrap", code))
    assert mac.launchd().install(service).running
    assert mac.pauses >= 2


def test_but_not_for_ever(mac: Mac, service: Service) -> None:
    mac.fail(*[("bootstrap", 5)] * (TRIES + 1))
    with pytest.raises(ServiceError, match=r"launchctl refused \(5\)"):
        mac.launchd().install(service)


def test_without_a_desktop_it_lives_in_the_background(mac: Mac, service: Service) -> None:
    """B82: over ssh."""
    mac.domains(f"user/{UID}")
    launchd = mac.launchd()
    found = launchd.install(service)
    assert found.running
    assert found.note == NO_SCREEN
    assert launchd.install(service).pid == found.pid
    launchd.uninstall()
    assert not launchd.status().running


@pytest.mark.parametrize("code", NO_DOMAIN)
def test_a_desktop_that_takes_no_agents(mac: Mac, service: Service, code: int) -> None:
    mac.fail(("bootstrap", code))
    found = mac.launchd().install(service)
    assert found.running
    assert found.note == NO_SCREEN


def test_other_codes_are_told(mac: Mac, service: Service) -> None:
    mac.fail(("bootstrap", 133))
    with pytest.raises(ServiceError, match=r"launchctl refused \(133\): bootstrap failed"):
        mac.launchd().install(service)


# ---------------------------------------------------------------- the real daemon


@pytest.mark.system
def test_the_whole_life(mac: Mac, short_folder: Path, tmp_path: Path) -> None:
    """Install, kill, upgrade, uninstall: it is there, it comes back, it is anew, it is gone."""
    model = write_tiny_model(tmp_path / "tiny")
    home, runtime = short_folder / "home", short_folder / "run"
    service = Service((f"--model={model}",), home, runtime, short_folder, {})
    launchd = mac.launchd()
    endpoint = f"ipc://{runtime}/stateroom.sock"

    def answers() -> bool:
        try:
            with connect(endpoint=endpoint, app="test") as room:
                return bool(room.hello().models)
        except ClientError:
            return False

    first = launchd.install(service).pid
    until(answers)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: launchd.status().pid not in (None, first))
    until(answers)
    second = launchd.status().pid
    upgraded = Service((f"--model={model}", "--rows-max=4"), home, runtime, short_folder, {})
    third = launchd.install(upgraded).pid
    assert third not in (None, second)
    until(answers)
    launchd.uninstall()
    assert not answers()
    assert not any(
        "stateroom" in word for p in psutil.process_iter() for word in _words(p) if str(home) in word
    )
    assert list(mac.agents.iterdir()) == []


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.system
def test_what_cannot_work_is_not_tried_for_ever(mac: Mac, short_folder: Path) -> None:
    """B78: a model that isn't there. It leaves with 0, and the log tells why."""
    home = short_folder / "home"
    service = Service(("--model=/nowhere/at/all",), home, short_folder / "run", short_folder, {})
    launchd = mac.launchd()
    launchd.install(service)
    until(lambda: launchd.status().last_exit == "0")
    time.sleep(1.0)
    (state,) = (mac.folder / "agents").glob("*/state.json")
    assert json.loads(state.read_text())["starts"] == 1
    assert "There is no model at /nowhere/at/all" in service.log.read_text()
    assert CONFIG != 0  # and without launchd that is its code
    assert LABEL in state.parent.name
