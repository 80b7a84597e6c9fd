"""The machine around the daemon: memory, open files, the clock."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path

from stateroom.client.paths import home_dir
from stateroom.daemon.commands.terminal import size
from stateroom.daemon.config import STATE_NAME
from stateroom.daemon.doctor.check import Check, noted, passed, problem
from stateroom.daemon.log_file import log_path
from stateroom.daemon.machine import memory_bytes, stalled_percent
from stateroom.daemon.memory import TOTAL_MIN_BYTES, default_bytes
from stateroom.daemon.models import list_installed
from stateroom.deploy.service import OPEN_FILES

FILES_MIN = 1_024  # a few for each worker and snapshot, one for each client
STALLED_PERCENT = 10.0  # of the time in which something waited for memory
AHEAD_S = 60.0  # of files whose time is still to come
BEGAN_S = 1_700_000_000.0  # November 2023: no clock that is right is before the first release


def memory() -> Iterator[Check]:
    """Of the machine (or of its container), and whether the models' weights leave room for KV."""
    total = memory_bytes()
    if total is None:
        yield noted("memory", "the system doesn't tell how much there is")
        return
    largest = max(list_installed(), key=lambda model: model.bytes, default=None)
    kv = default_bytes(total, None, 0 if largest is None else largest.bytes)
    finding = f"{size(total)}, of which {size(kv)} for KV by default"
    stalled = stalled_percent()
    if largest is not None and largest.bytes > total:
        finding = f"{size(total)}; {largest.name} alone is {size(largest.bytes)}"
        yield problem("memory", finding, "Serve a smaller or a quantised one.")
    elif largest is not None and kv <= TOTAL_MIN_BYTES:
        yield noted("memory", f"{finding} beside {largest.name}", "Serve a smaller one, or see --kv-budget.")
    elif stalled is not None and stalled > STALLED_PERCENT:
        yield noted("memory", f"{finding}; programs wait for it {stalled:.0f} % of the time", "Close some.")
    else:
        yield passed("memory", finding)


def files() -> Iterator[Check]:
    """How many files a daemon may have open: it raises its own limit, up to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    finding = f"a daemon may have {most:,} open"
    if most < FILES_MIN:
        yield problem("open files", finding, f"Raise the hard limit (`ulimit -Hn`) to {OPEN_FILES:,}.")
    else:
        yield passed("open files", finding)


def clock() -> Iterator[Check]:
    """Ages and the order of what is kept are by the clock of the day."""
    now_s = time.time()
    kept = [log_path(home_dir()), *(home_dir() / STATE_NAME).glob("catalog.*")]
    ahead_s = max((_changed_s(path) for path in kept), default=0.0) - now_s
    if now_s < BEGAN_S:
        yield problem("clock", f"it says {time.strftime('%Y-%m-%d')}", "Set the machine's clock.")
    elif ahead_s > AHEAD_S:
        yield problem(
            "clock", f"what was written last is of {ahead_s:,.0f} s from now", "Set the machine's clock."
        )
    else:
        yield passed("clock", time.strftime("%Y-%m-%d %H:%M:%S %z"))


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
