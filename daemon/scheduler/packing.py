"""Which rows of a step are stored together. Pure.

Rows share a pass whether they are stored together or apart. Together, rows over one trunk read it once and a
step has fewer parts; but they pad each other, and bringing them together moves their bytes. What pays is told
by costs that were measured; what is packed stays so, unless it wastes more than `WASTE_MAX`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

WASTE_MAX = 0.25  # of the columns that a part reads: padding


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds of a step for one more part (below 0: what is together is slower), for a column of a row
    that is read, and for a trunk's column beside its first row; and of moving a byte."""

    part_ms: float = 0.0
    column_ms: float = 0.005
    beside_ms: float = 0.0025
    byte_ms: float = 1e-6


@dataclass(frozen=True, slots=True)
class Row:
    """Facts of one row.

    Attributes:
        columns: tokens in no trunk, which are moved and padded; they take `nbytes`.
        trunks: what it sees of trunks: which, and how many tokens of each, in order.
        kind: rows of one kind can be stored together; None: with no other.
        steps: how many it is expected to take yet.
    """

    columns: int
    nbytes: int = 0
    trunks: tuple[tuple[Hashable, int], ...] = ()
    kind: Hashable = None
    steps: int = 1

    @property
    def trunk(self) -> Hashable:
        """The first that it sees."""
        return self.trunks[0][0] if self.trunks else None


Part = tuple[int, ...]  # numbers of rows, rising


@dataclass(frozen=True, slots=True)
class Tally:
    """What rows come to when they are stored together."""

    rows: int = 0
    widest: int = 0
    own: int = 0  # columns, without padding
    nbytes: int = 0
    views: Counter[tuple[Hashable, int]] = field(
        default_factory=Counter
    )  # what rows see as much of is read once

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Tally:
        own = [row.columns for row in rows]
        views = Counter(view for row in rows for view in row.trunks)
        return cls(len(own), max(own), sum(own), sum(row.nbytes for row in rows), views)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.rows + other.rows,
            max(self.widest, other.widest),
            self.own + other.own,
            self.nbytes + other.nbytes,
            self.views + other.views if other.views else self.views,
        )

    @property
    def waste(self) -> float:
        """Padding, of the columns that are read."""
        padded = self.rows * self.widest
        read = padded + sum(length for _, length in self.views)
        return (padded - self.own) / read if read else 0.0

    @property
    def leaves(self) -> float:
        """Bytes that move as its rows leave, one after another: each time those of the rows that stay."""
        return self.nbytes * (self.rows - 1) / 2

    def step_ms(self, costs: Costs) -> float:
        """What the part costs a step."""
        trunks_ms = sum(
            length * (costs.column_ms + (seen - 1) * costs.beside_ms)
            for (_, length), seen in self.views.items()
        )
        return costs.part_ms + self.rows * self.widest * costs.column_ms + trunks_ms


@dataclass(frozen=True, slots=True)
class _Planned:
    """A part to be had. `steps`: for which it has rows; `moved`: bytes, to make it and until it ends."""

    part: Part
    tally: Tally
    steps: int
    moved: float


def partition(rows: Sequence[Row], present: Sequence[Sequence[int]], costs: Costs) -> list[Part]:
    """The parts to have, of rows that stand in the parts of `present`; each row in one of them."""
    seen = Counter(row.trunk for row in rows)
    buckets: dict[tuple[Hashable, Hashable], list[_Planned]] = defaultdict(list)
    wanted: list[Part] = []
    for held in present:
        for part in _within_bounds(rows, held):
            if rows[part[0]].kind is None:
                wanted.append(part)
                continue
            trunks = {rows[i].trunk for i in part}
            over = next((trunk for trunk in trunks if len(trunks) == 1 and seen[trunk] > 1), None)
            tally = Tally.of([rows[i] for i in part])
            made = tally.nbytes if 1 < len(part) < len(held) else 0
            planned = _Planned(part, tally, max(rows[i].steps for i in part), made + tally.leaves)
            buckets[rows[part[0]].kind, over].append(planned)
    for (_, over), parts in buckets.items():
        pays = over is not None or costs.part_ms > 0.0
        wanted += (planned.part for planned in (_packed(parts, costs) if pays else parts))
    return sorted(wanted)


def by_kind(rows: Sequence[Row]) -> list[Part]:
    """The fewest parts that there can be."""
    kinds: dict[Hashable, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        kinds[number if row.kind is None else ("kind", row.kind)].append(number)
    return [tuple(part) for part in kinds.values()]


def _within_bounds(rows: Sequence[Row], part: Sequence[int]) -> Iterator[Part]:
    """The part, or pieces of it that don't waste too much: of rows of like length, the longest first."""
    if len({rows[i].kind for i in part}) > 1 or rows[part[0]].kind is None:
        yield from ((i,) for i in part)
        return
    if Tally.of([rows[i] for i in part]).waste <= WASTE_MAX:
        yield tuple(sorted(part))
        return
    piece: list[int] = []
    for i in sorted(part, key=lambda i: -rows[i].columns):
        if piece and Tally.of([rows[j] for j in (*piece, i)]).waste > WASTE_MAX:
            yield tuple(sorted(piece))
            piece = []
        piece.append(i)
    yield tuple(sorted(piece))


def _packed(parts: list[_Planned], costs: Costs) -> list[_Planned]:
    """Parts of one kind, over one trunk or none; those are brought together that gain by it, best first."""
    parts = sorted(parts, key=lambda planned: (-planned.tally.widest, planned.part))
    while True:
        best = max(_gains(parts, costs), key=lambda gain: gain[0], default=(0.0, 0, 0, Tally()))
        gain_ms, start, end, tally = best
        if gain_ms <= 0.0:
            return parts
        some = parts[start:end]
        part = tuple(sorted(i for planned in some for i in planned.part))
        steps = max(planned.steps for planned in some)
        parts[start:end] = [_Planned(part, tally, steps, tally.nbytes + tally.leaves)]


def _gains(parts: Sequence[_Planned], costs: Costs) -> Iterator[tuple[float, int, int, Tally]]:
    """What it saves to have `parts[start:end]` together, for as long as two of them have rows, less moves."""
    for start, first in enumerate(parts):
        tally, apart_ms, moved = first.tally, first.tally.step_ms(costs), first.moved
        most, second = first.steps, 0
        for end, planned in enumerate(parts[start + 1 :], start + 2):
            tally = tally + planned.tally
            if tally.waste > WASTE_MAX:
                break  # those behind are shorter
            apart_ms, moved = apart_ms + planned.tally.step_ms(costs), moved + planned.moved
            most, second = max(most, planned.steps), max(min(most, planned.steps), second)
            moves_ms = (tally.nbytes + tally.leaves - moved) * costs.byte_ms
            yield (apart_ms - tally.step_ms(costs)) * second - moves_ms, start, end, tally
