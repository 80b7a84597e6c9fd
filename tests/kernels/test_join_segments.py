"""Parts of an attention, joined, against one attention over everything, in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from tests.kernels.oracle import attend_span

from stateroom.kernels import host
from stateroom.kernels.host import host_run
from stateroom.kernels.join_segments import fused, reference
from stateroom.kernels.join_segments.reference import Attended

pytestmark = pytest.mark.usefixtures("computed_on_the_cpu")
FORMS = ["reference", pytest.param("host", marks=pytest.mark.skipif(not host.compiler(), reason="no g++"))]


def joined(form: str, outputs: mx.array, lse: mx.array) -> Attended:
    if form == "reference":
        return reference.join_segments(outputs, lse)
    return fused.join_segments(host_run, outputs, lse)


def parts(random: np.random.Generator, cuts: list[int]) -> tuple[np.ndarray, ...]:
    """Attention to [0, cut), [cut, cut'), ... apart, and to all: 6 heads, 3 queries, 5 values a token."""
    queries = random.normal(size=(6, 1, 7)) * 2
    keys, values = random.normal(size=(2, cuts[-1], 7)), random.normal(size=(2, cuts[-1], 5))
    apart = [
        attend_span(queries, keys[:, start:end], values[:, start:end], 0.9)
        for start, end in zip([0, *cuts], cuts, strict=False)
    ]
    return (
        *(np.stack(x, axis=2) for x in zip(*apart, strict=True)),
        *attend_span(queries, keys, values, 0.9),
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cuts", [[11], [3, 17], [0, 5, 5, 19, 23], list(range(1, 42))])
def test_parts_make_the_whole(cuts: list[int], form: str) -> None:
    """Also of one part, of empty ones, and of more parts than a SIMD group has lanes."""
    rows = [parts(np.random.default_rng(seed), cuts) for seed in range(3)]
    outputs, lse, whole, whole_lse = (np.stack(x).astype(np.float32) for x in zip(*rows, strict=True))
    got = joined(form, mx.array(outputs), mx.array(lse))
    assert got.output.shape == (3, 6, 1, 5)
    assert got.lse.shape == (3, 6, 1)
    away = np.linalg.norm(np.array(got.output) - whole, axis=-1)
    assert (away <= 2e-6 * np.linalg.norm(whole, axis=-1)).all()
    np.testing.assert_allclose(np.array(got.lse), whole_lse, rtol=0, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_joined_with_nothing_is_nothing(form: str) -> None:
    got = joined(form, mx.zeros((2, 3, 1, 4, 37)), mx.full((2, 3, 1, 4), -mx.inf))
    assert mx.array_equal(got.output, mx.zeros((2, 3, 1, 37)))
    assert mx.array_equal(got.lse, mx.full((2, 3, 1), -mx.inf))


@pytest.mark.parametrize("form", FORMS)
def test_far_apart_parts(form: str) -> None:
    """A part that outweighs the others by e^200 is the answer, bit for bit."""
    outputs = mx.array(np.random.default_rng(5).normal(size=(1, 1, 1, 3, 7)).astype(np.float32))
    for heavy in range(3):
        lse = mx.array([[[[100.0 if part == heavy else -100.0 for part in range(3)]]]])
        got = joined(form, outputs, lse)
        assert mx.array_equal(got.output, outputs[:, :, :, heavy])
        assert got.lse.item() == 100.0


@pytest.mark.skipif(not host.compiler(), reason="no g++")
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_the_answer_has_the_dtype_asked_for(dtype: mx.Dtype) -> None:
    outputs = mx.array(np.random.default_rng(5).normal(size=(2, 1, 3, 2, 41)).astype(np.float32))
    lse = mx.array(np.random.default_rng(6).normal(size=(2, 1, 3, 2)).astype(np.float32))
    got, want = fused.join_segments(host_run, outputs, lse, dtype), reference.join_segments(outputs, lse)
    assert got.output.dtype == dtype
    away = mx.abs(got.output.astype(mx.float32) - want.output).max().item()
    assert away < 4 * mx.finfo(dtype).eps
