"""How short of memory the machine is, and what KV gives way for it. Pure but for `system_level`.

The system's own word is taken: macOS tells a level, Linux how long processes waited for memory. How many
pages are free says nothing: a large file cache is no shortage.

A level is believed at once when it rises, and falls by one after it has been lower for `CALM_S`, so that
what gave way isn't fetched back into a machine that is still short. What is given up is a part of what was
held when the level rose; while a critical level stays, that is done again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import IntEnum

from stateroom.daemon.machine import stalled_percent, sysctl


class Level(IntEnum):
    NORMAL = 0
    WARN = 1
    CRITICAL = 2


CALM_S = 30.0  # a lower level is believed after so long
AGAIN_S = 15.0  # a critical level that stays takes another part after this
KEPT = {Level.NORMAL: 1.0, Level.WARN: 0.75, Level.CRITICAL: 0.5}  # of the KV held when the level rose
KEPT_MIN_BYTES = 256 * 2**20  # less than this in all isn't what a machine is short of
STALLED_WARN, STALLED_CRITICAL = 10.0, 40.0  # percent of ten seconds in which somebody waited for memory
OF_MACOS = {1: Level.NORMAL, 2: Level.WARN, 4: Level.CRITICAL}  # kern.memorystatus_vm_pressure_level

Source = Callable[[], Level | None]  # None: the system doesn't tell


def system_level() -> Level | None:
    """What the system says now."""
    if sys.platform == "darwin":
        return OF_MACOS.get(sysctl("kern.memorystatus_vm_pressure_level") or 0)
    return of_stalls(stalled_percent())


def of_stalls(percent: float | None) -> Level | None:
    if percent is None:
        return None
    if percent >= STALLED_CRITICAL:
        return Level.CRITICAL
    return Level.WARN if percent >= STALLED_WARN else Level.NORMAL


class Pressure:
    """The level that is believed, and the most KV that it leaves."""

    def __init__(self) -> None:
        self.level = Level.NORMAL
        self.most_bytes: int | None = None  # None: no more than else
        self._lower_since_s: float | None = None
        self._took_s = 0.0

    def tell(self, told: Level | None, held_bytes: int, now_s: float) -> bool:
        """Takes what the system says. Whether the level changed; `most_bytes` may have in any case."""
        told, before = told or Level.NORMAL, self.level
        if told >= self.level:
            self._lower_since_s = None
        elif self._lower_since_s is None:
            self._lower_since_s = now_s
        if told > self.level:
            self.level = told
            self._take(held_bytes, now_s)
        elif told is Level.CRITICAL and now_s - self._took_s >= AGAIN_S:
            self._take(held_bytes, now_s)
        elif self._lower_since_s is not None and now_s - self._lower_since_s >= CALM_S:
            self.level, self._lower_since_s = Level(self.level - 1), now_s
            if self.level is Level.NORMAL:
                self.most_bytes = None
        return self.level is not before

    def _take(self, held_bytes: int, now_s: float) -> None:
        kept = max(int(held_bytes * KEPT[self.level]), KEPT_MIN_BYTES)
        self.most_bytes = kept if self.most_bytes is None else min(self.most_bytes, kept)
        self._took_s = now_s
