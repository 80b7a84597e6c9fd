"""Affine planes against float64, from their bits."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from tests.caches.codecs.kinds import DTYPES, fields
from tests.caches.codecs.oracle import decoded, numbers

from stateroom.caches.codecs.affine import Affine

PACKINGS = [(4, 32, 96), (4, 64, 64), (4, 128, 256), (8, 32, 160), (8, 64, 192), (8, 128, 128)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group", "width"), PACKINGS)
def test_round_trip(bits: int, group: int, width: int, dtype: mx.Dtype) -> None:
    """A field comes back within a step, a (2^bits - 1)th of its group's span (from 0, where 0 is outside)."""
    codec, given = Affine(bits, group, dtype), fields((2, 3, 7, width), dtype)
    planes = codec.encode(given)
    back, stored = codec.decode(planes), decoded(codec, planes)
    assert back.dtype == dtype
    assert [plane.dtype for plane in planes] == [mx.uint32, dtype, dtype]
    rounding = mx.finfo(dtype).eps / 2 * np.abs(stored) + 1e-6 * np.abs(stored).max()
    assert (np.abs(numbers(back) - stored) <= rounding).all()

    vectors = numbers(given).astype(np.float64)
    groups = vectors.reshape(2, 3, 7, -1, group)
    span = np.maximum(groups.max(-1), 0) - np.minimum(groups.min(-1), 0)
    step = np.repeat(span / (2**bits - 1), group, axis=-1)
    scales_are_rounded = mx.finfo(dtype).eps * np.repeat(span, group, axis=-1)
    assert (np.abs(stored - vectors) <= step + scales_are_rounded).all()


@pytest.mark.parametrize(("bits", "group", "width"), PACKINGS)
def test_the_bits_are_mlxs(bits: int, group: int, width: int) -> None:
    given = fields((1, 2, 5, width), mx.bfloat16)
    theirs = mx.quantize(given, group_size=group, bits=bits)
    for ours, other in zip(Affine(bits, group, mx.bfloat16).encode(given), theirs, strict=True):
        assert mx.array_equal(ours, other)


@pytest.mark.parametrize(
    ("bits", "dtype", "bytes_"),
    [(4, mx.bfloat16, 36), (8, mx.bfloat16, 68), (4, mx.float32, 40), (8, mx.float32, 72)],
)
def test_bytes_of_a_token(bits: int, dtype: mx.Dtype, bytes_: int) -> None:
    """A head of 64 fields; dense it takes 128 in bfloat16."""
    planes = Affine(bits, 64, dtype).encode(mx.ones((1, 1, 1, 64), dtype))
    assert sum(plane.nbytes for plane in planes) == bytes_
