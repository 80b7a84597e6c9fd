"""`stateroom watch` at real daemons: events as they come, until Ctrl-C, or until the daemon is gone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.conftest import StartDaemon
from tests.system.conftest import await_model
from tests.system.terminal import CTRL_C, Terminal
from tests.system.test_commands import COMMAND

from stateroom.client import connect

pytestmark = pytest.mark.system

WAIT_S = 30.0


def test_events_until_ctrl_c_and_until_the_daemon_is_gone(
    start_daemon: StartDaemon, tiny_folder: Path
) -> None:
    daemon = start_daemon(model=tiny_folder)
    await_model(daemon)
    watch = [*COMMAND, "watch"]
    pipes = {"env": daemon.env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    only = subprocess.Popen([*watch, "--json", "--stats", "0.2", "--app", "two"], **pipes)
    with Terminal([*watch, "--stats", "0.2"], daemon.env) as terminal:
        terminal.wait_for("figures: 0 running, 0 queued, 0 sessions, ")
        # Told by those who read a pipe, too, as they come; the first figures say that it watches.
        assert only.stdout is not None
        assert json.loads(only.stdout.readline())["event"] == "stats"
        with connect(daemon.endpoint, app="one") as one, connect(daemon.endpoint, app="two") as two:
            session, other = one.open(tokens=range(100)), two.open(tokens=[1, 2])
            session.park()
            other.close()
            session.close()
        terminal.wait_for(f"session {session.id[:8]} of one closed")
        shown = [line.split("  ", 1)[1] for line in terminal.shown.splitlines() if "session " in line]
        told = [line for line in shown if not line.startswith("figures")]
        of_one = [line for line in told if line.startswith(f"session {session.id[:8]} of one ")]
        assert [line.rpartition(" of one ")[2] for line in of_one] == [
            "opened, on tiny", "is on disk: asked", "closed",
        ]  # fmt: skip
        assert len(told) == len(of_one) + 2  # another's, opened and closed
        terminal.type(CTRL_C)
        assert terminal.leave() == 130
        assert "Traceback" not in terminal.shown
    head = subprocess.run(
        f"{' '.join(watch)} --stats 0.1 | head -1", shell=True, timeout=WAIT_S, capture_output=True,
        env=daemon.env, text=True,
    )  # fmt: skip
    assert ("figures: " in head.stdout, head.stderr) == (True, "")
    orphan = subprocess.Popen([*watch, "--stats", "0.1"], **pipes)
    assert orphan.stdout is not None
    assert orphan.stdout.readline()
    daemon.process.kill()
    for process in (only, orphan):
        out, err = process.communicate(timeout=WAIT_S)
        assert (process.returncode, len(err.splitlines())) == (1, 1), err
        assert "The daemon has stopped" in err
        if process is only:
            events = [json.loads(line) for line in out.splitlines()]
            seen = [each for each in events if each["event"].startswith("session")]
            assert [each["event"] for each in seen] == ["session_opened", "session_closed"]
            assert {each["session"] for each in seen} == {other.id}
