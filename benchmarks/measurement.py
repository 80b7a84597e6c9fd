"""What a claim's script gives back: the figures of both sides, round by round, and whether tokens agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median

TIE_MARGIN = 1e-3  # of logits in float32: two orders of the same sums differ by less than this


class Agreement(Enum):
    """How the greedy tokens of both sides compare."""

    EQUAL = "equal"
    TIES = "equal to a tie"  # from there both go on with different tokens
    DIFFER = "DIFFER"
    NONE = "–"  # no tokens are drawn


@dataclass(frozen=True)
class Tokens:
    """The comparison, and where it was not plain."""

    agreement: Agreement
    notes: tuple[str, ...] = ()


NO_TOKENS = Tokens(Agreement.NONE)


def compare(
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    gap: Callable[[int, int], float],
) -> Tokens:
    """Compares sequences pairwise.

    Args:
        gap: `gap(sequence, place)`: by how much the peer's logit of its own token exceeds that of ours, where
            they first differ.
    """
    if len(ours) != len(theirs) or not ours or not all(ours):
        return Tokens(Agreement.DIFFER, (f"{len(ours)} sequences against {len(theirs)}, or empty ones",))
    agreement, notes = Agreement.EQUAL, []
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if list(mine) == list(other):
            continue
        place = next((k for k, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None)
        if place is None:
            agreement = Agreement.DIFFER
            notes.append(f"sequence {i}: {len(mine)} tokens against {len(other)}")
            continue
        by = gap(i, place)
        notes.append(f"sequence {i}, token {place}: logits {by:.2g} apart")
        if by > TIE_MARGIN:
            agreement = Agreement.DIFFER
        elif agreement is Agreement.EQUAL:
            agreement = Agreement.TIES
    return Tokens(agreement, tuple(notes))


def together(parts: Sequence[Tokens]) -> Tokens:
    """The worst of several comparisons, with all their notes."""
    order = (Agreement.DIFFER, Agreement.TIES, Agreement.EQUAL, Agreement.NONE)
    worst = min((part.agreement for part in parts), key=order.index, default=Agreement.NONE)
    return Tokens(worst, tuple(dict.fromkeys(note for part in parts for note in part.notes)))


@dataclass(frozen=True)
class Measurement:
    """One claim, measured. `ours[i]` and `peer[i]`, if there is a peer, were taken one right after the other.

    Attributes:
        claim: what is measured.
        unit: of the figures.
        peer_name: what we are compared with.
        lower_is_better: of the figures.
        least_ratio: the goal, if it is that we are so many times as good as the peer.
        most_added: the goal, if it is that we cost no more than so much on top of the peer, in `unit`.
        most: the goal, if it is that we come to no more than so much by ourselves, in `unit`.
        tokens: whether both sides drew the same. If not, the figures say nothing and are not shown.
        series: for plots, numbers by name.
    """

    claim: str
    unit: str
    ours: tuple[float, ...]
    peer: tuple[float, ...] = ()
    peer_name: str = "–"
    lower_is_better: bool = False
    least_ratio: float | None = None
    most_added: float | None = None
    most: float | None = None
    tokens: Tokens = NO_TOKENS
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def valid(self) -> bool:
        return self.tokens.agreement is not Agreement.DIFFER

    @property
    def ratios(self) -> tuple[float, ...]:
        """How many times as good as the peer, round by round: above 1 is better."""
        pairs = zip(self.ours, self.peer, strict=True) if self.peer else ()
        return tuple(b / a if self.lower_is_better else a / b for a, b in pairs)

    @property
    def ratio(self) -> float | None:
        """Of a typical round: what slows a noisy machine down meets both sides of a round."""
        return median(self.ratios) if self.peer else None

    @property
    def added(self) -> tuple[float, ...]:
        return tuple(a - b for a, b in zip(self.ours, self.peer, strict=True))

    @property
    def goal(self) -> str:
        if self.most_added is not None:
            return f"≤ +{self.most_added:g} {self.unit}"
        if self.most is not None:
            return f"≤ {self.most:g} {self.unit}"
        return "–" if self.least_ratio is None else f"≥ {self.least_ratio:g}×"

    @property
    def met(self) -> bool | None:
        """None: there is no goal, or nothing valid to hold against it."""
        if not self.valid:
            return None
        if self.most_added is not None:
            return median(self.added) <= self.most_added
        if self.most is not None:
            return median(self.ours) <= self.most
        if self.least_ratio is None or self.ratio is None:
            return None
        return self.ratio >= self.least_ratio
