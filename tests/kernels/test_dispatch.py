"""Which form runs where, and that callers see no difference."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from tests.kernels.test_packed_attention import SHAPES, drawn

from stateroom.kernels import dispatch, host
from stateroom.kernels.dispatch import Form
from stateroom.kernels.spans import Spans

WITHOUT_GPU = not (mx.metal.is_available() or mx.cuda.is_available())
needs_gxx = pytest.mark.skipif(not host.compiler(), reason="no g++")


@needs_gxx
@pytest.mark.parametrize("name", ["ragged", "affine 8", "queries in a window"])
def test_every_form_reads_the_same(name: str) -> None:
    case = drawn(SHAPES[name], mx.float32)
    given = (case.queries, case.keys, case.values, case.spans, case.scale, case.shape.window)
    forms: list[Form] = ["folded", "quantised", "host"]
    if not WITHOUT_GPU:
        forms.append("fused")
    read = []
    for form in forms:
        where = mx.gpu if form == "fused" else mx.cpu
        with dispatch.forced(form), mx.stream(where):
            read.append(dispatch.packed_attention(*given))
    with dispatch.forced("host"), mx.stream(mx.cpu):
        read.append(dispatch.window_attention(*given))
    for other in read[1:]:
        np.testing.assert_allclose(np.array(other.output), np.array(read[0].output), atol=4e-6)
        np.testing.assert_allclose(np.array(other.lse), np.array(read[0].lse), atol=4e-6)


@needs_gxx
def test_joined_parts_are_the_whole_read() -> None:
    """A trunk and a tail, read apart."""
    case = drawn(SHAPES["one row"], mx.float32)
    given = (case.queries, case.keys, case.values)
    for form in ("folded", "host"):
        with dispatch.forced(form), mx.stream(mx.cpu):
            whole = dispatch.packed_attention(*given, Spans.of([0], [23]), case.scale)
            parts = [
                dispatch.packed_attention(*given, Spans.of([start], [end]), case.scale)
                for start, end in ((0, 17), (17, 23))
            ]
            joined = dispatch.join_segments(
                mx.stack([part.output for part in parts], axis=-2),
                mx.stack([part.lse for part in parts], axis=-1),
            )
        np.testing.assert_allclose(np.array(joined.output), np.array(whole.output), atol=4e-6)
        np.testing.assert_allclose(np.array(joined.lse), np.array(whole.lse), atol=4e-6)


def test_widths_without_a_kernel_take_the_products() -> None:
    queries, plane = mx.ones((1, 2, 1, 40)), mx.ones((1, 1, 5, 40))
    with dispatch.forced("fused"):
        got = dispatch.packed_attention(queries, plane, plane, Spans.of([1], [4]), 0.1)
    np.testing.assert_allclose(np.array(got.output), 1.0, atol=1e-6)


def test_spans_of_other_planes_are_refused() -> None:
    """A kernel would read past the end."""
    queries, plane = mx.ones((2, 2, 1, 64)), mx.ones((2, 1, 5, 64))
    for read in (dispatch.packed_attention, dispatch.window_attention, dispatch.span_attention):
        for spans in (Spans.of([0], [5]), Spans.of([0, 1], [5, 6])):
            with pytest.raises(ValueError, match="in 2 rows of 5 columns"):
                read(queries, plane, plane, spans, 0.1)


def test_clean_values_are_not_silenced() -> None:
    """It is the caller's word: zeros outside the spans give the same, to the bit."""
    case = drawn(SHAPES["ragged"], mx.float32)
    assert isinstance(case.values, mx.array)
    values = mx.where(mx.isnan(case.values), 0.0, case.values)
    given = (case.spans, case.scale)
    with dispatch.forced("folded"), mx.stream(mx.cpu):
        careful = dispatch.packed_attention(case.queries, case.keys, case.values, *given)
        trusting = dispatch.packed_attention(case.queries, case.keys, values, *given, clean=True)
        wrong = dispatch.packed_attention(case.queries, case.keys, case.values, *given, clean=True)
    assert mx.array_equal(careful.output, trusting.output)
    assert mx.isnan(wrong.output).any()


@pytest.mark.skipif(not WITHOUT_GPU, reason="there is a GPU")
def test_a_fused_read_without_a_gpu_says_so() -> None:
    case = drawn(SHAPES["one row"], mx.float32)
    with dispatch.forced("fused"), pytest.raises(RuntimeError, match="packed_attention needs a GPU"):
        dispatch.packed_attention(case.queries, case.keys, case.values, case.spans, case.scale)


def test_blocks_by_chip() -> None:
    assert dispatch.decode_block("Apple M1 Max") == 128
    assert dispatch.decode_block("Apple M4") == 512
    assert dispatch.decode_block("NVIDIA H200") == 512
