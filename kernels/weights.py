"""A softmax before its division, for CPUs, where the obvious operations of mlx are slow when they are many.

An element costs 12 ns in mlx's exponential and 4.3 in its power; 1.0 in a maximum along the last axis and 0.5
in a sum, but a quarter of that along another axis; 0.25 in what is plain arithmetic. So many powers are a
polynomial and an exponent written into the bits, in six passes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx

MANY = 1 << 14  # elements; with fewer, the number of operations counts for more than what they do
COLUMNS = 64  # of a maximum or sum in two stages
LEAST = -127.0  # its power, with all the bits of an exponent cleared, is 0
ROUND = 1.5 * 2.0**23  # what is added to it is rounded to a whole number
ONE = 2.0**23  # the lowest bit of a float32's exponent, as a number
# (2^f - 1) / f for |f| <= 1/2, by the powers of f: the least relative error of 2^f, 1.1e-7 in float32.
POLYNOMIAL = (0.693147004, 0.240222424, 0.0555073358, 0.00967151299, 0.00132647285)


def weighed(scores: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """scores float32 [..., M, S] → 2^(scores - most), of that shape; its sum and `most`, [..., M, 1]."""
    if scores.size < MANY:
        return plainly_weighed(scores)
    most = _by_columns(mx.max, mx.maximum, scores)
    weights = powers(scores - most)
    return weights, _by_columns(mx.sum, mx.add, weights), most


def plainly_weighed(scores: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The same as one would write it: for GPUs, and for few."""
    most = scores.max(axis=-1, keepdims=True)
    weights = mx.power(2.0, scores - most)
    return weights, weights.sum(axis=-1, keepdims=True), most


def powers(x: mx.array) -> mx.array:
    """2^x of float32 x <= 0.5, to 3e-7 of it; 0 where x <= -127."""
    fraction, exponent = _split(mx.maximum(x, LEAST))
    return (_power(fraction).view(mx.int32) + exponent).view(mx.float32)


def _by_columns(reduce: Callable[..., mx.array], join: Callable[..., mx.array], x: mx.array) -> mx.array:
    """`reduce` along the last axis, first within blocks of it."""
    whole = x.shape[-1] // COLUMNS * COLUMNS
    if whole <= COLUMNS:
        return reduce(x, axis=-1, keepdims=True)
    blocks = mx.unflatten(x[..., :whole], -1, (-1, COLUMNS))
    made = reduce(reduce(blocks, axis=-2), axis=-1, keepdims=True)
    return made if whole == x.shape[-1] else join(made, reduce(x[..., whole:], axis=-1, keepdims=True))


# Without a compiler these run as plain operations: no slower than powers. Shapes change at every step.


@partial(mx.compile, shapeless=True)
def _split(x: mx.array) -> tuple[mx.array, mx.array]:
    """The fraction of x, at most 1/2 away from 0, and its whole number as what it adds to an exponent."""
    whole = (x + ROUND) - ROUND
    return x - whole, (whole * ONE).astype(mx.int32)


@partial(mx.compile, shapeless=True)
def _power(fraction: mx.array) -> mx.array:
    """1 for 0 exactly: nothing may be borrowed from an exponent that is cleared."""
    value = POLYNOMIAL[-1] * fraction
    for factor in POLYNOMIAL[-2::-1]:
        value = (value + factor) * fraction
    return value + 1.0
