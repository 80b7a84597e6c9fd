"""Time as an argument: whoever needs it takes a `Clock`, so that a test can turn it by hand."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]  # seconds since some fixed moment; never goes back, whatever the wall clock does

monotonic_s: Clock = time.monotonic

WallClock = Callable[[], int]  # milliseconds since 1970: for what outlives a boot, and nothing else


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


class ManualClock:
    """A clock that stands until it is moved."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self.now_s += seconds
