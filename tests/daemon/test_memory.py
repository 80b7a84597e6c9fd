"""The machine's memory, with scripted workers: who is told which budget, and what shortage does."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.daemon.rig import Rig
from tests.daemon.scripted_worker import MORE, MORE_BYTES

from stateroom.daemon.machine import memory_bytes, stalled_percent
from stateroom.daemon.memory import TOTAL_MIN_BYTES, WORK_BYTES, default_bytes
from stateroom.daemon.pressure import AGAIN_S, CALM_S, KEPT, KEPT_MIN_BYTES, Level, Pressure, of_stalls

StartBroker = Callable[..., Rig]
TOTAL = 2**30
GIB = 2**30


def budget_of(rig: Rig, model: str) -> float:
    """What a worker says its budget is."""
    return rig.look(lambda broker: broker.supervisor.engine(model).gauges.get("kv_budget_bytes", -1))


def settled(rig: Rig, **budgets: float) -> None:
    """Waits until the workers have these budgets."""
    rig.until(
        lambda broker: (
            {engine.id: engine.gauges.get("kv_budget_bytes") for engine in broker.supervisor.engines}
            == budgets
        )
    )


def test_two_models_share_one_budget(start_broker: StartBroker) -> None:
    rig = start_broker("", more={"second": ""}, kv_budget_bytes=TOTAL)
    settled(rig, toy=TOTAL // 2, second=TOTAL // 2)
    gauges = rig.client().ask("stats")["gauges"]
    assert gauges["kv_budget_bytes"] == gauges["kv_granted_bytes"] == TOTAL


def test_who_is_short_gets_what_the_other_does_not_hold(start_broker: StartBroker) -> None:
    rig = start_broker(f"kv={TOTAL}", more={"second": "kv=1000"}, kv_budget_bytes=TOTAL)
    settled(rig, toy=TOTAL // 2, second=TOTAL // 2)
    rig.client().open([MORE])
    rig.until(lambda broker: broker.memory.budget.member(1).target >= TOTAL // 2 + MORE_BYTES)  # type: ignore[union-attr]
    rig.until(lambda broker: sum(e.gauges["kv_budget_bytes"] for e in broker.supervisor.engines) == TOTAL)
    assert budget_of(rig, "toy") >= TOTAL // 2 + MORE_BYTES


def test_a_worker_that_dies_leaves_its_part_and_gets_it_again(start_broker: StartBroker) -> None:
    rig = start_broker(f"kv={TOTAL},load_s=1", more={"second": ""}, kv_budget_bytes=TOTAL)
    settled(rig, toy=TOTAL // 2, second=TOTAL // 2)
    pid = rig.look(lambda broker: broker.supervisor.engine("second").pid)
    os.kill(pid or 0, signal.SIGKILL)
    rig.until(lambda broker: broker.supervisor.engine("second").starts == 2)
    settled(rig, toy=TOTAL // 2, second=TOTAL // 2)
    client = rig.client()
    assert client.ask("unload", model="second")["kind"] == "result"
    rig.until(lambda broker: broker.supervisor.engine("toy").gauges.get("kv_budget_bytes") == TOTAL)
    assert rig.look(lambda broker: broker.memory.budget.bound) == TOTAL


def test_weights_are_counted_where_the_budget_is_the_machines(start_broker: StartBroker) -> None:
    rig = start_broker("weights=1000000000", more={"second": "weights=3000000000"})
    rig.until(lambda broker: all(engine.ready for engine in broker.supervisor.engines))
    memory = rig.look(lambda broker: broker.memory.machine_bytes)
    total = default_bytes(memory, None, 4_000_000_000)
    gauges = rig.client().ask("stats")["gauges"]
    assert (gauges["memory_bytes"], gauges["kv_budget_bytes"]) == (memory, total)


def test_a_machine_that_is_short_of_memory_shrinks_budgets_and_says_so(start_broker: StartBroker) -> None:
    """B54."""
    level = Level.NORMAL
    rig = start_broker(f"kv={TOTAL}", kv_budget_bytes=TOTAL)
    rig.look(lambda broker: setattr(broker.memory, "_level", lambda: level))
    client = rig.client()
    watch = client.send("watch")
    settled(rig, toy=TOTAL)
    rig.until(lambda broker: broker.memory.budget.held == TOTAL)
    level = Level.CRITICAL
    settled(rig, toy=TOTAL // 2)
    gauges = client.ask("stats")["gauges"]
    assert (gauges["memory_pressure"], gauges["kv_budget_bytes"]) == (2, TOTAL // 2)
    client.ask("cancel", request=watch)
    (event,) = [each for each in client.replies(watch)[:-1] if each["event"] == "pressure"]
    assert event["details"] == {"level": "critical", "kv_budget_bytes": TOTAL // 2, "kv_bytes": TOTAL}


# ---------------------------------------------------------------- pure


def test_the_default_leaves_room_for_the_rest_of_the_machine() -> None:
    assert default_bytes(16 * GIB, None, 4 * GIB) == 8 * GIB - WORK_BYTES
    assert default_bytes(128 * GIB, 20 * GIB, 4 * GIB) == 18 * GIB - 4 * GIB - WORK_BYTES
    assert default_bytes(4 * GIB, None, 8 * GIB) == TOTAL_MIN_BYTES


def test_a_level_rises_at_once_and_falls_slowly() -> None:
    pressure = Pressure()
    held = 8 * GIB
    assert pressure.tell(Level.WARN, held, 0.0)
    assert pressure.most_bytes == held * KEPT[Level.WARN]
    assert pressure.tell(Level.CRITICAL, 6 * GIB, 1.0)
    assert pressure.most_bytes == 6 * GIB * KEPT[Level.CRITICAL]
    assert not pressure.tell(Level.NORMAL, 3 * GIB, 2.0)
    assert not pressure.tell(Level.CRITICAL, 3 * GIB, 2.0 + CALM_S)  # it wasn't over
    for moment, level in (
        (100.0, Level.CRITICAL),
        (100.0 + CALM_S, Level.WARN),
        (100.0 + 2 * CALM_S, Level.NORMAL),
    ):
        pressure.tell(Level.NORMAL, 3 * GIB, moment)
        assert pressure.level is level
    assert pressure.most_bytes is None


def test_a_critical_level_that_stays_takes_more_but_not_all() -> None:
    pressure, held, moment = Pressure(), 8 * GIB, 0.0
    for _ in range(20):
        pressure.tell(Level.CRITICAL, held, moment)
        assert pressure.most_bytes is not None
        held, moment = min(held, pressure.most_bytes), moment + AGAIN_S
    assert held == KEPT_MIN_BYTES


@given(st.lists(st.tuples(st.sampled_from([None, *Level]), st.floats(0.0, 2 * CALM_S)), max_size=60))
def test_levels_never_flap(told: list[tuple[Level | None, float]]) -> None:
    """However the system's word changes, a level that fell was lower for the whole time before."""
    pressure, now_s, changes = Pressure(), 0.0, []
    for level, wait_s in told:
        now_s += wait_s
        before = pressure.level
        assert pressure.tell(level, GIB, now_s) == (pressure.level is not before)
        if pressure.level is not before:
            changes.append((now_s, pressure.level < before))
        assert pressure.level >= (level or Level.NORMAL)
        assert (pressure.most_bytes is None) == (pressure.level is Level.NORMAL)
    falls = [moment for moment, fell in changes if fell]
    assert all(later - earlier >= CALM_S for earlier, later in itertools.pairwise(falls))


