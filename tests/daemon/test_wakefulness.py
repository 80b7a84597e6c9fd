"""B84: the machine is kept awake while requests run, by a program that is started and ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.daemon.conftest import StartBroker
from tests.daemon.rig import QUICK

from stateroom.daemon.clock import ManualClock
from stateroom.daemon.logs import make_log
from stateroom.daemon.wakefulness import AGAIN_S, Wakefulness, keeper_of, started

AFTER_S, UNTIL_S = 3.0, 5.0
# What `caffeinate -w` does, as far as it goes: it writes down that it runs, and leaves with its process.
PROGRAM = """
import os, sys, time
with open(sys.argv[1], "a") as file:
    file.write(" ".join(sys.argv[2:]) + "\\n")
while os.path.exists(f"/proc/{sys.argv[-1]}"):
    time.sleep(0.02)
"""


class Programs:
    """What was started, each a real process that does nothing."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[bytes]] = []
        self.commands: list[Sequence[str]] = []

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        self.commands.append(command)
        self.all.append(started([sys.executable, "-c", "import time; time.sleep(60)"]))
        return self.all[-1]

    @property
    def running(self) -> int:
        return sum(program.poll() is None for program in self.all)


@pytest.fixture
def programs() -> Iterator[Programs]:
    made = Programs()
    yield made
    for program in made.all:
        if program.poll() is None:
            program.kill()
        program.wait()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def wakefulness(programs: Programs, clock: ManualClock) -> Wakefulness:
    log = make_log("json", "warning")
    return Wakefulness(("keep", "awake"), AFTER_S, UNTIL_S, clock, log, programs.start)


def pass_time(wakefulness: Wakefulness, clock: ManualClock, seconds: int, runs: bool) -> None:
    for _ in range(seconds):
        clock.advance(1.0)
        wakefulness.look(runs)


def test_macs_alone_have_such_a_program() -> None:
    assert keeper_of("darwin") == ("/usr/bin/caffeinate", "-i", "-w", str(os.getpid()))
    assert keeper_of("linux") is None


def test_it_is_held_while_requests_run_and_no_longer(
    wakefulness: Wakefulness, clock: ManualClock, programs: Programs
) -> None:
    pass_time(wakefulness, clock, 3, True)
    assert programs.commands == []  # not for a short one
    pass_time(wakefulness, clock, 1, True)
    assert (programs.commands, programs.running) == ([("keep", "awake")], 1)
    pass_time(wakefulness, clock, 100, True)
    pass_time(wakefulness, clock, 4, False)  # the next may follow
    pass_time(wakefulness, clock, 2, True)
    assert (len(programs.all), programs.running) == (1, 1)
    pass_time(wakefulness, clock, 5, False)
    assert (wakefulness.held, programs.running) == (False, 0)
    pass_time(wakefulness, clock, 100, False)
    pass_time(wakefulness, clock, 3, True)
    assert not wakefulness.held  # it begins anew


def test_many_short_ones_in_a_row_are_a_long_one(wakefulness: Wakefulness, clock: ManualClock) -> None:
    for _ in range(5):
        pass_time(wakefulness, clock, 1, True)
        pass_time(wakefulness, clock, 1, False)
    assert wakefulness.held
    wakefulness.let_go()


def test_a_program_that_leaves_is_not_started_over_and_over(
    wakefulness: Wakefulness, clock: ManualClock, programs: Programs
) -> None:
    pass_time(wakefulness, clock, 4, True)
    programs.all[0].kill()
    programs.all[0].wait()
    pass_time(wakefulness, clock, int(AGAIN_S) - 1, True)
    assert len(programs.all) == 1
    pass_time(wakefulness, clock, 2, True)
    assert (len(programs.all), programs.running) == (2, 1)


def test_a_program_that_is_not_there_is_no_failure(clock: ManualClock, capsys: Any) -> None:
    wakefulness = Wakefulness(("/nowhere/caffeinate",), AFTER_S, UNTIL_S, clock, make_log("json", "warning"))
    pass_time(wakefulness, clock, 100, True)
    assert capsys.readouterr().err.count("may go to sleep") == 1
    wakefulness.let_go()


def test_without_a_command_nothing_is_done(clock: ManualClock, programs: Programs) -> None:
    wakefulness = Wakefulness(None, AFTER_S, UNTIL_S, clock, make_log("json", "warning"), programs.start)
    pass_time(wakefulness, clock, 100, True)
    assert programs.all == []


def test_a_broker_is_kept_awake_by_its_requests(start_broker: StartBroker, tmp_path: Path) -> None:
    """Not by a client that watches; and nothing is left of it at the end, nor after it was killed."""
    told = tmp_path / "told"
    command = (sys.executable, "-c", PROGRAM, str(told), "-w", str(os.getpid()))
    patience = replace(QUICK, awake_after_s=0.0, awake_until_s=0.0)
    rig = start_broker("step_s=0.05", keep_awake=command, patience=patience)
    rig.until(lambda broker: any(engine.ready for engine in broker.supervisor.engines))
    watcher, client = rig.client(), rig.client()
    watcher.send("watch", events=True)
    client.ask("hello")
    assert not rig.look(lambda broker: broker.wakefulness.held)
    session = client.ask("open", tokens=[1, 2, 3])["session"]
    request = client.send("decode", session=session, max_tokens=200)
    rig.until(lambda broker: broker.wakefulness.held)
    until(told.exists)
    (program,) = [each for each in psutil.Process().children() if str(told) in each.cmdline()]
    assert client.ask("cancel", request=request)["cancelled"]
    rig.until(lambda broker: not broker.wakefulness.held)
    until(lambda: not program.is_running())
    assert told.read_text() == f"-w {os.getpid()}\n"
    client.send("decode", session=session, max_tokens=200)
    rig.until(lambda broker: broker.wakefulness.held)
    rig.stop()
    assert not any(str(told) in each.cmdline() for each in psutil.Process().children())


# Who reads the wall clock, and what for. Whatever waits, or ends after some time, asks a clock that neither
# jumps nor goes on while the machine sleeps (`daemon/clock.py`).
WALL = {
    "daemon/clock.py": "what outlives a boot",
    "daemon/lock.py": "since when a daemon runs, for people",
    "daemon/models.py": "the age of an unfinished download's folder",
    "daemon/engine/disk_start.py": "when a snapshot was made",
    "daemon/engine/template.py": "the date that a chat template asks for",
    "caches/snapshots/fingerprint.py": "whether a file was only just written",
}
FOR_PEOPLE = ("daemon/commands/", "daemon/doctor/")  # what they show
READS = re.compile(r"\btime\.time(_ns)?\(|\bdatetime\.(now|utcnow|today)\(|\bdate\.today\(")


def test_nothing_waits_by_the_wall_clock() -> None:
    """B84: a machine that slept has lost no lease and no patience."""
    root = Path(__file__).resolve().parents[2]
    files = [
        file for part in ("client", "daemon", "caches", "deploy") for file in (root / part).rglob("*.py")
    ]
    found = {file.relative_to(root).as_posix() for file in files if READS.search(file.read_text())}
    assert {name for name in found if not name.startswith(FOR_PEOPLE)} == set(WALL)


def until(so: Callable[[], bool]) -> None:
    end = time.monotonic() + 10.0
    while not so():
        assert time.monotonic() < end
        time.sleep(0.02)
