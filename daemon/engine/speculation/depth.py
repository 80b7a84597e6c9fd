"""How many guesses pay: chances learnt by session, costs learnt by width, and the best of both. Pure.

A pass over w tokens a row costs more than one over a single token, for every row of the batch. With chance p
that a guess is right when those before it were, k guesses bring 1 + p + … + p^k tokens. The width chosen is
that with the most tokens per millisecond, all rows together; a width of 1 is plain decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

GUESSES_DEFAULT = 16  # guesses of one round, where the request doesn't say
WIDTHS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65)  # few, so that each is measured soon
GAIN_MIN = 1.1  # times as fast as plain decoding, or it isn't worth giving up looking ahead
SLOWER_MOST = 2.5  # times as long as a plain pass, while some row has nothing to guess
TOKEN_COST = 0.05  # of a plain pass, for each token more of a row: until widths were measured
SMOOTHING = 0.3  # weight of the newest measurement
STALE_PASSES = 300  # what was measured so many passes ago counts no more
OUTLIER = 2.0  # times what was expected: more is taken for that, since other work may have been in between
FIRST_CHANCES = {
    0: 0.7,
    2: 0.35,
    3: 0.55,
    4: 0.7,
    5: 0.8,
    8: 0.9,
    16: 0.97,
}  # by tokens matched; 0: a model's
PRIOR_GUESSES = 2.0  # what those count as
MEMORY_GUESSES = 16.0  # that a chance is learnt from, the latest
RETRY_AFTER = 64  # tokens after which what lost is tried again; twice as many each time that it loses
RETRY_MOST = 1_024


@dataclass(slots=True)
class Chance:
    """How likely a guess of one kind is right, given that those before it were.

    Attributes:
        until: how many tokens the session will have drawn when it is tried again; 0: it is in use.
        pause: for how many tokens it rests the next time that it loses.
    """

    prior: float
    right: float = 0.0
    guesses: float = 0.0
    until: int = 0
    pause: int = RETRY_AFTER

    @property
    def value(self) -> float:
        return (self.right + self.prior * PRIOR_GUESSES) / (self.guesses + PRIOR_GUESSES)

    def learn(self, guessed: int, right: int) -> None:
        """Of `guessed` tokens the first `right` were; what follows a wrong one tells nothing."""
        told = min(right + 1, guessed)
        kept = min(1.0, MEMORY_GUESSES / (self.guesses + told))
        self.right = (self.right + right) * kept
        self.guesses = (self.guesses + told) * kept
        if right == guessed:
            self.pause = RETRY_AFTER

    def rests(self, drawn: int) -> bool:
        """Whether it lost, and not long ago. When its pause is over, what was learnt is forgotten."""
        if self.until and drawn >= self.until:
            self.until = 0
            self.right = self.guesses = 0.0
        return self.until > 0

    def lost(self, drawn: int) -> None:
        """It doesn't pay, the session having drawn so many tokens."""
        self.until = drawn + self.pause
        self.pause = min(2 * self.pause, RETRY_MOST)


class Chances:
    """Of one kind of guess each: by how many tokens matched at least (0: a model guessed)."""

    def __init__(self) -> None:
        self._of = {least: Chance(first) for least, first in FIRST_CHANCES.items()}

    def of(self, matched: int) -> Chance:
        return self._of[max(least for least in self._of if least <= matched)]


@dataclass(slots=True)
class _Measured:
    ms: float
    at: int  # passes until then


@dataclass(slots=True)
class Costs:
    """What a pass takes, by rows and width; as many entries as there are of both, at the most."""

    _measured: dict[tuple[int, int], _Measured | None] = field(default_factory=dict)
    _passes: int = 0

    def measured(self, rows: int, width: int, ms: float) -> None:
        """A pass took so long. The first of each shape, for which something may be compiled, counts not."""
        self._passes += 1
        key = (rows, width)
        if key not in self._measured:
            self._measured[key] = None
            return
        if self._measured.get((rows, 1)) is not None:
            expected = self.of(rows, width)
            ms = expected + SMOOTHING * (min(ms, OUTLIER * expected) - expected)
        self._measured[key] = _Measured(ms, self._passes)

    def of(self, rows: int, width: int) -> float:
        """In milliseconds, or, while no plain pass of so many rows was measured, in plain passes."""
        known = list(self._known(rows))
        if not known or known[0][0] != 1:
            return 1.0 + TOKEN_COST * rows * (width - 1)
        below = max((point for point in known if point[0] <= width), default=known[0])
        above = min((point for point in known if point[0] >= width), default=None)
        if above is None:  # on along the line from a plain pass; first tokens are the dearest
            plain = known[0][1]
            slope = TOKEN_COST * rows * plain
            if below[0] > 1:
                slope = min(slope, max((below[1] - plain) / (below[0] - 1), 0.0))
            return below[1] + slope * (width - below[0])
        if above[0] == below[0]:
            return below[1]
        return below[1] + (above[1] - below[1]) * (width - below[0]) / (above[0] - below[0])

    def _known(self, rows: int) -> Iterator[tuple[int, float]]:
        for width in WIDTHS:
            entry = self._measured.get((rows, width))
            if entry is not None and (width == 1 or self._fresh(entry)):
                yield width, entry.ms

    def _fresh(self, entry: _Measured) -> bool:
        return self._passes - entry.at < STALE_PASSES


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a row could add to a round: so many guesses, each right with this chance if those before were."""

    guesses: int = 0
    chance: float = 0.0

    def tokens(self, width: int) -> float:
        """Expected of a pass of this width."""
        total, reached = 1.0, 1.0
        for _ in range(min(self.guesses, width - 1)):
            reached *= self.chance
            total += reached
        return total


def best_width(prospects: Sequence[Prospect], costs: Costs, widest: int) -> int:
    """The width, `widest` at the most, of the most expected tokens per millisecond; 1 unless others gain."""
    rows = len(prospects)
    useful = max((prospect.guesses for prospect in prospects), default=0) + 1
    plain = costs.of(rows, 1)
    slowest = SLOWER_MOST * plain if any(not prospect.guesses for prospect in prospects) else float("inf")
    best, best_rate = 1, GAIN_MIN * rows / plain
    for width in WIDTHS[1:]:
        if width > min(widest, useful):
            break
        cost = costs.of(rows, width)
        if cost > slowest:
            continue
        rate = sum(prospect.tokens(width) for prospect in prospects) / cost
        if rate > best_rate:
            best, best_rate = width, rate
    return best
