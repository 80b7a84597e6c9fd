"""`stateroom demo` as a user runs it, and how it ends when it is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.demo import FOLDER, demo_gguf

pytestmark = [pytest.mark.system, pytest.mark.model]

COMMAND = [sys.executable, "-m", "stateroom.daemon.cli", "demo"]
DEMO_S = 240.0  # about 30 s on two idle cores
LEAVE_S = 15.0


@pytest.fixture
def demo_env(tmp_path: Path) -> dict[str, str]:
    """Models from where the tests keep them; a HOME that the demo must not touch."""
    assert demo_gguf().is_relative_to(FOLDER)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("STATEROOM_")}
    return inherited | {"HOME": str(tmp_path), "STATEROOM_HOME": str(FOLDER.parent), "COLUMNS": "120"}


def test_the_demo_shows_reuse_and_leaves_nothing(demo_env: dict[str, str], tmp_path: Path) -> None:
    before, kept = {process.pid for process in psutil.process_iter()}, of_the_users_daemon()
    done = subprocess.run(COMMAND, env=demo_env, capture_output=True, text=True, timeout=DEMO_S)
    assert done.returncode == 0, done.stdout + done.stderr
    editor = [line for line in done.stdout.splitlines() if line.startswith("editor")]
    chat = [line for line in done.stdout.splitlines() if line.startswith("chat")]
    assert any("Paris" in line for line in chat)
    assert sum("receipt: reused" in line for line in editor) == 2
    assert sum("receipt: reused" in line for line in chat) == 2
    assert sum("suggestion" in line for line in editor) == 8
    assert "of all prompt tokens were there already" in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert of_the_users_daemon() == kept
    assert not [process for process in of_the_demo() if process.pid not in before]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_demo_stops_what_it_started(demo_env: dict[str, str], number: signal.Signals) -> None:
    demo = subprocess.Popen(COMMAND, env=demo_env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        started = wait_for_workers(demo)
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=LEAVE_S)
    finally:
        if demo.poll() is None:
            demo.kill()
    assert demo.returncode == 130
    assert "Traceback" not in errors
    gone, alive = psutil.wait_procs(started, timeout=LEAVE_S)
    assert not alive
    assert len(gone) >= 2


def of_the_users_daemon() -> dict[Path, int]:
    """When each file was written that a daemon of this home has: another one may be running there."""
    there = [path for name in ("state", "logs") for path in (FOLDER.parent / name).rglob("*")]
    return {path: path.stat().st_mtime_ns for path in there}


def wait_for_workers(demo: subprocess.Popen[str]) -> list[psutil.Process]:
    """All processes below the demo, once its daemon has started a worker."""
    deadline = time.monotonic() + DEMO_S
    while time.monotonic() < deadline and demo.poll() is None:
        below = psutil.Process(demo.pid).children(recursive=True)
        if any("stateroom.daemon.engine.worker" in " ".join(process.cmdline()) for process in below):
            return below
        time.sleep(0.05)
    raise AssertionError("The demo's daemon has started no worker.")


def of_the_demo() -> list[psutil.Process]:
    """Processes that serve or use a private daemon of the demo."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                "STATEROOM_ENDPOINT" in process.environ()
                and "/stateroom-" in process.environ()["STATEROOM_ENDPOINT"]
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found
