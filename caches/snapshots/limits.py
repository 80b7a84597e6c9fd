"""How much of the disk snapshots may take, and which go first. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

BYTES_MAX = 32 * 2**30
FREE_MIN_BYTES = 4 * 2**30  # what is left to everybody else on that disk,
FREE_MIN_PART = 20  # or so small a part of it, where that is less
COUNT_MAX = 16_384  # one for each session that there can be


@dataclass(frozen=True, slots=True)
class Limits:
    bytes_max: int = BYTES_MAX
    free_min_bytes: int = FREE_MIN_BYTES
    count_max: int = COUNT_MAX


def floor_of(disk_bytes: int) -> int:
    """What is to stay free of a disk of that size, unless somebody says otherwise."""
    return min(FREE_MIN_BYTES, disk_bytes // FREE_MIN_PART)


@dataclass(frozen=True, slots=True)
class Held:
    """One snapshot. `own_bytes`: without what it shares; `runs`: bytes of each run that it names."""

    id: str
    own_bytes: int
    runs: Mapping[str, int]
    automatic: bool
    created_ms: int


@dataclass(frozen=True, slots=True)
class Plan:
    """`remove`, in order; when something is still short then, nothing is to be removed."""

    remove: tuple[str, ...]
    short_bytes: int = 0
    too_many: bool = False

    @property
    def fits(self) -> bool:
        return not self.short_bytes and not self.too_many


def plan(
    held: Iterable[Held],
    limits: Limits,
    needed_bytes: int,
    free_bytes: int,
    replaced: str | None = None,
    needed_runs: frozenset[str] = frozenset(),
) -> Plan:
    """What has to go so that one more snapshot of `needed_bytes` fits: automatic ones only, the oldest first.

    A run goes with the last snapshot that names it, unless it is of `needed_runs`. `replaced` is there until
    the new one is, and doesn't count as one more.
    """
    all_held = list(held)
    users = Counter(run for each in all_held for run in each.runs)
    total = used_bytes(all_held)
    others = [each for each in all_held if each.id != replaced]
    count = len(others)
    old = sorted((each.created_ms, each.id, each) for each in others if each.automatic)
    remove: list[str] = []
    freed = 0

    def short() -> int:
        over = total - freed + needed_bytes - limits.bytes_max
        scarce = limits.free_min_bytes + needed_bytes - (free_bytes + freed)
        return max(over, scarce, 0)

    for _, _, each in old:
        if not short() and count < limits.count_max:
            break
        remove.append(each.id)
        count -= 1
        freed += each.own_bytes
        for run, nbytes in each.runs.items():
            users[run] -= 1
            if not users[run] and run not in needed_runs:
                freed += nbytes
    return Plan(tuple(remove), short(), count >= limits.count_max)


def used_bytes(held: Iterable[Held]) -> int:
    """What they take together; a run that several share counts once."""
    runs: dict[str, int] = {}
    total = 0
    for each in held:
        total += each.own_bytes
        runs.update(each.runs)
    return total + sum(runs.values())
