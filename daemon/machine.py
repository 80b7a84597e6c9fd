"""How much memory this machine has, and how short of it the system says it is.

Nothing here fails: what a system doesn't tell is None.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
STALLS = Path("/proc/pressure/memory")  # Linux PSI
NO_LIMIT = 2**62  # what version 1 of cgroups writes where there is no limit is above this


def memory_bytes(proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> int | None:
    """What this process could use at the most: the machine's memory, or what its cgroups allow of it."""
    if sys.platform == "darwin":
        return sysctl("hw.memsize")
    told = [_of_machine(proc), *_of_cgroups(proc, cgroups)]
    return min((nbytes for nbytes in told if nbytes), default=None)


def _of_machine(proc: Path) -> int | None:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _of_cgroups(proc: Path, cgroups: Path) -> list[int]:
    """The limits of the groups that this process is in, and of those around them; in containers the path is
    the host's, and the group itself is mounted as the root."""
    made = []
    for line in _lines(proc / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.strip("/")
        while True:
            told = (_lines(group / name) or ["max"])[0]
            if told.isdigit() and int(told) < NO_LIMIT:
                made.append(int(told))
            if group == root or root not in group.parents:
                break
            group = group.parent
    return made


def stalled_percent(path: Path = STALLS) -> float | None:
    """The part of the last ten seconds in which some process of this machine waited for memory (Linux)."""
    for line in _lines(path):
        kind, *figures = line.split()
        if kind == "some":
            named = dict(figure.split("=", 1) for figure in figures)
            return float(named.get("avg10", 0.0))
    return None


def sysctl(name: str) -> int | None:
    """An integer that macOS knows by name."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        value, size = ctypes.c_uint64(0), ctypes.c_size_t(8)
        failed = libc.sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    except (OSError, AttributeError):
        return None
    return None if failed else value.value  # of 4 or 8 bytes: both machines are little endian


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
