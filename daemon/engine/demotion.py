"""Who gives way when memory is short: the idle sessions that were least recently used. Pure.

What several sessions hold is free only when all of them have given way, and not at all while anybody else
(a stream, a copy that is being written) has it in view. So a session that would free nothing is spared,
however long it has been idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BACKGROUND_OLDER_MS = 600_000.0  # a batch of the background goes before an editor that had ten minutes' rest


@dataclass(frozen=True, slots=True)
class Idle:
    """A session that nobody uses: bytes of its own, and numbers of what others may hold too."""

    id: str
    used_ms: float
    own: int
    parts: tuple[int, ...] = ()
    background: bool = False

    @property
    def age_key(self) -> tuple[float, str]:
        """The least goes first."""
        return self.used_ms - (BACKGROUND_OLDER_MS if self.background else 0.0), self.id


@dataclass(frozen=True, slots=True)
class Held:
    """A part: its bytes, and how many hold it in all."""

    nbytes: int
    holders: int


def freeable(idle: Sequence[Idle], parts: Mapping[int, Held]) -> int:
    """Bytes that would be free if all of them gave way."""
    held = Counter(number for each in idle for number in each.parts)
    shared = sum(parts[number].nbytes for number, n in held.items() if n >= parts[number].holders)
    return sum(each.own for each in idle) + shared


def plan(idle: Sequence[Idle], parts: Mapping[int, Held], wanted: int) -> list[str] | None:
    """Ids of those that give way so that `wanted` bytes are free, in order; None where all aren't enough.

    No more of the recently used than must be, and none without which it would be enough as well.
    """
    chosen: list[Idle] = []
    holders: Counter[int] = Counter()  # of each part, how many of the chosen
    freed = 0
    for each in sorted(idle, key=lambda one: one.age_key):
        if freed >= wanted:
            break
        chosen.append(each)
        freed += each.own
        for number in each.parts:
            holders[number] += 1
            if holders[number] == parts[number].holders:
                freed += parts[number].nbytes
    if freed < wanted:
        return None
    needed: list[str] = []
    for each in reversed(chosen):
        last = [number for number in each.parts if holders[number] == parts[number].holders]
        lost = each.own + sum(parts[number].nbytes for number in last)
        if freed - lost >= wanted:
            freed -= lost
            holders.subtract(each.parts)
        else:
            needed.append(each.id)
    return needed[::-1]
