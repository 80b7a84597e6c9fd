"""What the figures were taken on, without names and paths."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("stateroom", "mlx", "mlx-lm", "pyzmq", "msgpack")
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


def machine() -> dict[str, str]:
    """The machine, the versions, and how busy it was at the start."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "memory": f"{_memory_bytes() / 2**30:.0f} GiB",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        **{name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    if sys.platform == "darwin":
        asked = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        return asked.stdout.strip() or "unknown"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
