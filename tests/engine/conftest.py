"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest
from tests.demo import demo_gguf

from stateroom.daemon.engine.model import LoadedModel, load


@pytest.fixture(scope="session")
def demo_model() -> LoadedModel:
    """The real 135M model, for the thread that runs the tests."""
    return load(str(demo_gguf()), "demo")
