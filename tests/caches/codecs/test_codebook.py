"""The levels are the best ones, and each coordinate gets the nearest."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from tests.caches.codecs.oracle import levels, means

from stateroom.caches.codecs.codebook import codebook
from stateroom.caches.codecs.turbo import WIDTHS

ALL = [(width, bits) for width in WIDTHS for bits in range(1, 9)]


@pytest.mark.parametrize(("width", "bits"), ALL)
def test_each_level_is_the_mean_of_what_is_nearest_to_it(width: int, bits: int) -> None:
    """Lloyd's conditions, over a fine grid of the density; a log-concave one has no other solution."""
    found = np.array(codebook(width, bits).levels, np.float64)
    assert (np.diff(found) > 0).all()
    np.testing.assert_array_equal(found, -found[::-1])
    np.testing.assert_allclose(means(found, width), found, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("width", "bits"), [(64, 3), (128, 4), (256, 2), (512, 1)])
def test_lloyds_iteration_ends_at_them(width: int, bits: int) -> None:
    np.testing.assert_allclose(np.array(codebook(width, bits).levels), levels(width, bits), atol=1e-6)


def test_of_many_dimensions_and_one_bit_they_are_those_of_a_normal_density() -> None:
    """Known: sqrt(2 / pi) of one bit; 0.4528 and 1.510 of two (Max, 1960)."""
    np.testing.assert_allclose(np.array(codebook(512, 1).levels)[1], (2 / np.pi) ** 0.5, rtol=1e-3)
    np.testing.assert_allclose(np.array(codebook(512, 2).levels)[2:], [0.4528, 1.510], rtol=1e-3)


@pytest.mark.parametrize(("width", "bits"), ALL)
def test_the_nearest_level_is_taken(width: int, bits: int) -> None:
    """Everywhere, at the edges too, where both neighbours are as near; and far outside."""
    book = codebook(width, bits)
    at = np.array(book.levels)
    edges = (at[1:] + at[:-1]) / 2
    around = [np.nextafter(edges, np.float32(side)) for side in (-np.inf, np.inf)]
    outside = np.array([-width, -9.5, 9.5, width], np.float32)
    even = np.linspace(-8.5, 8.5, 4001, dtype=np.float32)
    coordinates = np.concatenate([at, edges, *around, outside, even, np.array([0.0, -0.0], np.float32)])
    got = np.array(book.nearest(mx.array(coordinates)))
    assert got.dtype == np.uint8
    distance = np.abs(coordinates.astype(np.float64)[:, None] - at.astype(np.float64))
    taken = np.take_along_axis(distance, got[:, None].astype(np.int64), axis=1)[:, 0]
    np.testing.assert_allclose(taken, distance.min(axis=1), rtol=0, atol=5e-7)
    looked_up = book.looked_up(mx.array(got.reshape(1, -1)))
    np.testing.assert_array_equal(np.array(looked_up)[0], at[got])
