"""Reads under any mask, and of whole spans, in every form against float64; NaN in what nobody may see."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.oracle import attend_seen
from tests.kernels.test_packed_attention import exact

from stateroom.kernels import dispatch, host
from stateroom.kernels.dispatch import Form
from stateroom.kernels.join_segments.reference import Attended
from stateroom.kernels.packed_attention import folded, reference
from stateroom.kernels.packed_attention.folded import Products
from stateroom.kernels.planes import Plane, arrays, like, quantised
from stateroom.kernels.spans import Spans

pytestmark = pytest.mark.usefixtures("computed_on_the_cpu")
PRODUCTS: list[Products] = ["folded", "quantised"]
FORMS = [*PRODUCTS, pytest.param("host", marks=pytest.mark.skipif(not host.compiler(), reason="no g++"))]
PACKINGS = [None, (4, 32), (8, 64)]
HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 6, 2, 64, 128
BOUND = 2e-6

Packing = tuple[int, int] | None


def drawn(random: np.random.Generator, rows: int, stored: int, width: int, packing: Packing) -> Plane:
    dense = mx.array(random.normal(size=(rows, KV_HEADS, stored, width)).astype(np.float32) + 0.75)
    return dense if packing is None else quantised(dense, group=packing[1], bits=packing[0])


def poisoned(plane: Plane, live: np.ndarray) -> Plane:
    """NaN, or all bits set, where `live` [B, S] is false."""
    seen = mx.array(live)[:, None, :, None]
    junk = [mx.array(0xFFFFFFFF if p.dtype == mx.uint32 else np.nan, p.dtype) for p in arrays(plane)]
    return like(plane, [mx.where(seen, p, j) for p, j in zip(arrays(plane), junk, strict=True)])


def check(
    got: Attended, queries: mx.array, keys: Plane, values: Plane, seen: np.ndarray, scale: float
) -> None:
    """seen [B, N, S]."""
    assert got.output.dtype == queries.dtype
    assert got.output.shape == (*queries.shape[:3], VALUE_WIDTH)
    assert got.lse.shape == queries.shape[:3]
    asked = np.array(queries.astype(mx.float32))
    for row in range(queries.shape[0]):
        want, want_lse = attend_seen(asked[row], exact(keys)[row], exact(values)[row], seen[row], scale)
        away = np.abs(np.array(got.output[row].astype(mx.float32)) - want)
        rounding = 0 if queries.dtype == mx.float32 else mx.finfo(queries.dtype).eps / 2 * np.abs(want)
        assert (away <= BOUND * np.linalg.norm(want, axis=-1, keepdims=True) + rounding).all(), row
        np.testing.assert_allclose(np.array(got.lse[row]), want_lse, rtol=0, atol=4e-6)


@pytest.mark.parametrize("form", ["reference", *PRODUCTS])
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 3),
    count=st.sampled_from([1, 5]),
    stored=st.integers(1, 29),
    shown=st.sampled_from([0.05, 0.5, 1.0]),
    shared=st.booleans(),
    packing=st.sampled_from(PACKINGS),
    seed=st.integers(0, 99),
)
def test_any_mask(
    form: str, rows: int, count: int, stored: int, shown: float, shared: bool, packing: Packing, seed: int
) -> None:
    """Of each row or shared by all; queries and rows that see nothing among them."""
    random = np.random.default_rng(seed)
    mask = random.uniform(size=(1 if shared else rows, 1, count, stored)) < shown
    seen = np.broadcast_to(mask[:, 0], (rows, count, stored))
    queries = mx.array(random.normal(size=(rows, HEADS, count, WIDTH)).astype(np.float32))
    keys = poisoned(drawn(random, rows, stored, WIDTH, packing), seen.any(1))
    values = drawn(random, rows, stored, VALUE_WIDTH, packing)
    given = (mx.array(mask), 0.21)
    if form == "reference":
        got = reference.masked_attention(queries, keys, values, *given)
    else:
        with dispatch.forced(form):  # type: ignore[arg-type]
            clean = dispatch.masked_attention(queries, keys, values, *given, clean=True)
            got = dispatch.masked_attention(queries, keys, poisoned(values, seen.any(1)), *given)
        for one, other in zip(clean, got, strict=True):
            assert mx.array_equal(one, other)
    check(got, queries, keys, values, seen, 0.21)


@pytest.mark.parametrize("form", PRODUCTS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_halves_under_a_mask(dtype: mx.Dtype, form: Form) -> None:
    random = np.random.default_rng(3)
    mask = random.uniform(size=(2, 1, 3, 31)) < 0.4
    queries = mx.array(random.normal(size=(2, HEADS, 3, WIDTH)).astype(np.float32)).astype(dtype)
    keys, values = (drawn(random, 2, 31, width, (4, 64)) for width in (WIDTH, VALUE_WIDTH))
    with dispatch.forced(form):
        got = dispatch.masked_attention(queries, keys, values, mx.array(mask), 0.21)
    check(got, queries, keys, values, mask[:, 0], 0.21)


@pytest.mark.parametrize("form", PRODUCTS)
@pytest.mark.parametrize("rows_of_mask", [1, 3])
def test_rows_and_queries_apart(form: Products, rows_of_mask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(folded.SCORES_MAX, form, 20)
    monkeypatch.setattr(folded, "QUERIES_MIN", 2)
    random = np.random.default_rng(29)
    mask = random.uniform(size=(rows_of_mask, 1, 5, 31)) < 0.4
    queries = mx.array(random.normal(size=(3, HEADS, 5, WIDTH)).astype(np.float32))
    keys, values = (drawn(random, 3, 31, width, (4, 64)) for width in (WIDTH, VALUE_WIDTH))
    with dispatch.forced(form):
        got = dispatch.masked_attention(queries, keys, values, mx.array(mask), 0.21)
    check(got, queries, keys, values, np.broadcast_to(mask[:, 0], (3, 5, 31)), 0.21)


@pytest.mark.parametrize("form", PRODUCTS)
def test_no_columns_at_all(form: Form) -> None:
    plane = mx.zeros((2, 1, 0, 7))
    with dispatch.forced(form):
        got = dispatch.masked_attention(
            mx.ones((2, 3, 5, 7)), plane, plane, mx.zeros((1, 1, 5, 0), mx.bool_), 1.0
        )
    assert mx.array_equal(got.output, mx.zeros((2, 3, 5, 7)))
    assert mx.array_equal(got.lse, mx.full((2, 3, 5), -mx.inf))


def test_what_is_no_mask_of_the_planes_is_refused() -> None:
    queries, plane = mx.ones((3, 2, 5, 7)), mx.ones((3, 1, 11, 7))
    for mask in (
        mx.zeros((3, 1, 5, 11)),  # additive
        mx.ones((5, 11), mx.bool_),
        mx.ones((2, 1, 5, 11), mx.bool_),
        mx.ones((3, 2, 5, 11), mx.bool_),
        mx.ones((3, 1, 1, 11), mx.bool_),
        mx.ones((3, 1, 5, 10), mx.bool_),
    ):
        with pytest.raises(ValueError, match="5 queries in 3 rows of 11 columns"):
            dispatch.masked_attention(queries, plane, plane, mask, 1.0)


SPANS = [[(0, 23)], [(3, 19), (7, 7), (0, 29), (28, 29)], [(5, 5), (0, 0)], [(4, 17)] * 3]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("spans", SPANS)
def test_spans_are_seen_whole(spans: list[tuple[int, int]], packing: Packing, form: Form) -> None:
    """Every query sees every token of its row, the first query the last token too."""
    random = np.random.default_rng(17)
    rows, count, stored = len(spans), 5, 31
    live = np.zeros((rows, stored), bool)
    for row, (start, end) in enumerate(spans):
        live[row, start:end] = True
    queries = mx.array(random.normal(size=(rows, HEADS, count, WIDTH)).astype(np.float32))
    keys, values = (
        poisoned(drawn(random, rows, stored, width, packing), live) for width in (WIDTH, VALUE_WIDTH)
    )
    with dispatch.forced(form):
        got = dispatch.span_attention(queries, keys, values, Spans.of(*zip(*spans, strict=True)), 0.21)
    check(got, queries, keys, values, np.repeat(live[:, None], count, axis=1), 0.21)


@pytest.mark.parametrize("form", FORMS)
def test_a_block_and_what_was_stored_before_it(form: Form) -> None:
    """`read_block`: stored tokens, none in one of the rows, then the block's own, joined, are one read."""
    random = np.random.default_rng(19)
    stored, block = (
        [drawn(random, 2, tokens, width, packing) for width in (WIDTH, VALUE_WIDTH)]
        for tokens, packing in ((13, (8, 32)), (5, None))
    )
    queries = mx.array(random.normal(size=(2, HEADS, 5, WIDTH)).astype(np.float32))
    with dispatch.forced(form):
        parts = [
            dispatch.span_attention(queries, *stored, Spans.of([2, 13], [13, 13]), 0.21),
            dispatch.span_attention(queries, *block, Spans.of([0, 0], [5, 5]), 0.21),
        ]
        joined = dispatch.join_segments(
            mx.stack([part.output for part in parts], axis=-2),
            mx.stack([part.lse for part in parts], axis=-1),
        )
    seen = np.ones((2, 5, 18), bool)
    seen[0, :, :2] = seen[1, :, :13] = False
    keys, values = (
        mx.array(np.concatenate([exact(a), exact(b)], axis=2).astype(np.float32))
        for a, b in zip(stored, block, strict=True)
    )
    check(joined, queries, keys, values, seen, 0.21)
    assert mx.array_equal(joined.output[1], parts[1].output[1])
