"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest
from tests.demo import demo_gguf
from tests.engine.harness import Bench
from tests.tiny import make_tiny_model

from stateroom.daemon.engine import ladder
from stateroom.daemon.engine.model import LoadedModel, load


@pytest.fixture(scope="session")
def demo_model() -> LoadedModel:
    """The real 135M model, for the thread that runs the tests."""
    return load(str(demo_gguf()), "demo")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """A tiny llama with random weights."""
    return make_tiny_model("llama")


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for room, nor gives way: what the budget refuses is answered at once, with its figures."""
    monkeypatch.setattr(ladder, "HELD_MAX", 0)


@pytest.fixture
def bench(loaded: LoadedModel) -> Bench:
    """An engine over it."""
    return Bench(loaded)
