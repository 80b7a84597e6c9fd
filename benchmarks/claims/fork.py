"""`fork` of a long session in the engine itself: it costs next to nothing and copies nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from benchmarks.measurement import Measurement
from benchmarks.rig import DEMO, Rig

from stateroom.daemon.blas import find_blas, preloaded

TOKENS = 4096  # of the session
FORKS = 8
CALLS = 9
MOST_MS = 1.0
TIMEOUT_S = 300.0


def run(rig: Rig) -> list[Measurement]:
    model = rig.chosen(DEMO)
    tokens = TOKENS // 16 if rig.quick else TOKENS
    command = [sys.executable, "-m", "benchmarks.forking", str(rig.path(model)), str(tokens)]
    done = subprocess.run(
        [*command, str(FORKS), str(CALLS)],
        env=preloaded(os.environ, find_blas().library),
        stdout=subprocess.PIPE,
        timeout=TIMEOUT_S,
        check=True,
    )
    found = json.loads(done.stdout)
    claim = f"fork({FORKS}) of {tokens:,} tokens in the engine, {model.name}"
    bytes_more = [max(pair) for pair in zip(found["copied"], found["allocated"], strict=True)]
    return [
        Measurement(claim=claim, unit="ms", ours=tuple(found["ms"]), most=MOST_MS),
        Measurement(claim=f"copied by {claim}", unit="bytes", ours=tuple(bytes_more), most=0),
    ]
