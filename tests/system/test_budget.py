"""Real workers under one budget: it goes where sessions are, models that rest leave, all come back exact."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import RunningDaemon, StartDaemon
from tests.system.conftest import ConnectTo
from tests.tiny import write_tiny_model

from stateroom.client import Room
from stateroom.client.session import Session

pytestmark = pytest.mark.system

LENGTH = 500  # tokens of a session; its KV takes two steps of capacity
STEP = 256
WAIT_S = 20.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two random models of one shape."""
    folder = tmp_path_factory.mktemp("pair")
    first = write_tiny_model(folder / "first", context=4096)
    return first, write_tiny_model(folder / "second", context=4096, seed=5)


def row_bytes(start_daemon: StartDaemon, connect_to: ConnectTo, model: Path) -> int:
    """KV of a session of `LENGTH` tokens."""
    daemon = start_daemon(model=model)
    session = connect_to(daemon).open(tokens=[1, 2])
    return int(session.info().capacity_bytes // STEP * 2 * STEP)


def prompt(number: int) -> list[int]:
    return [(7 * number + 3 * place) % 250 + 1 for place in range(LENGTH)]


def drawn(session: Session) -> list[int]:
    """Its next tokens; the session is left as it was."""
    before = session.info().length
    made = session.decode(max_tokens=4, ignore_eos=True).wait().tokens
    session.trim(to=before)
    return list(made)


def until(
    room: Room, right: Callable[[dict[str, Any]], bool], meanwhile: Callable[[], object] = lambda: None
) -> None:
    deadline = time.monotonic() + WAIT_S
    while not right(stats := {**room.stats().gauges, "models": room.stats().models}):
        assert time.monotonic() < deadline, json.dumps(stats)
        meanwhile()
        time.sleep(0.1)


def test_two_models_share_one_budget_and_every_session_comes_back_exact(
    start_daemon: StartDaemon, connect_to: ConnectTo, models: tuple[Path, Path]
) -> None:
    first, second = models
    row = row_bytes(start_daemon, connect_to, first)
    budget = 8 * row
    daemon = start_daemon("--model", second, f"--kv-budget={budget}", model=first)
    room = connect_to(daemon)
    until(room, lambda stats: stats["engines_ready"] == 2)
    opened = [room.open(tokens=prompt(0), model="second")]
    before = [drawn(opened[0])]
    for number in range(9):
        opened.append(room.open(tokens=prompt(number), model="first"))
        before.append(drawn(opened[-1]))
    # More than half of the budget, while sessions give way: the second model's part that it doesn't hold.
    turns = itertools.cycle(opened[1:])
    until(
        room,
        lambda stats: stats["models"][0]["gauges"]["kv_budget_bytes"] > 5 * row,
        lambda: drawn(next(turns)),
    )
    gauges = room.stats().gauges
    assert gauges["kv_granted_bytes"] <= gauges["kv_budget_bytes"] == budget
    assert {session.info().tier for session in opened} == {"resident", "disk"}
    for session, tokens in zip(opened, before, strict=True):
        found = session.verify()
        assert found.argmax_agree
        assert found.max_abs_logit_error <= 1e-4 * found.max_abs_logit
        assert drawn(session) == tokens
    for each in room.stats().models:
        # All of it where the other one holds nothing any more.
        assert each["gauges"]["kv_bytes"] <= each["gauges"]["kv_budget_bytes"] <= budget
        assert (each["deaths"], each["gauges"]["unconserved"]) == (0, 0)


def test_a_model_that_rests_leaves_and_its_sessions_come_back_from_disk(
    start_daemon: StartDaemon, connect_to: ConnectTo, models: tuple[Path, Path]
) -> None:
    daemon: RunningDaemon = start_daemon("--unload-after=2", model=models[0])
    room = connect_to(daemon)
    session = room.open(tokens=prompt(1))
    before = drawn(session)
    until(room, lambda stats: stats["models"][0]["state"] == "stopped")
    assert daemon.workers() == []
    assert session.info().tier == "disk"
    receipt = session.prefill(tokens=[9]).receipt
    assert (receipt.source, receipt.reused >= LENGTH - 1) == ("snapshot", True)
    session.trim(to=LENGTH)
    assert drawn(session) == before
