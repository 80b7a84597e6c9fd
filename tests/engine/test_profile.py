"""The parts of a decode step, timed in the real worker; they add up to the whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.measured import best
from tests.tiny import CONTEXT, write_tiny_model

from stateroom.daemon.commands.bench import OF_THE_MODEL
from stateroom.daemon.engine import profile
from stateroom.daemon.exits import FAILED

pytestmark = pytest.mark.system

RUN_S = 120.0
ROWS, TOKENS = 3, 40
UNTIMED_MAX = 0.1  # of the whole, which lies between the timers
ONCE_EACH = (profile.PULSE, profile.READ)  # so short that a coarse clock may miss them


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def run(*command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=RUN_S, env=env
    )


class Clock:
    """Gives the times it was made with."""

    def __init__(self, *times: float) -> None:
        self._times: Iterator[float] = iter(times)

    def __call__(self) -> float:
        return next(self._times)


def test_a_part_is_timed_without_the_parts_inside_it() -> None:
    # outer from 0 to 10, inner from 2 to 5 and from 6 to 7
    timers = profile.Timers(Clock(0, 2, 5, 6, 7, 10))
    inner = timers.around("inner", lambda: None)

    def twice() -> str:
        inner()
        inner()
        return "made"

    assert timers.around("outer", twice)() == "made"
    assert timers.seconds == {"outer": 6, "inner": 4}


def test_a_part_that_raises_is_timed_and_what_follows_too() -> None:
    timers = profile.Timers(Clock(0, 1, 4, 10, 20, 22))

    def fails() -> None:
        raise ValueError

    def outer() -> None:
        with pytest.raises(ValueError):
            timers.around("inner", fails)()

    timers.around("outer", outer)()
    assert timers.seconds == {"inner": 3, "outer": 7}
    timers.around("outer", lambda: None)()
    assert timers.seconds == {"inner": 3, "outer": 9}


def test_the_parts_add_up_to_the_whole(model: Path) -> None:
    """Each part is there, none is counted twice, and at most `UNTIMED_MAX` is in none."""
    found: dict[str, float] = {}

    def untimed() -> float:
        asked = (str(model), "--rows", str(ROWS), "--tokens", str(TOKENS), "--prompt", "70")
        done = run("stateroom.daemon.engine.profile", *asked)
        assert done.returncode == 0, done.stderr
        made = json.loads(done.stdout)
        assert (made["rows"], made["steps"]) == (ROWS, TOKENS)
        found.update(made["seconds"])
        between = made["total_s"] - sum(found.values())
        assert between >= 0
        return float(between / made["total_s"])

    assert best(untimed, UNTIMED_MAX) < UNTIMED_MAX
    assert tuple(found) == profile.PARTS
    assert all(seconds > 0 for part, seconds in found.items() if part not in ONCE_EACH), found


def test_what_cannot_be_measured_is_one_line(model: Path) -> None:
    done = run("stateroom.daemon.engine.profile", str(model), "--prompt", str(CONTEXT + 1))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert str(CONTEXT) in done.stderr


def test_the_command_shows_it(model: Path) -> None:
    """`stateroom bench`: the steps alone, and with `--profile` a line for each part."""
    asked = ("stateroom.daemon.cli", "bench", "--model", str(model), "--tokens", "8", "--rows", "2")
    plain = run(*asked)
    assert plain.returncode == 0, plain.stderr
    assert "ms a step" in plain.stdout
    assert profile.DISPATCH not in plain.stdout
    shown = run(*asked, "--profile", env=os.environ | {"COLUMNS": "120"})
    assert shown.returncode == 0, shown.stderr
    for part in (*profile.PARTS, "the model's forward", "ms a step"):
        assert part in shown.stdout


def test_the_command_says_what_is_wrong(model: Path, tmp_path: Path) -> None:
    missing = run("stateroom.daemon.cli", "bench", "--model", str(tmp_path / "nowhere"))
    assert missing.returncode != 0
    assert "There is no model" in missing.stderr
    none = run("stateroom.daemon.cli", "bench", env=os.environ | {"STATEROOM_HOME": str(tmp_path)})
    assert none.returncode == FAILED
    assert "stateroom model add demo" in none.stderr
    long = run("stateroom.daemon.cli", "bench", "--model", str(model), "--prompt", str(CONTEXT + 1))
    assert long.returncode == FAILED
    assert "Traceback" not in long.stderr


def test_what_is_the_models_own_is_told_by_the_process() -> None:
    """The command can't import the engine, so it repeats the names."""
    assert set(OF_THE_MODEL) < set(profile.PARTS)
