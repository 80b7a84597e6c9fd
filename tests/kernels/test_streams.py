"""Reads that are split between two streams are those of one, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.oracle import attend

from stateroom.kernels import dispatch, streams
from stateroom.kernels.dispatch import forced
from stateroom.kernels.planes import dequantised, quantised
from stateroom.kernels.spans import Spans

BOUND = 5e-6
pytestmark = pytest.mark.usefixtures("computed_on_the_cpu")


def drawn(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A second stream for reads of any size, and a note of each read that was split."""
    noted: list[int] = []
    monkeypatch.setattr(streams, "SCORES_LEAST", 1)
    plain = mx.stream

    def noting(stream: mx.Stream) -> Any:
        noted.append(1)
        return plain(stream)

    monkeypatch.setattr(streams.mx, "stream", noting)
    with forced("folded"), streams.using(mx.new_stream(mx.Device(mx.cpu))):
        yield noted


@pytest.mark.parametrize("shape", [(1, 6, 3), (1, 4, 4), (2, 6, 2), (5, 9, 3)])
@pytest.mark.parametrize("stored", [13, 701])
@pytest.mark.parametrize("masked", ["", "by rows", "alike"])
def test_decode_reads(shape: tuple[int, int, int], stored: int, masked: str, splits: list[int]) -> None:
    rows, heads, kv_heads = shape
    q, k, v = (
        drawn(1, rows, heads, 1, 7),
        drawn(2, rows, kv_heads, stored, 7),
        drawn(3, rows, kv_heads, stored, 5),
    )
    starts = [3 * row if masked == "by rows" else 4 * bool(masked) for row in range(rows)]
    mask = None
    if masked:
        mask = mx.arange(stored)[None, None, None] >= mx.array(starts)[:, None, None, None]
        mask = mask if masked == "by rows" else mask[:1]
    got = dispatch.decode_attention(q, k, v, 0.3, mask)
    assert splits == [1]
    for row, start in enumerate(starts):
        want = attend(*(np.array(a[row]) for a in (q, k[:, :, start:], v[:, :, start:])), 0.3)
        assert np.abs(np.array(got[row]) - want).max() <= BOUND


def test_a_lone_head_is_read_whole(splits: list[int]) -> None:
    dispatch.decode_attention(drawn(1, 1, 3, 1, 7), drawn(2, 1, 1, 99, 7), drawn(3, 1, 1, 99, 5), 0.3)
    assert splits == []


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_packed_reads(rows: int, bits: int, ragged: bool, count: int, splits: list[int]) -> None:
    """Level rows and ragged ones; a lone row is split by its columns, for one token that sees them all."""
    heads, kv_heads, stored, width = 6, 2, 203, 64
    q = drawn(1, rows, heads, count, width)
    planes = [drawn(seed, rows, kv_heads, stored, width) for seed in (2, 3)]
    keys, values = (quantised(plane, 32, bits) if bits else plane for plane in planes)
    spans = Spans.of([11 * row * ragged for row in range(rows)], [stored - 2] * rows)
    got = dispatch.packed_attention(q, keys, values, spans, 0.2)
    assert len(splits) == int(rows > 1 or count == 1)
    with streams.using(None):
        want = dispatch.packed_attention(q, keys, values, spans, 0.2)
    assert mx.allclose(got.output, want.output, atol=BOUND)
    assert mx.allclose(got.lse, want.lse, atol=BOUND)
    exact = [np.array(dequantised(plane)) for plane in (keys, values)]
    for row, start in enumerate(spans.starts):
        last = attend(np.array(q[row, :, -1:]), *(plane[row, :, start : stored - 2] for plane in exact), 0.2)
        assert np.abs(np.array(got.output[row, :, -1:]) - last).max() <= 5 * BOUND


@pytest.mark.parametrize("tokens", [1, streams.TOKENS_MOST, streams.TOKENS_MOST + 1])
def test_small_reads_and_prompts_are_not_split(tokens: int) -> None:
    least = streams.SCORES_LEAST
    with streams.using(None):
        assert not streams.splits(least, tokens)
    with streams.using(mx.new_stream(mx.Device(mx.cpu))):
        assert not streams.splits(least - 1, tokens)
        assert streams.splits(least, tokens) == (tokens <= streams.TOKENS_MOST)


def test_what_is_split_is_not_split_again() -> None:
    second = mx.new_stream(mx.Device(mx.cpu))
    inside: list[mx.Stream | None] = []

    def seen() -> mx.Stream:
        inside.append(streams.second())
        return mx.default_stream(mx.Device(mx.cpu))

    with streams.using(second):
        one, other = streams.side_by_side(seen, seen)
        assert streams.second() is second
    assert inside == [None, None]
    assert other == second != one
    assert mx.default_stream(mx.Device(mx.cpu)) == one


def test_a_failure_leaves_the_streams_as_they_were() -> None:
    second, device = mx.new_stream(mx.Device(mx.cpu)), mx.Device(mx.cpu)
    before = mx.default_stream(device)

    def fail() -> int:
        raise RuntimeError("injected")

    works: list[tuple[Callable[[], int], Callable[[], int]]] = [(fail, int), (int, fail)]
    for one, other in works:
        with streams.using(second):
            with pytest.raises(RuntimeError, match="injected"):
                streams.side_by_side(one, other)
            assert streams.second() is second
            assert mx.default_stream(device) == before


@given(st.lists(st.integers(1, 1_000), min_size=1, max_size=12), st.floats(0.1, 1.0))
def test_halves_are_even_or_none(sizes: list[int], even: float) -> None:
    half = streams.even_half(sizes, even)
    if half is not None:
        held = sum(sizes[at] for at in half)
        other = sum(sizes) - held
        assert len(set(half)) == len(half)
        assert min(held, other) >= even * max(held, other)


def test_even_halves_are_found() -> None:
    assert streams.even_half([4, 1, 2, 1], 1.0) == [0]
    assert streams.even_half([331, 110, 110], 0.5) == [0]
    assert streams.even_half([9, 1], 0.5) is None
    assert streams.even_half([5], 0.1) is None
