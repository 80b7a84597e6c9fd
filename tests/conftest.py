"""Fixtures that several folders use: a real daemon in a process of its own, and the demo model."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

settings.register_profile("stateroom", deadline=None)  # no test is timed
settings.load_profile("stateroom")

START_S = 60.0  # a CPU worker imports mlx and loads a tiny model in about 3 s on an idle machine
STOP_S = 10.0  # the daemon promises to leave within 5
LOG_LINES_SHOWN = 200
MEASURED = "measured"
# Real processes are many and want both cores: these run one after the other, beside everything else.
ALONE = ("system/", "deploy/", "packaging/")


def _together(nodeid: str) -> str:
    """What runs in one process, in order: the tests of a file; all those of real processes."""
    part = nodeid.partition("::")[0].removeprefix("tests/")
    return ALONE[0] if part.startswith(ALONE) else part


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest goes first."""
    items.sort(key=lambda item: _together(item.nodeid) != ALONE[0])


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, with `-n`
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _together(nodeid)

    return Together(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [each for name in ("passed", "failed") for each in terminalreporter.getreports(name)]
    told = [said for report in reports for name, said in report.user_properties if name == MEASURED]
    if told:
        terminalreporter.section(MEASURED)
        terminalreporter.write("\n".join(told) + "\n")


@dataclass
class RunningDaemon:
    """A daemon of a test's own. `env` is what a client process or the command line needs to find it."""

    endpoint: str
    process: subprocess.Popen[bytes]
    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> Path:
        return self.folder / "daemon.log"

    def workers(self) -> list[int]:
        """The pids below the daemon: its engine workers and what they started."""
        try:
            return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def wait_until_answering(self, timeout_s: float = START_S) -> None:
        from stateroom.client import connect
        from stateroom.client.errors import ClientError

        deadline = time.monotonic() + timeout_s
        while True:
            if self.process.poll() is not None:
                raise AssertionError(f"The daemon left with {self.process.returncode}.\n{self.log_tail()}")
            try:
                with connect(endpoint=self.endpoint, app="fixture") as room:
                    room.hello()
                return
            except (ClientError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise AssertionError(f"No hello in {timeout_s} s: {error}\n{self.log_tail()}") from error
                time.sleep(0.1)

    def log_tail(self) -> str:
        if not self.log.exists():
            return "(no log)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])

    def stop(self) -> int:
        """SIGTERM, then SIGKILL for whatever of its processes is left. Gives the daemon's exit code."""
        below = self.workers()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        for pid in below:
            try:
                child = psutil.Process(pid)
                child.wait(2.0)
            except psutil.TimeoutExpired:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        return code


StartDaemon = Callable[..., RunningDaemon]


def _start(
    started: list[RunningDaemon], *arguments: str | Path, model: str | Path | None = None
) -> RunningDaemon:
    """Starts `stateroom serve` in a short folder of its own (socket paths are limited) and waits for it."""
    folder = Path(tempfile.mkdtemp(prefix="sr-", dir="/tmp"))
    runtime, home = folder / "run", folder / "home"
    own = {
        "HOME": str(home),
        "STATEROOM_RUNTIME_DIR": str(runtime),
        "STATEROOM_HOME": str(home / ".stateroom"),
    }
    home.mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("STATEROOM_")}
    env = inherited | own
    command = [sys.executable, "-m", "stateroom.daemon.cli", "serve", "--log", "json"]
    if model is not None:
        command += ["--model", str(model)]
    command += [str(argument) for argument in arguments]
    with open(folder / "daemon.log", "wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    daemon = RunningDaemon(f"ipc://{runtime}/stateroom.sock", process, folder, env)
    started.append(daemon)
    daemon.wait_until_answering()
    return daemon


def _stop_all(started: list[RunningDaemon]) -> None:
    for daemon in started:
        daemon.stop()
        # pytest shows this only when the test failed.
        sys.stdout.write(f"--- log of daemon {daemon.pid}\n{daemon.log_tail()}\n")
        shutil.rmtree(daemon.folder, ignore_errors=True)


@pytest.fixture
def start_daemon() -> Iterator[StartDaemon]:
    """Starts daemons: `start_daemon(model=folder)`, with more arguments of `serve` as they are."""
    started: list[RunningDaemon] = []
    yield lambda *arguments, **options: _start(started, *arguments, **options)
    _stop_all(started)


@pytest.fixture(scope="module")
def start_shared_daemon() -> Iterator[StartDaemon]:
    """As `start_daemon`, for daemons that all tests of a file share."""
    started: list[RunningDaemon] = []
    yield lambda *arguments, **options: _start(started, *arguments, **options)
    _stop_all(started)
