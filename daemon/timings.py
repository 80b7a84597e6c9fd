"""How long things take: what clients wait for, engines' turns, the broker's own loop. Counted only. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
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
        self.first_token = Histogram(LONG_S)
        self.token_gap = Histogram(SHORT_S)
        self.queue = Histogram(LONG_S)
        self.loop_lag = Histogram(SHORT_S)

    def by_name(self) -> dict[str, tuple[str, Histogram]]:
        """With what each is of, in words."""
        return {
            "first_token_seconds": ("From a decode's arrival to its first token.", self.first_token),
            "token_gap_seconds": ("Between two replies with tokens of one stream.", self.token_gap),
            "queue_seconds": ("Before the engine began with a decode.", self.queue),
            "loop_lag_seconds": (
                "How much later than planned the daemon's loop came to its housekeeping, once a second.",
                self.loop_lag,
            ),
        }


@dataclass(frozen=True)
class Spread:
    """A histogram of a worker, as it is told: counts of its buckets, and their sum in seconds."""

    name: str
    counts: list[int]
    total: float


# Of an engine: what each is of, in words. All have the bounds `SHORT_S`.
OF_ENGINE = {
    "step_seconds": "Decode steps of all rows; beside a prefill quantum, its part of the time of both.",
    "quantum_seconds": "Prefill quanta; beside a decode step, its part of the time of both.",
}


class EngineTimings:
    """The histograms of an engine, since its worker's start."""

    def __init__(self) -> None:
        self.step = Histogram(SHORT_S)
        self.quantum = Histogram(SHORT_S)

    def told(self) -> list[Spread]:
        pairs = zip(OF_ENGINE, (self.step, self.quantum), strict=True)
        return [Spread(name, list(made.counts), made.total) for name, made in pairs]


def histograms(spreads: list[Spread]) -> Iterator[tuple[str, Histogram]]:
    """By name, as a worker told them; those that this daemon doesn't know are passed over."""
    for spread in spreads:
        if spread.name in OF_ENGINE and len(spread.counts) == len(SHORT_S) + 1:
            made = Histogram(SHORT_S, total=spread.total)
            made.counts = spread.counts
            yield spread.name, made
