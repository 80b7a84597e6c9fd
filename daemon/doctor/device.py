"""What computes: mlx, the GPU it finds, and on a Linux CPU the BLAS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stateroom.daemon.blas import find_blas, preloaded
from stateroom.daemon.doctor.check import Check, passed, problem
from stateroom.daemon.doctor.installation import INSTALL

PROBE_S = 120.0  # mlx's first import on a cold disk
CUDA = "pip install 'stateroom[daemon,cuda]'"
DRIVER = Path("/proc/driver/nvidia/version")

# Runs beside the doctor: a broken GPU driver or BLAS may abort the process that touches it.
PROBE = """
import json, time
import mlx.core as mx
a = mx.random.normal((512, 512)); mx.eval(a @ a)
t = time.perf_counter(); mx.eval(*[a @ a for _ in range(4)]); s = time.perf_counter() - t
facts = mx.device_info()
print(json.dumps({
    "device": "cpu" if mx.default_device() == mx.cpu else "gpu",
    "metal": mx.metal.is_available(),
    "name": str(facts.get("device_name", facts.get("architecture", ""))),
    "working_set": int(facts.get("max_recommended_working_set_size", 0)),
    "gflops": round(4 * 2 * 512**3 / s / 1e9, 1),
}))
"""


def device(probe: str = PROBE, driver: Path = DRIVER, limit_s: float = PROBE_S) -> Iterator[Check]:
    """Imports mlx as a worker would, in a process of its own. Args: of tests."""
    blas = find_blas()
    command, environment = [sys.executable, "-c", probe], preloaded(os.environ, blas.library)
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit_s, errors="replace"
        )
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    except subprocess.TimeoutExpired:
        yield problem("mlx", f"no answer within {limit_s:g} s", INSTALL)
        return
    if not told:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield problem("mlx", last, INSTALL)
        return
    speed = f"{told['gflops']:.0f} GFLOP/s in float32"
    if told["device"] == "gpu":
        kind, most = "Metal" if told["metal"] else "CUDA", told["working_set"]
        room = f", works with up to {most / 2**30:.0f} GiB" if most else ""
        yield passed("mlx", f"{kind} GPU {told['name']}, {speed}{room}")
        return
    yield passed("mlx", f"CPU {told['name']}, {speed}")
    if sys.platform == "darwin":
        yield problem("gpu", "mlx finds no Metal GPU", "Use a native arm64 Python, in no virtual machine.")
    elif driver.exists():
        yield problem("gpu", "an NVIDIA GPU is here, and mlx computes on the CPU", CUDA)
    if blas.library is not None:
        yield passed("blas", f"workers are started with {blas.library}")
    elif sys.platform == "linux":
        yield problem("blas", "the reference BLAS, about ten times slower", blas.hint)
