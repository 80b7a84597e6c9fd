"""Products with affine planes whose levels are unpacked, against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from tests.kernels.test_packed_attention import exact

from stateroom.kernels import levels
from stateroom.kernels.planes import Affine, quantised

pytestmark = pytest.mark.usefixtures("computed_on_the_cpu")
BOUND = 2e-6  # of the norm of a result's last axis


def plane_of(packing: tuple[int, int], stored: int, width: int, dtype: mx.Dtype = mx.float32) -> Affine:
    """Two rows, three heads; not around zero, so that biases matter."""
    numbers = np.random.default_rng(stored).normal(size=(2, 3, stored, width)).astype(np.float32) + 1.5
    return quantised(mx.array(numbers).astype(dtype), group=packing[1], bits=packing[0])


def check(plane: Affine) -> None:
    random = np.random.default_rng(11)
    width, stored = plane.width, plane.shape[2]
    stands_for = exact(plane)
    queries = random.normal(size=(2, 3, 5, width)).astype(np.float32)
    weights = random.uniform(size=(2, 3, 5, stored)).astype(np.float32)
    for got, want in (
        (levels.times_transposed(mx.array(queries), plane), queries @ stands_for.swapaxes(-1, -2)),
        (levels.times(mx.array(weights), plane), weights @ stands_for),
    ):
        assert got.shape == want.shape
        away = np.linalg.norm(np.array(got) - want, axis=-1)
        assert (away <= BOUND * np.linalg.norm(want, axis=-1)).all()


@pytest.mark.parametrize("width", [64, 128, 384])
@pytest.mark.parametrize("packing", [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128)])
def test_against_float64(packing: tuple[int, int], width: int) -> None:
    """One group a head and several; widths that no kernel has."""
    if width % packing[1] == 0:
        check(plane_of(packing, 29, width))


@pytest.mark.parametrize("packing", [(4, 32), (8, 64)])
def test_a_slice_of_tokens(packing: tuple[int, int]) -> None:
    check(plane_of(packing, 41, 64).columns(7, 30))


@pytest.mark.parametrize("packing", [(4, 64), (8, 32)])
def test_piece_by_piece(packing: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pieces of 256 tokens and a rest."""
    plane = plane_of(packing, 523, 64)
    whole = levels.times_transposed(mx.ones((2, 3, 2, 64)), plane)
    monkeypatch.setattr(levels, "PIECE_MAX", 2 * 3 * 64 * 300)
    assert [stop - first for first, stop in levels._pieces(plane)] == [256, 256, 11]
    np.testing.assert_allclose(
        np.array(levels.times_transposed(mx.ones((2, 3, 2, 64)), plane)), np.array(whole), rtol=2e-6
    )
    check(plane)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_scales_of_halves_are_read_as_they_are(dtype: mx.Dtype) -> None:
    check(plane_of((4, 32), 31, 64, dtype))
    check(plane_of((8, 64), 31, 64, dtype))


@pytest.mark.parametrize("packing", [(4, 32), (8, 64)])
def test_every_level(packing: tuple[int, int]) -> None:
    """Each value of each field's bits, alone: a one-hot weight picks its row out."""
    bits, group = packing
    levels_of_all = 2**bits
    words = mx.array(
        np.random.default_rng(5).integers(0, 2**32, (1, 1, 97, 64 * bits // 32), np.uint64).astype(np.uint32)
    )
    plane = Affine(words, mx.ones((1, 1, 97, 64 // group)), mx.zeros((1, 1, 97, 64 // group)), group, bits)
    got = np.array(levels.times(mx.eye(97)[None, None], plane))
    np.testing.assert_array_equal(got, exact(plane))
    assert len(np.unique(got)) == levels_of_all
