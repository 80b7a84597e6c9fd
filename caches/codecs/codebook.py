"""The best levels for one coordinate of a random unit vector (Lloyd-Max), computed in float64.

A coordinate t of a vector drawn uniformly from the unit sphere of D dimensions has the density
(1 - t^2)^((D - 3) / 2), up to a constant (arXiv 2504.19874, lemma 1). With t = sin(a) that is cos(a)^(D - 2),
whose integrals have closed forms where D is even.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CLOSE = 1e-10  # of levels: far below float32, in which they are used
STEPS_MAX = 50


@dataclass(frozen=True)
class Codebook:
    """Of coordinates whose root mean square is 1: those of a unit vector times sqrt(D).

    A coordinate is looked up in bins so narrow that at most one edge between two levels falls into each.

    Attributes:
        levels: float32 [2^bits], ascending, symmetric.
        first: uint8 [bins]: the level at the bin's lower end.
        edges: float32 [bins]: where in the bin the next level begins; infinite if it doesn't.
        reach: bins divide [-reach, reach]; what lies beyond is of the first or last level.
    """

    levels: mx.array
    first: mx.array
    edges: mx.array
    reach: float

    def nearest(self, coordinates: mx.array) -> mx.array:
        """float32 → uint8, the nearest level of each."""
        bins = self.first.size
        place = ((coordinates + self.reach) * (bins / (2 * self.reach))).astype(mx.int32)
        place = mx.clip(place, 0, bins - 1)
        return _looked_up(self.first, place) + (coordinates > _looked_up(self.edges, place))

    def looked_up(self, indices: mx.array) -> mx.array:
        """Levels by index."""
        return _looked_up(self.levels, indices)


def _looked_up(table: mx.array, indices: mx.array) -> mx.array:
    """`mx.take`, ten times as fast on a CPU."""
    return mx.take_along_axis(table, indices.flatten(), axis=0).reshape(indices.shape)


@lru_cache
def codebook(width: int, bits: int) -> Codebook:
    """For unit vectors of `width` (even) dimensions, times sqrt(width); `bits` from 1 to 8."""
    upper = positive_levels(width, bits) * width**0.5
    levels = np.concatenate([-upper[::-1], upper])
    edges = ((levels[1:] + levels[:-1]) / 2).astype(np.float32)
    reach = 2.0 ** np.ceil(np.log2(1.01 * max(edges[-1], upper[-1])))
    narrowest = np.diff(edges).min() if len(edges) > 1 else reach
    bins = 2 ** int(np.ceil(np.log2(4 * reach / narrowest)))
    # Powers of two: the same bins in float32 here and in `nearest`.
    of_edge = ((edges + np.float32(reach)) * np.float32(bins / (2 * reach))).astype(np.int64)
    in_bin = np.full(bins, np.inf, np.float32)
    in_bin[of_edge] = edges
    first = np.searchsorted(of_edge, np.arange(bins)).astype(np.uint8)
    return Codebook(mx.array(levels.astype(np.float32)), mx.array(first), mx.array(in_bin), float(reach))


def positive_levels(width: int, bits: int) -> Floats:
    """The upper half of the levels of a unit vector's coordinate, ascending: [2^(bits - 1)].

    Newton's method on Lloyd's conditions, that each level is the mean of its cell and each edge half-way
    between two levels: Lloyd's own iteration takes tens of thousands of steps for 256 levels. A log-concave
    density has one solution. It starts from the best levels for many bits and a normal density.
    """
    half = 2 ** (bits - 1)
    wide = NormalDist(0, (3 / width) ** 0.5)
    levels: Floats = np.array([wide.inv_cdf(0.5 + (i + 0.5) / (2 * half)) for i in range(half)])
    for _ in range(STEPS_MAX):
        means, below, above = _cells(levels, width)
        slopes = np.diag(1 - below - above) - np.diag(above[:-1], 1) - np.diag(below[1:], -1)
        step = np.linalg.solve(slopes, levels - means)
        levels = levels - step
        if np.abs(step).max() < CLOSE:
            return levels
    raise ArithmeticError(f"no levels found for width {width}, {bits} bits")


def _cells(levels: Floats, width: int) -> tuple[Floats, Floats, Floats]:
    """Each cell's mean, and how fast it moves with the level below and with the one above (or its own)."""
    edges = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [1.0]])
    angle, cosine = np.arcsin(edges), np.sqrt(1 - edges**2)
    # Of cos(a)^(D - 2), from 0: by parts, from the power before the last.
    mass, power = angle, 0
    while power < width - 2:
        power += 2
        mass = (cosine ** (power - 1) * edges + (power - 1) * mass) / power
    masses = np.diff(mass)
    means = np.diff(-(cosine ** (width - 1))) / (width - 1) / masses
    density = cosine ** (width - 3)
    below = density[:-1] * (means - edges[:-1]) / masses / 2
    above = density[1:] * (edges[1:] - means) / masses / 2
    below[0] = above[-1] = 0.0  # the outermost edges stay
    return means, below, above