def test_what_the_system_tells_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    assert memory_bytes(proc, groups) is None
    (proc / "meminfo").write_text("MemTotal:       16384 kB\nMemFree: 1 kB\n")
    assert memory_bytes(proc, groups) == 16384 * 1024
    (proc / "self" / "cgroup").write_text("3:cpu:/x\n4:memory:/a/b\n0::/user/app\n")
    (groups / "user" / "app").mkdir(parents=True)
    (groups / "user" / "app" / "memory.max").write_text("max\n")
    (groups / "user" / "memory.max").write_text("8388608\n")
    assert memory_bytes(proc, groups) == 8_388_608
    (groups / "memory").mkdir()  # in a container: the path is the host's, the group is the root here
    (groups / "memory" / "memory.limit_in_bytes").write_text("4194304\n")
    assert memory_bytes(proc, groups) == 4_194_304
    (groups / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_bytes(proc, groups) == 8_388_608
    stalls = tmp_path / "stalls"
    assert of_stalls(stalled_percent(stalls)) is None
    figures: list[tuple[str, Any]] = [("0.00", Level.NORMAL), ("12.5", Level.WARN), ("80.00", Level.CRITICAL)]
    for percent, level in figures:
        stalls.write_text(
            f"some avg10={percent} avg60=1 avg300=0 total=5\nfull avg10=99 avg60=0 avg300=0 total=1\n"
        )
        assert of_stalls(stalled_percent(stalls)) is level


def test_this_machine_tells() -> None:
    nbytes = memory_bytes()
    assert nbytes is not None
    assert nbytes > 2**28
