"""Runs of tokens that sessions share: frozen, held by as many as have them in view, read once for all.

A trunk is one row's planes that nobody appends to any more. Sessions see it through views, each of its
first `length` tokens; a row's views, in order, hold its first tokens, and its own columns what follows.
Forking freezes a row's columns and copies nothing; trimming into a trunk narrows a view; a trunk is freed
with its last view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import mlx.core as mx

numbered = count(1).__next__  # of what sessions share, in this process; none is used twice


class Trunk:
    """`planes` [1, Hkv, capacity, field], as a codec stores them, of the tokens [start, end) of a row."""

    __slots__ = ("__weakref__", "end", "holders", "nbytes", "number", "planes", "start")

    def __init__(self, planes: Sequence[mx.array | None], start: int, end: int) -> None:
        self.number = numbered()
        self.planes = tuple(planes)
        # What they occupy, spare capacity too.
        self.nbytes = sum(plane.size * plane.dtype.size for plane in planes if plane is not None)
        self.start = start
        self.end = end
        self.holders = 0  # views that are alive


class View:
    """The first `length` tokens of a trunk, for one session. Copies of a session's cache share its views."""

    __slots__ = ("length", "trunk")

    def __init__(self, trunk: Trunk, length: int) -> None:
        self.trunk = trunk
        self.length = length
        trunk.holders += 1

    def __del__(self) -> None:
        self.trunk.holders -= 1

    @property
    def end(self) -> int:
        """The token after the last one in view."""
        return self.trunk.start + self.length


Chain = tuple[View, ...]  # of one row, in the order of time


def twin(chain: Chain) -> Chain:
    """The same tokens for another session."""
    return tuple(View(view.trunk, view.length) for view in chain)


def cut(chain: Chain, length: int) -> Chain:
    """The views of a row's first `length` tokens."""
    kept = []
    for view in chain:
        if view.end <= length:
            kept.append(view)
        elif view.trunk.start < length:
            kept.append(View(view.trunk, length - view.trunk.start))
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class Level:
    """The n-th views of a group's rows: each trunk once, with the rows that have so much of it in view."""

    reads: tuple[tuple[Trunk, int, mx.array | None], ...]  # trunk, length, rows; None: all, in order
    missing: int  # rows without an n-th view: they stand behind those of the reads
    order: mx.array | None  # which place of these each row has; None: its own


def levels(chains: Sequence[Chain]) -> list[Level]:
    """What a group reads before its own columns: each trunk once for all rows that see as much of it."""
    made = []
    for depth in range(max(map(len, chains), default=0)):
        groups: dict[tuple[Trunk, int], list[int]] = {}
        for row, chain in enumerate(chains):
            if depth < len(chain):
                groups.setdefault((chain[depth].trunk, chain[depth].length), []).append(row)
        missing = [row for row, chain in enumerate(chains) if depth >= len(chain)]
        placed = [row for rows in [*groups.values(), missing] for row in rows]
        every = list(range(len(chains)))
        order = None if placed == every else mx.array([placed.index(row) for row in every], dtype=mx.int32)
        reads = tuple(
            (trunk, length, None if rows == every else mx.array(rows, dtype=mx.int32))
            for (trunk, length), rows in groups.items()
        )
        made.append(Level(reads, len(missing), order))
    return made
