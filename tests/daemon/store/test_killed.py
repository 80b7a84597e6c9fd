"""Real processes that append to a store, killed at any moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

KILLS = int(os.environ.get("STATEROOM_KILLS", "60"))
ROOT = Path(__file__).resolve().parents[3]


def test_what_was_flushed_is_there_and_nothing_is_mixed(tmp_path: Path) -> None:
    """Every session has the tokens of the last flush that was acknowledged, or all have those of the next."""
    command = [sys.executable, "-m", "tests.daemon.store.kills", str(tmp_path / "a.db"), str(KILLS), "5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["kills"] == KILLS
    assert told["flushes"] > KILLS
