"""The real demo model for tests and benchmarks: installed once below build/, by the code that users run."""

from __future__ import annotations

import os
from pathlib import Path

from stateroom.daemon.models import DEMO_FILE, add_demo

FOLDER = Path(__file__).parent.parent / "build" / "models"


def demo_gguf() -> Path:
    """The demo model's file: `$STATEROOM_DEMO_GGUF` if that is set, else fetched when it isn't there yet."""
    given = os.environ.get("STATEROOM_DEMO_GGUF")
    if given:
        return Path(given)
    return add_demo(folder=FOLDER).path / Path(DEMO_FILE).name
