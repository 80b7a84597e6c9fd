"""What a process takes of the machine, as it can tell itself: CPU time and memory."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from pathlib import Path

STATM = Path("/proc/self/statm")
PEAK_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of what getrusage calls one
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def usage() -> dict[str, float]:
    """`cpu_s`, since its start; `rss_peak_bytes`; and `rss_bytes`, now, where the system has /proc."""
    made: dict[str, float] = {
        "cpu_s": round(time.process_time(), 3),
        "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * PEAK_UNIT,
    }
    with contextlib.suppress(OSError):
        made["rss_bytes"] = int(STATM.read_text().split()[1]) * PAGE_BYTES
    return made
