"""How long clients wait: for a first token, between two, before anything is begun. Counted only. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

# Seconds; the last bucket is everything above.
SHORT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
LONG_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(slots=True)
class Histogram:
    """How many values lie in each bucket, and their sum."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def up_to(self) -> list[tuple[str, int]]:
        """As Prometheus has them: how many are no more than each bound."""
        made, so_far = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            made.append((bound, so_far))
        return made


class Timings:
    """The histograms of a daemon, since its start."""

    def __init__(self) -> None:
        self.first_token = Histogram(LONG_S)  # from a decode's arrival to its first token, told
        self.token_gap = Histogram(SHORT_S)  # between two replies with tokens of one stream
        self.queue = Histogram(LONG_S)  # before the engine began with a decode

    def by_name(self) -> dict[str, tuple[str, Histogram]]:
        """With what each is of, in words."""
        return {
            "first_token_seconds": ("From a decode's arrival to its first token.", self.first_token),
            "token_gap_seconds": ("Between two replies with tokens of one stream.", self.token_gap),
            "queue_seconds": ("Before the engine began with a decode.", self.queue),
        }
