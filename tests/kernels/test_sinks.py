"""Attention sinks, against float64 and against mlx's own."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from tests.kernels.oracle import attend_span

from stateroom.kernels import dispatch
from stateroom.kernels.join_segments.reference import Attended
from stateroom.kernels.sinks import with_sinks
from stateroom.kernels.spans import Spans

pytestmark = pytest.mark.usefixtures("computed_on_the_cpu")
SINKS = [-30.0, -1.5, 0.0, 2.0, 9.0, 80.0]  # of no weight, up to all of it


def drawn() -> tuple[mx.array, mx.array, mx.array]:
    random = np.random.default_rng(23)
    shapes = [(2, 6, 5, 32), (2, 3, 17, 32), (2, 3, 17, 32)]
    q, k, v = (mx.array(random.normal(size=shape).astype(np.float32)) for shape in shapes)
    return q, k, v


def attended(dtype: mx.Dtype = mx.float32) -> Attended:
    q, k, v = (x.astype(dtype) for x in drawn())
    return dispatch.packed_attention(q, k, v, Spans.of([0, 0], [17, 17]), 0.3)


def test_against_float64() -> None:
    """The sink is one more score; its value is zero."""
    got = with_sinks(attended(), mx.array(SINKS))
    q, k, v = (np.array(x) for x in drawn())
    for row in range(2):
        output, lse = attend_span(q[row], k[row], v[row], 0.3)
        joined = np.logaddexp(lse, np.array(SINKS)[:, None])
        want = output * np.exp(lse - joined)[..., None]
        size = np.linalg.norm(want, axis=-1, keepdims=True)
        assert (np.abs(np.array(got.output[row]) - want) <= 4e-6 * size).all()
        np.testing.assert_allclose(np.array(got.lse[row]), joined, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_as_mlx_has_them(dtype: mx.Dtype) -> None:
    sinks = mx.array(SINKS).astype(dtype)
    got = with_sinks(attended(dtype), sinks)
    q, k, v = (x.astype(dtype) for x in drawn())
    want = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask="causal", sinks=sinks)
    assert got.output.dtype == want.dtype
    away = mx.abs(got.output.astype(mx.float32) - want.astype(mx.float32)).max().item()
    assert away < 8 * mx.finfo(dtype).eps


def test_after_the_segments_are_joined() -> None:
    """A sink counts once, however many parts the keys were read in."""
    q, k, v = drawn()
    q = q[:, :, :1]
    parts = [
        dispatch.packed_attention(q, k, v, Spans.of([start] * 2, [end] * 2), 0.3)
        for start, end in ((0, 11), (11, 17))
    ]
    joined = dispatch.join_segments(
        mx.stack([part.output for part in parts], axis=-2), mx.stack([part.lse for part in parts], axis=-1)
    )
    got = with_sinks(joined, mx.array(SINKS))
    want = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, sinks=mx.array(SINKS))
    np.testing.assert_allclose(np.array(got.output), np.array(want), atol=2e-6)


def test_a_query_that_sees_the_sink_alone() -> None:
    nothing = Attended(mx.zeros((1, 2, 3, 5)), mx.full((1, 2, 3), -mx.inf))
    got = with_sinks(nothing, mx.array([1.5, -mx.inf]))
    assert mx.array_equal(got.output, mx.zeros((1, 2, 3, 5)))
    np.testing.assert_allclose(np.array(got.lse[0]), [[1.5] * 3, [-np.inf] * 3])
