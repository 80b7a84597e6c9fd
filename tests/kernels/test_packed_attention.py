"""The read of packed rows: its definition, as products, and as the fused kernel on the host, against float64.

Every dimension differs from the others; what no query may see holds NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.oracle import attend_span, unpacked

from stateroom.kernels import host
from stateroom.kernels.host import host_run
from stateroom.kernels.join_segments.reference import Attended
from stateroom.kernels.packed_attention import folded, fused, reference
from stateroom.kernels.planes import Affine, Plane, arrays, dequantised, like, quantised
from stateroom.kernels.source import Launch
from stateroom.kernels.spans import Spans

# Of the norm of a head's output. Halves are computed in float32 too, so beyond this they may be off by one
# rounding of the answer: in bfloat16 that alone is 1.1e-3 to 2.3e-3 of the norm.
BOUND = 2e-6
pytestmark = pytest.mark.usefixtures("computed_on_the_cpu")
FORMS = [
    "reference",
    "folded",
    "quantised",
    pytest.param("host", marks=pytest.mark.skipif(not host.compiler(), reason="no g++")),
]


@dataclass(frozen=True)
class Shape:
    """Rows are as many as `spans`; keys and values are of `scheme`: "dense" or (bits, group)."""

    heads: int
    kv_heads: int
    count: int
    capacity: int
    width: int
    value_width: int
    spans: Sequence[tuple[int, int]]
    keys: tuple[int, int] | None = None
    values: tuple[int, int] | None = None
    window: int | None = None
    block: int = 512


SHAPES = {
    "one row": Shape(3, 1, 1, 29, 64, 128, [(0, 23)], block=11),
    "ragged": Shape(10, 2, 1, 41, 128, 64, [(0, 41), (7, 7), (40, 41), (3, 30)], block=13),
    "wide, many heads": Shape(22, 2, 1, 19, 256, 128, [(2, 19), (0, 5), (11, 18)]),
    "affine 4": Shape(14, 7, 1, 31, 128, 64, [(1, 30), (17, 31)], (4, 64), (4, 32), block=8),
    "affine 8": Shape(6, 2, 1, 37, 64, 256, [(5, 37), (0, 1), (9, 28)], (8, 32), (8, 128), block=7),
    "head 256 in fours": Shape(4, 2, 1, 53, 256, 256, [(0, 53)], (4, 64), (4, 64), block=17),
    "k8 v4": Shape(9, 3, 1, 23, 256, 128, [(0, 23), (4, 21)], (8, 128), (4, 128)),
    "keys alone": Shape(5, 5, 1, 17, 128, 64, [(3, 14), (0, 17)], (8, 64), None),
    "windowed": Shape(6, 3, 1, 43, 64, 128, [(0, 43), (13, 20), (2, 31)], window=11, block=5),
    "four queries": Shape(
        6, 2, 4, 29, 64, 128, [(0, 29), (5, 9), (20, 23), (8, 8)], (4, 32), (8, 64), block=9
    ),
    "many queries": Shape(21, 3, 5, 31, 256, 64, [(2, 31), (0, 17)], (8, 32), (4, 32), block=13),
    "queries in a window": Shape(4, 2, 3, 47, 128, 64, [(0, 47), (11, 17), (1, 40)], window=7, block=4),
    "level": Shape(6, 2, 1, 37, 128, 64, [(5, 31)] * 3, (8, 64), (4, 32)),
    "level, four queries": Shape(6, 3, 4, 37, 64, 128, [(5, 31)] * 2, (4, 32), (8, 64), block=7),
    "level, more queries than tokens": Shape(3, 1, 7, 23, 64, 64, [(2, 5)] * 2, None, (8, 32)),
    "level in a window": Shape(6, 2, 1, 29, 64, 128, [(0, 23)] * 2, (8, 32), (4, 128), window=5, block=3),
    "window of one": Shape(2, 1, 5, 13, 64, 128, [(0, 13), (2, 11)], (4, 32), None, window=1),
}


@dataclass(frozen=True)
class Case:
    shape: Shape
    queries: mx.array
    keys: Plane
    values: Plane
    spans: Spans
    scale: float


def drawn(shape: Shape, dtype: mx.Dtype, seed: int = 7) -> Case:
    random = np.random.default_rng(seed)
    rows = len(shape.spans)
    spans = Spans.of(*zip(*shape.spans, strict=True))

    def plane(width: int, packing: tuple[int, int] | None) -> Plane:
        numbers = random.normal(size=(rows, shape.kv_heads, shape.capacity, width)) + 0.75
        dense = mx.array(numbers.astype(np.float32)).astype(dtype)
        made = dense if packing is None else quantised(dense, group=packing[1], bits=packing[0])
        return poisoned(made, spans)

    queries = random.normal(size=(rows, shape.heads, shape.count, shape.width)).astype(np.float32)
    return Case(
        shape,
        mx.array(queries).astype(dtype),
        plane(shape.width, shape.keys),
        plane(shape.value_width, shape.values),
        spans,
        0.7 / shape.width**0.5,
    )


def poisoned(plane: Plane, spans: Spans) -> Plane:
    """NaN, or all bits set, wherever no token is."""
    live = spans.live(plane.shape[2])[:, None, :, None]
    junk = [mx.array(0xFFFFFFFF if p.dtype == mx.uint32 else np.nan, p.dtype) for p in arrays(plane)]
    return like(plane, [mx.where(live, p, j) for p, j in zip(arrays(plane), junk, strict=True)])


def exact(plane: Plane) -> np.ndarray:
    if isinstance(plane, Affine):
        parts = [np.array(p if p.dtype == mx.uint32 else p.astype(mx.float32)) for p in arrays(plane)]
        return unpacked(*parts, plane.group, plane.bits)
    return np.array(plane.astype(mx.float32))


def backwards(launch: Launch) -> list[mx.array]:
    return host_run(launch, backwards=True)


def attended(form: str, case: Case) -> Attended:
    given = (case.queries, case.keys, case.values, case.spans, case.scale, case.shape.window)
    if form == "reference":
        return reference.packed_attention(*given)
    if form == "folded" or form == "quantised":
        return folded.packed_attention(form, *given)
    forwards = fused.packed_attention(host_run, *given, block=case.shape.block)
    turned = fused.packed_attention(backwards, *given, block=case.shape.block)
    for one, other in zip(forwards, turned, strict=True):
        assert mx.array_equal(one, other)
    return forwards


def check(form: str, case: Case) -> None:
    got = attended(form, case)
    dtype = case.queries.dtype
    rows, heads, count, _ = case.queries.shape
    assert got.output.dtype == dtype
    assert got.output.shape == (rows, heads, count, case.shape.value_width)
    assert got.lse.dtype == mx.float32
    assert got.lse.shape == (rows, heads, count)
    output, lse = np.array(got.output.astype(mx.float32)), np.array(got.lse)
    queries = np.array(case.queries.astype(mx.float32))
    keys, values = exact(case.keys), exact(case.values)
    for row, (start, end) in enumerate(case.shape.spans):
        live = slice(start, end)
        wanted, wanted_lse = attend_span(
            queries[row], keys[row, :, live], values[row, :, live], case.scale, case.shape.window
        )
        rounding = mx.finfo(dtype).eps / 2 * np.abs(wanted)
        within = BOUND * np.linalg.norm(wanted, axis=-1, keepdims=True) + rounding
        assert (np.abs(output[row] - wanted) <= within).all(), row
        np.testing.assert_allclose(lse[row], wanted_lse, rtol=0, atol=4e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", list(SHAPES))
def test_against_float64(name: str, form: str) -> None:
    check(form, drawn(SHAPES[name], mx.float32))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("name", ["ragged", "affine 4", "k8 v4", "queries in a window"])
def test_halves_are_read_as_they_are(name: str, dtype: mx.Dtype, form: str) -> None:
    check(form, drawn(SHAPES[name], dtype))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Spans, windows and blocks of every relation; few geometries, since each is compiled."""
    capacity = draw(st.integers(1, 40))
    starts = draw(st.lists(st.integers(0, capacity), min_size=1, max_size=4))
    spans = [(start, draw(st.integers(start, capacity))) for start in starts]
    count = draw(st.sampled_from([1, 3]))
    packing = draw(st.sampled_from([None, (4, 64)]))
    window = draw(st.none() | st.integers(1, 45))
    block = draw(st.integers(3, 50))
    return Shape(6, 2, count, capacity, 64, 128, spans, packing, packing, window, block)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25, deadline=None)
