"""Positions turned by a matrix are those of mlx's own modules, whatever the pairs, positions and widths."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE, initialize_rope

from stateroom.daemon.engine.cpu_rope import FIELDS_MOST, KEPT_MOST, use_rotations

ROUNDING = 4 * np.finfo(np.float32).eps  # of the largest field: two products and their sum
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7}
LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": 1.0,
    "long_factor": [1.0, 1.1, 1.3, 1.7, 2.3],
}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.6}
LINEAR = {"rope_type": "linear", "factor": 2.5}


def modules_of(kind: dict[str, Any] | None, traditional: bool, dims: int = 10) -> tuple[Any, Any]:
    """The same module twice: as mlx-lm makes it, and turned by matrices."""
    plain, ours = (initialize_rope(dims, 1e4, traditional, kind, 512) for _ in range(2))
    model = nn.Sequential(ours)
    assert use_rotations(model) == 1
    assert use_rotations(model) == 0
    return plain, ours


def random_heads(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def oracle(x: mx.array, offsets: list[int], dims: int, traditional: bool, scale: float) -> npt.NDArray[Any]:
    """In float64, from angles that were rounded to float32 as mlx rounds them."""
    fields = np.array(x).astype(np.float64)
    half = dims // 2
    base = np.array(mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (np.log(1e4) / half)))
    out = fields.copy()
    for row in range(x.shape[0]):
        for token in range(x.shape[2]):
            position = np.float32(np.float32(offsets[row % len(offsets)] + token) * np.float32(scale))
            angle = (position * base).astype(np.float64)
            at = np.arange(half)
            first, second = (2 * at, 2 * at + 1) if traditional else (at, at + half)
            a, b = fields[row, :, token][:, first], fields[row, :, token][:, second]
            out[row, :, token][:, first] = a * np.cos(angle) - b * np.sin(angle)
            out[row, :, token][:, second] = a * np.sin(angle) + b * np.cos(angle)
    return out


@settings(deadline=None, max_examples=60)
@given(
    rows=st.sampled_from([1, 2, 3]),
    count=st.sampled_from([1, 2, 5]),
    width=st.sampled_from([10, 13, 23]),
    traditional=st.booleans(),
    scale=st.sampled_from([1.0, 0.4]),
    first=st.sampled_from([0, 1, 517, 6_001, 100_003]),
    each=st.booleans(),
)
def test_fields_are_those_of_the_oracle_and_of_mlx(
    rows: int, count: int, width: int, traditional: bool, scale: float, first: int, each: bool
) -> None:
    plain, ours = modules_of({"rope_type": "linear", "factor": 1 / scale}, traditional)
    x = random_heads(rows, 7, count, width, seed=width)
    offsets = [first + 11 * row for row in range(rows)] if each else [first]
    offset = mx.array(offsets, dtype=mx.int32) if each else first
    made, largest = np.array(ours(x, offset=offset)), float(mx.abs(x).max())
    assert np.abs(made - np.array(plain(x, offset=offset))).max() <= ROUNDING * largest
    assert np.abs(made - oracle(x, offsets, 10, traditional, plain.scale)).max() <= ROUNDING * largest


@pytest.mark.parametrize("kind", [None, LINEAR, LLAMA3, YARN, LONG, PROPORTIONAL])
@pytest.mark.parametrize("traditional", [False, True])
def test_every_kind_turns_as_it_did(kind: dict[str, Any] | None, traditional: bool) -> None:
    plain, ours = modules_of(kind, traditional)
    assert type(ours) is not type(plain)
    x = random_heads(2, 3, 1, 13)
    for offset in (3, mx.array([5, 301]), mx.array(7)):
        close = mx.abs(ours(x, offset=offset) - plain(x, offset=offset)).max()
        assert float(close) <= 3 * ROUNDING * float(mx.abs(x).max()), offset  # yarn's and long's also scale


def test_positions_that_change_in_place_are_seen() -> None:
    """mlx-lm's caches of batches add to the array that the model was given."""
    plain, ours = modules_of(None, False)
    x, offset = random_heads(2, 3, 1, 10), mx.array([4, 9])
    ours(x, offset=offset)
    offset += 5
    assert mx.allclose(ours(x, offset=offset), plain(x, offset=mx.array([9, 14])), atol=1e-6)
    assert not mx.allclose(ours(x, offset=offset), plain(x, offset=mx.array([4, 9])), atol=1e-3)


def test_modules_of_equal_parameters_share_few_matrices() -> None:
    one, same, other = nn.RoPE(10), nn.RoPE(10), nn.RoPE(10, base=500.0)
    use_rotations(nn.Sequential(one, same, other))
    assert one._rotation is same._rotation
    assert one._rotation is not other._rotation
    x = random_heads(1, 3, 1, 10)
    for position in range(3 * KEPT_MOST):
        one(x, offset=position)
    assert len(one._rotation._kept) == KEPT_MOST
    before = one._rotation._kept.copy()
    same(x, offset=3 * KEPT_MOST - 1)
    assert one._rotation._kept == before


def test_what_has_no_such_form_is_mlxs() -> None:
    """Many tokens, halves, other shapes, an inverse; to the last bit."""
    plain, ours = modules_of(None, False)
    for x in (
        random_heads(1, 3, FIELDS_MOST // 100 + 1, 10),
        random_heads(1, 3, 1, 10).astype(mx.bfloat16),
        random_heads(3, 2, 10),
    ):
        assert mx.array_equal(ours(x, offset=5), plain(x, offset=5))
    plain, ours = modules_of(YARN, False)
    x = random_heads(1, 3, 1, 10)
    assert mx.array_equal(ours(x, offset=5, inverse=True), plain(x, offset=5, inverse=True))


def test_a_base_that_depends_on_the_length_is_left_alone() -> None:
    module = initialize_rope(10, 1e4, False, {"rope_type": "dynamic", "factor": 2.0}, 64)
    assert use_rotations(nn.Sequential(module)) == 0
    assert type(module) is DynamicNTKScalingRoPE


def test_traces_may_contain_it() -> None:
    plain, ours = modules_of(None, True)
    x = random_heads(2, 3, 1, 10)
    traced = mx.compile(lambda x, at: ours(x, offset=at))
    for at in ([1, 2], [30, 4]):
        assert mx.allclose(traced(x, mx.array(at)), plain(x, offset=mx.array(at)), atol=1e-6)
    assert not ours._rotation._kept
