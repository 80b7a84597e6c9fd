"""The user unit under systemd itself, from `install` to `uninstall`, with the real daemon; nothing is left.

B78 (what can't work isn't started again for ever), B85 (systemd listens, and starts it for its first client).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.deploy.user_manager import UserManager
from tests.tiny import write_tiny_model

from stateroom.client import connect
from stateroom.client.errors import ClientError
from stateroom.deploy.service import Service
from stateroom.deploy.systemd import SOCKET, STARTS, UNIT, Systemd

pytestmark = pytest.mark.system
ANSWER_S = 60.0
REMAINS = {"logs", "models", "run", "state", "keys"}  # of the home: it is the user's


@pytest.fixture(scope="module")
def manager() -> Iterator[UserManager]:
    folder = Path(tempfile.mkdtemp(prefix="sr-", dir="/tmp"))  # socket paths are limited
    made = UserManager(folder)
    groups = Path("/proc/self/cgroup").read_text()
    try:
        problem = made.start()
        if problem is not None:
            pytest.skip(problem)
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)
    assert Path("/proc/self/cgroup").read_text() == groups


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


class Life:
    """A service below a manager, and what was there before it."""

    def __init__(self, manager: UserManager, model: Path, folder: Path) -> None:
        self.manager, self.folder = manager, folder
        home = folder / "home"
        self.service = Service((f"--model={model}",), home, home / "run", folder, {})
        self.path = home / "run" / "stateroom.sock"
        self.systemd = Systemd()
        self.before = self.tree()

    def tree(self) -> set[Path]:
        return {path for root in (self.manager.config, self.folder) for path in root.rglob("*")}

    def answers(self) -> bool:
        try:
            with connect(endpoint=f"ipc://{self.path}", app="test") as room:
                return room.hello().server == "stateroom"
        except ClientError:
            return False

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if str(self.service.home) in _words(process)]

    def count(self, what: str) -> int:
        asked = ["systemctl", "--user", "show", UNIT, f"--property={what}", "--value"]
        return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)

    def gone(self) -> None:
        """Nothing but what is the user's."""
        assert self.processes() == []
        home = self.service.home
        left = {path for path in self.tree() - self.before if path != home and home not in path.parents}
        assert left == set()
        assert {path.name for path in home.iterdir()} <= REMAINS
        assert [path.name for path in (home / "run").iterdir()] in (["stateroom.lock"], [])
        assert not any(stat.S_ISSOCK(path.lstat().st_mode) for path in home.rglob("*"))
        listed = subprocess.run(
            ["systemctl", "--user", "list-units", "--all", "--plain", "stateroom*"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "0 loaded units" in listed.stdout
        found = self.systemd.status()
        assert (found.installed, found.running, found.listening) == (False, False, False)


@pytest.fixture
def life(
    manager: UserManager, model: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Life]:
    for name, value in manager.env.items():
        monkeypatch.setenv(name, value)
    made = Life(manager, model, short_folder)
    yield made
    made.systemd.uninstall()


def until(so: Callable[[], bool]) -> None:
    end = time.monotonic() + ANSWER_S
    while not so():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


def _words(process: psutil.Process) -> str:
    try:
        return " ".join([*process.cmdline(), *process.environ().values()])
    except psutil.Error:
        return ""


def test_the_whole_life(life: Life) -> None:
    """Install, kill, upgrade, uninstall: it is there, it comes back, it is anew, it is gone."""
    systemd = life.systemd
    first = systemd.install(life.service)
    assert (first.installed, first.running, first.listening) == (True, True, False)
    until(life.answers)
    assert first.pid is not None
    assert systemd.install(life.service).pid == first.pid  # again changes nothing
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: systemd.status().pid not in (None, first.pid))
    until(life.answers)
    second = systemd.status().pid
    upgraded = replace(life.service, arguments=(*life.service.arguments, "--rows-max=4"))
    third = systemd.install(upgraded).pid
    assert third not in (None, second)
    until(life.answers)
    systemd.stop()
    assert not systemd.status().running
    assert systemd.start().running
    until(life.answers)
    systemd.uninstall()
    systemd.uninstall()
    life.gone()
    assert (life.service.home / "logs" / "stateroom.log").exists()
    assert life.service.log.read_text() == ""  # what the daemon has a log for isn't said twice


def test_systemd_listens_and_starts_it_for_its_first_client(life: Life) -> None:
    """B85: there and back again, by installing it anew."""
    systemd = life.systemd
    plainly = replace(life.service, arguments=())
    activated = replace(plainly, socket=life.path)
    found = systemd.install(activated)
    assert (found.installed, found.running, found.listening) == (True, False, True)
    assert stat.S_IMODE(life.path.stat().st_mode) == 0o600
    assert life.answers()
    first = systemd.status()
    assert (first.running, first.listening) == (True, True)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: systemd.status().pid != first.pid and life.answers())
    systemd.stop()
    assert not life.path.exists()
    assert systemd.start().running
    assert life.answers()

    plain = systemd.install(plainly)
    assert (plain.running, plain.listening) == (True, False)
    assert not (systemd.folder / SOCKET).exists()
    until(life.answers)
    back = systemd.install(activated)
    assert (back.running, back.listening) == (False, True)
    assert life.answers()
    systemd.uninstall()
    life.gone()


def test_what_cannot_work_is_not_tried_for_ever(life: Life) -> None:
    """B78: nor with a client that goes on asking."""
    hopeless = replace(life.service, arguments=("--model=/nowhere/at/all",))
    life.systemd.install(hopeless)
    until(lambda: "exit-code (64)" in str(life.systemd.status().last_exit))
    assert life.count("NRestarts") == 0
    assert "There is no model at /nowhere/at/all" in life.service.log.read_text()
    life.systemd.install(replace(hopeless, socket=life.path))
    lines = len(life.service.log.read_text().splitlines())
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(life.path))
        until(lambda: not life.systemd.status().listening)
    assert len(life.service.log.read_text().splitlines()) <= lines + STARTS
    life.systemd.uninstall()
    life.gone()
