"""Reads through every pair of codecs against float64 attention over what the planes stand for.

Every dimension differs from the others; what no query may see holds NaN, and words of all bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.caches.codecs.kinds import Kind, codec_of
from tests.caches.codecs.oracle import decoded, numbers
from tests.kernels.oracle import attend_span

from stateroom.caches.codecs.read import read
from stateroom.kernels import dispatch, host
from stateroom.kernels.join_segments.reference import Attended
from stateroom.kernels.spans import Spans

# Of the norm of a head's output; an output in halves may be off by one rounding of the answer besides.
BOUND = 2e-6
pytestmark = pytest.mark.usefixtures("computed_on_the_cpu")


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    count: int
    capacity: int
    keys: Kind
    values: Kind
    spans: tuple[tuple[int, int], ...]
    window: int | None = None


RAGGED = ((0, 29), (7, 7), (28, 29), (3, 22))
SHAPES = {
    "dense": Shape(6, 2, 1, 29, ("dense", 37), ("dense", 41), RAGGED),
    "affine 4": Shape(10, 5, 3, 31, ("affine4", 64), ("affine4", 96), RAGGED),
    "affine 8": Shape(7, 7, 1, 31, ("affine8", 160), ("affine8", 128), RAGGED),
    "turbo": Shape(9, 3, 1, 31, ("turbo8", 64), ("turbo3", 64), RAGGED),
    "turbo of two widths": Shape(22, 2, 1, 29, ("turbo7", 128), ("turbo5", 256), RAGGED),
    "turbo, several queries": Shape(6, 2, 5, 37, ("turbo8", 64), ("turbo3", 64), RAGGED),
    "turbo in a window": Shape(4, 1, 3, 41, ("turbo3", 64), ("turbo1", 512), RAGGED, window=7),
    "turbo and affine": Shape(10, 2, 1, 29, ("turbo8", 64), ("affine4", 96), RAGGED),
    "affine and turbo": Shape(3, 1, 5, 31, ("affine8", 128), ("turbo3", 64), RAGGED, window=11),
    "dense and turbo": Shape(12, 3, 1, 31, ("dense", 128), ("turbo3", 64), ((5, 31), (0, 1))),
    "turbo and dense": Shape(8, 2, 2, 31, ("turbo8", 64), ("dense", 64), ((31, 31), (0, 1))),
}


def poisoned(plane: mx.array, spans: Spans) -> mx.array:
    live = spans.live(plane.shape[2])[:, None, :, None]
    return mx.where(live, plane, mx.array(0xFFFFFFFF if plane.dtype == mx.uint32 else np.nan, plane.dtype))


def vectors(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    numbers = np.random.default_rng(seed).normal(size=shape) + 0.75
    return mx.array(numbers.astype(np.float32)).astype(dtype)


def check(shape: Shape, dtype: mx.Dtype, seed: int = 7) -> Attended:
    rows, spans = len(shape.spans), Spans.of(*zip(*shape.spans, strict=True))
    queries = vectors((rows, shape.heads, shape.count, shape.keys[1]), dtype, seed)
    scale = 0.7 / shape.keys[1] ** 0.5

    def planes(kind: Kind, drawn: int) -> list[mx.array]:
        given = vectors((rows, shape.kv_heads, shape.capacity, kind[1]), dtype, drawn)
        return [poisoned(plane, spans) for plane in codec_of(kind, dtype).encode(given)]

    key_codec, value_codec = codec_of(shape.keys, dtype), codec_of(shape.values, dtype)
    keys, values = planes(shape.keys, seed + 1), planes(shape.values, seed + 2)
    got = read(queries, key_codec, keys, value_codec, values, spans, scale, shape.window)
    assert got.output.dtype == dtype
    assert got.output.shape == (rows, shape.heads, shape.count, shape.values[1])
    assert got.lse.shape == (rows, shape.heads, shape.count)
    asked, stored_keys, stored_values = (
        numbers(queries),
        decoded(key_codec, keys),
        decoded(value_codec, values),
    )
    for row, (start, end) in enumerate(shape.spans):
        live = (row, slice(None), slice(start, end))
        wanted, lse = attend_span(asked[row], stored_keys[live], stored_values[live], scale, shape.window)
        off = np.abs(numbers(got.output)[row] - wanted)
        norm = np.linalg.norm(wanted, axis=-1, keepdims=True)
        rounding = 0 if dtype == mx.float32 else mx.finfo(dtype).eps / 2 * np.abs(wanted)
        assert (off <= BOUND * norm + rounding).all(), row
        np.testing.assert_allclose(np.array(got.lse)[row], lse, rtol=0, atol=4e-6)
    return got


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("name", list(SHAPES))
def test_against_float64(name: str, dtype: mx.Dtype) -> None:
    check(SHAPES[name], dtype)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    capacity = draw(st.integers(1, 37))
    starts = draw(st.lists(st.integers(0, capacity), min_size=1, max_size=4))
    spans = tuple((start, draw(st.integers(start, capacity))) for start in starts)
    kv_heads, factor, count = (
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 2, 5])),
        draw(st.integers(1, 4)),
    )
    keys = draw(st.sampled_from([("dense", 37), ("affine4", 64), ("turbo8", 64), ("turbo3", 64)]))
    values = draw(st.sampled_from([("dense", 41), ("affine8", 128), ("turbo3", 64)]))
    window = draw(st.none() | st.integers(1, 41))
    return Shape(kv_heads * factor, kv_heads, count, capacity, keys, values, spans, window)


@settings(max_examples=60, deadline=None)
@given(shape=shapes(), seed=st.integers(0, 99))
def test_any_spans(shape: Shape, seed: int) -> None:
    check(shape, mx.float32, seed)


@pytest.mark.skipif(not host.compiler(), reason="no g++")
@pytest.mark.parametrize("name", ["turbo", "affine and turbo"])
def test_as_the_gpus_kernel_reads_them(name: str) -> None:
    with dispatch.forced("host"):
        check(SHAPES[name], mx.bfloat16)


@pytest.mark.parametrize("kind", [("dense", 64), ("affine4", 64), ("turbo8", 64)])
def test_a_spoiled_token_spoils_who_sees_it(kind: Kind) -> None:
    """And a spoiled key nobody else; a value meets the weights of all that are read with it, 0 too."""
    codec, sound = codec_of(kind, mx.float32), vectors((1, 1, 5, 64), mx.float32, 1)
    spoiled = mx.where((mx.arange(5) == 3)[:, None], mx.array(np.nan), sound)
    planes, bad = codec.encode(sound), codec.encode(spoiled)
    queries, spans = vectors((1, 2, 3, 64), mx.float32, 2), Spans.of([0], [5])

    def finite(keys: tuple[mx.array, ...], values: tuple[mx.array, ...]) -> list[bool]:
        output = read(queries, codec, keys, codec, values, spans, 0.1).output
        return mx.all(mx.isfinite(output), axis=(0, 1, 3)).tolist()

    assert finite(planes, planes) == [True, True, True]
    assert finite(bad, planes) == [True, False, False]
    assert finite(planes, bad)[1:] == [False, False]
