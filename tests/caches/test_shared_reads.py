"""Two parts of an attention joined in few operations are one attention over both, in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from stateroom.caches.shared_reads import _joined
from stateroom.kernels.join_segments.reference import Attended, join_segments

BOUND = 2e-6  # of the norm of a head's output


@pytest.mark.parametrize("apart", [0.0, 1.0, 12.0, 40.0, 300.0])
@pytest.mark.parametrize("larger", [1.0, 50.0])
def test_two_parts_are_one(apart: float, larger: float) -> None:
    random = np.random.default_rng(5)
    outputs = random.standard_normal((2, 3, 5, 7, 11)) * np.array([larger, 1.0])[:, None, None, None, None]
    lse = random.standard_normal((2, 3, 5, 7)) + np.array([-apart, 0.0])[:, None, None, None]
    one, other = (
        Attended(mx.array(o, mx.float32), mx.array(s, mx.float32)) for o, s in zip(outputs, lse, strict=True)
    )
    whole = np.logaddexp(*lse)
    wanted = (outputs * np.exp(lse - whole)[..., None]).sum(0)
    for got in (_joined(one, other), _joined(other, one)):
        # What a difference of sums is rounded by is a share's own error, at any size of either.
        error = np.linalg.norm(np.array(got.output) - wanted, axis=-1)
        assert (error <= BOUND * np.maximum(np.linalg.norm(wanted, axis=-1), 1.0)).all()
        assert np.abs(np.array(got.lse) - whole).max() <= 1e-6 * (1 + np.abs(whole).max())


def test_a_part_that_saw_nothing_changes_nothing() -> None:
    random = np.random.default_rng(6)
    one = Attended(
        mx.array(random.standard_normal((2, 3, 1, 5)), mx.float32), mx.array([[[0.3], [-9.0], [80.0]]] * 2)
    )
    nothing = Attended(mx.zeros((2, 3, 1, 5)), mx.full((2, 3, 1), -mx.inf))
    got = _joined(one, nothing)
    assert mx.array_equal(got.output, one.output)
    assert mx.array_equal(got.lse, one.lse)


def test_several_levels_are_joined_as_segments_are() -> None:
    random = np.random.default_rng(7)
    outputs = mx.array(random.standard_normal((2, 3, 1, 4, 5)), mx.float32)
    lse = mx.array(random.standard_normal((2, 3, 1, 4)) * 4, mx.float32)
    got = Attended(outputs[..., 0, :], lse[..., 0])
    for i in range(1, 4):
        got = _joined(got, Attended(outputs[..., i, :], lse[..., i]))
    wanted = join_segments(outputs, lse)
    assert mx.allclose(got.output, wanted.output, atol=2e-6)
    assert mx.allclose(got.lse, wanted.lse, atol=2e-6)
