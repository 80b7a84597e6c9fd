"""What processes take: memory, open files, threads, processor time. Read from outside, through the kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
from tests.conftest import RunningDaemon

POLL_S = 0.01


@dataclass(frozen=True)
class Footprint:
    """One process at one moment."""

    rss_bytes: int
    files: int
    threads: int
    cpu_s: float

    @classmethod
    def of(cls, pid: int) -> Footprint:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return cls(
            process.memory_info().rss, process.num_fds(), process.num_threads(), times.user + times.system
        )


def broker_and_worker(daemon: RunningDaemon) -> tuple[Footprint, Footprint]:
    """Of a daemon with one model."""
    (worker,) = daemon.workers()
    return Footprint.of(daemon.pid), Footprint.of(worker)


def growth(seen: Sequence[Footprint]) -> int:
    """By how many bytes the peak of the second half lies above that of the first: peaks are no growth."""
    middle = len(seen) // 2
    return max(one.rss_bytes for one in seen[middle:]) - max(one.rss_bytes for one in seen[:middle])


def mib(bytes_: float) -> str:
    return f"{bytes_ / 2**20:+.1f} MiB"


def seconds_until(so: Callable[[], bool], at_most_s: float, what: str) -> float:
    """Waits until something is so, and gives how long that took; fails if it takes longer than it may."""
    began = time.monotonic()
    while not so():
        took = time.monotonic() - began
        assert took < at_most_s, f"not within {at_most_s} s: {what}"
        time.sleep(POLL_S)
    return time.monotonic() - began


def gone(pid: int) -> bool:
    """Whether a process has ended; one that only waits to be collected has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