@given(shape=shapes(), seed=st.integers(0, 99))
def test_any_spans(form: str, shape: Shape, seed: int) -> None:
    check(form, drawn(shape, mx.float32, seed))


@pytest.mark.parametrize("form", ["folded", "quantised"])
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "one row"])
def test_rows_and_queries_apart(name: str, form: folded.Products, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too much for one product is read row by row, and then two queries at a time."""
    monkeypatch.setitem(folded.SCORES_MAX, form, 20)
    monkeypatch.setattr(folded, "QUERIES_MIN", 2)
    check(form, drawn(SHAPES[name], mx.float32))


@pytest.mark.parametrize("form", FORMS)
def test_scores_far_apart_stay_exact(form: str) -> None:
    """A late score a hundred above the others takes all the weight, and a hundred below takes none."""
    case = drawn(SHAPES["one row"], mx.float32)
    keys = np.zeros(case.keys.shape, np.float32)
    queries = np.zeros(case.queries.shape, np.float32)
    queries[..., 3] = 1 / case.scale
    keys[..., 3] = np.linspace(-120, 100, keys.shape[2])
    check(form, Case(case.shape, mx.array(queries), mx.array(keys), case.values, case.spans, case.scale))


@pytest.mark.parametrize("form", FORMS)
def test_no_row_sees_anything(form: str) -> None:
    """B03: zeros and -inf, never NaN."""
    check(form, drawn(Shape(4, 2, 3, 9, 64, 128, [(5, 5), (0, 0)], (4, 32)), mx.float32))


@pytest.mark.parametrize("packing", [(4, 32), (4, 128), (8, 64)])
def test_the_packing_is_mlxs(packing: tuple[int, int]) -> None:
    """The oracle's reading of the bits, mlx's own, and what went in agree."""
    dense = mx.array(np.random.default_rng(3).normal(size=(2, 3, 5, 128)).astype(np.float32))
    plane = quantised(dense, group=packing[1], bits=packing[0])
    assert plane.shape == dense.shape
    np.testing.assert_allclose(exact(plane), np.array(dequantised(plane)), atol=1e-6)
    assert np.abs(exact(plane) - np.array(dense)).max() < 6 / 2 ** packing[0]


def test_what_is_no_plane_is_refused() -> None:
    plane = quantised(mx.zeros((1, 1, 2, 64)), group=32, bits=4)
    with pytest.raises(ValueError, match="3 bits"):
        Affine(plane.words, plane.scales, plane.biases, 32, 3)
    with pytest.raises(ValueError, match="groups of 64"):
        Affine(plane.words, plane.scales, plane.biases, 64, 4)
    with pytest.raises(ValueError, match="no spans"):
        Spans.of([3], [2])
    with pytest.raises(ValueError, match="2 starts"):
        Spans.of([3, 4], [5])


def test_which_reads_are_fused() -> None:
    def fits(width: int, value_width: int, heads: int = 4, count: int = 1) -> bool:
        keys, values = mx.zeros((1, 2, 3, width)), mx.zeros((1, 2, 3, value_width))
        return fused.supported(mx.zeros((1, heads, count, width)), keys, values)

    assert fits(64, 256)
    assert not fits(96, 64)
    assert not fits(64, 80)
    assert fits(128, 128, heads=32, count=4)
    assert not fits(128, 128, heads=32, count=5)
