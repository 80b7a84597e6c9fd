"""What the doctor says of real daemons: of another version, with an engine that failed, hung, and dead."""

from __future__ import annotations

import os
import signal
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.conftest import RunningDaemon, StartDaemon
from tests.daemon.test_doctor import package, wrong
from tests.tiny import write_tiny_model

from stateroom.client import connect
from stateroom.daemon.doctor.check import Check
from stateroom.daemon.doctor.places import socket
from stateroom.daemon.doctor.running import daemon as daemon_checks

pytestmark = pytest.mark.system

FAILED_S = 30.0


@pytest.fixture
def daemon(start_daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunningDaemon:
    """It takes itself for an older one, as before an upgrade, and its model was cut off."""
    cut = write_tiny_model(tmp_path / "cut") / "model.safetensors"
    os.truncate(cut, cut.stat().st_size // 2)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(package(tmp_path / "older", "stateroom", "0.0.1")))
        made = start_daemon(model=cut.parent)
    for name in ("HOME", "STATEROOM_HOME", "STATEROOM_RUNTIME_DIR"):
        monkeypatch.setenv(name, made.env[name])
    monkeypatch.delenv("STATEROOM_ENDPOINT", raising=False)
    return made


def found() -> dict[str, Check]:
    return {check.name: check for check in (*socket(), *daemon_checks())}


def test_daemons_in_bad_shape(daemon: RunningDaemon) -> None:
    until_failed(daemon)
    of_another_version = found()
    assert f"of process {daemon.pid}" in of_another_version["socket"].finding
    wrong(
        of_another_version["daemon"],
        f"0.0.1 answers, and {version('stateroom')} is installed",
        "stateroom service restart",
    )
    wrong(of_another_version["engine"], "cut is failed", "can't be loaded", "restart")
    assert of_another_version["journal"].state == "pass"

    daemon.process.send_signal(signal.SIGSTOP)
    wrong(found()["daemon"], f"process {daemon.pid} is there and doesn't answer", f"kill {daemon.pid}")

    daemon.process.kill()
    daemon.process.wait()
    dead = found()
    assert dead["daemon"].state == "note"
    assert "No daemon answers" in dead["daemon"].finding
    assert "left by a daemon that is gone" in dead["socket"].finding


def until_failed(daemon: RunningDaemon) -> None:
    deadline = time.monotonic() + FAILED_S
    with connect(daemon.endpoint, app="doctor") as room:
        while room.stats().models[0]["state"] != "failed":
            assert time.monotonic() < deadline
            time.sleep(0.1)
