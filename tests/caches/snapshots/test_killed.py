"""Real processes that save, killed anywhere; disks that are full; what the next start finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

KILLS = int(os.environ.get("STATEROOM_KILLS", "60"))
SEED = 11
ROOT = Path(__file__).resolve().parents[3]


def test_old_or_new_never_a_mix(tmp_path: Path) -> None:
    """B44: killed before each step, killed at random, out of room: one whole snapshot, and no orphan."""
    command = [sys.executable, "-m", "tests.caches.snapshots.kills", str(tmp_path), str(KILLS), str(SEED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["first"]["old"] == 0
    assert told["first"]["none"] > 10
    assert told["first"]["new"] > 1
    assert told["replacing"]["none"] == 0
    assert told["replacing"]["old"] > 10
    assert told["replacing"]["new"] > 5
    assert told["random"]["kills"] == KILLS
    assert told["random"]["saves"] > 0
    assert told["full"]["failed"] > 10
    assert told["full"]["saved"] > 0
