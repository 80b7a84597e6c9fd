"""Brokers with scripted workers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.daemon.rig import Rig

from stateroom.daemon.config import ModelSpec

StartBroker = Callable[..., Rig]
Again = Callable[..., Rig]


@pytest.fixture
def start_broker() -> Iterator[StartBroker]:
    """`start_broker(script, more=..., **config)`: a broker whose first model runs `script`."""
    rigs: list[Rig] = []

    def start(script: str = "", more: dict[str, str] | None = None, **options: Any) -> Rig:
        folder = Path(tempfile.mkdtemp(prefix="sr-", dir="/tmp"))
        scripts = {"toy": script or "step_s=0.002", **(more or {})}
        models = tuple(ModelSpec(name, text) for name, text in scripts.items())
        rigs.append(Rig(folder, models, **options))
        return rigs[-1]

    yield start
    for rig in rigs:
        try:
            rig.close()
        finally:
            shutil.rmtree(rig.folder, ignore_errors=True)


@pytest.fixture
def rig(start_broker: StartBroker) -> Rig:
    return start_broker()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    made = tmp_path / "state"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def again(start_broker: StartBroker, state: Path) -> Again:
    """Stops the broker that runs, if one does, and starts another over the same state."""
    running: list[Rig] = []

    def start(script: str = "step_s=0.001", **options: Any) -> Rig:
        for rig in running:
            rig.stop()
        running.append(start_broker(script, state_dir=state, **options))
        return running[-1]

    return start
