"""The reads of 4-bit heads of 256: which serves which call, each to the bit, and how far they are apart."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from tests.kernels.test_packed_attention import Case, Shape, drawn

from stateroom.kernels import dispatch, host, kv4_set
from stateroom.kernels.dispatch import Form
from stateroom.kernels.host import host_run
from stateroom.kernels.join_segments.reference import Attended
from stateroom.kernels.kv4_set import Read
from stateroom.kernels.packed_attention import folded, fused
from stateroom.kernels.planes import arrays, like, quantised
from stateroom.kernels.spans import Spans

pytestmark = pytest.mark.usefixtures("computed_on_the_cpu")
FORMS: list[Form] = ["folded", "quantised", "host"]
SET = (4, 64)


def stored(
    count: int = 1, spans: tuple[tuple[int, int], ...] = ((0, 41),), heads: int = 6, kv_heads: int = 3
) -> Case:
    return drawn(Shape(heads, kv_heads, count, 53, 256, 256, spans, SET, SET), mx.bfloat16)


def attended(case: Case, mask: mx.array | None = None) -> Attended:
    return kv4_set.attend(case.queries, case.keys, case.values, case.spans, case.scale, mask)


def same(one: Attended, other: Attended) -> bool:
    return all(mx.array_equal(a, b).item() for a, b in zip(one, other, strict=True))


def causal(case: Case) -> mx.array:
    """What the reads without a mask see, as a mask."""
    return case.spans.seen(case.queries.shape[2], case.keys.shape[2], None)[:, None]


def test_which_read_serves() -> None:
    def read(case: Case, mask: mx.array | None = None) -> Read:
        return kv4_set.chosen(case.queries, case.keys, case.values, case.spans, mask)

    assert read(stored()) is Read.DECODE
    assert read(stored(7)) is Read.WINDOW
    assert read(stored(7), causal(stored(7))) is Read.MASKED_WINDOW
    assert read(stored(spans=((0, 41), (0, 41)))) is Read.MULTI_ROW
    assert read(stored(spans=((3, 41),))) is Read.MULTI_ROW
    assert read(stored(7, heads=9)) is Read.MULTI_ROW  # three query heads a KV head
    for keys, values, width in (((8, 64), SET, 256), (SET, (4, 32), 256), (SET, None, 256), (SET, SET, 128)):
        other = drawn(Shape(6, 3, 1, 53, width, width, [(0, 41)], keys, values), mx.bfloat16)
        assert read(other) is Read.MULTI_ROW


@pytest.mark.skipif(not host.compiler(), reason="no g++")
def test_each_read_is_its_kernel_to_the_bit() -> None:
    with dispatch.forced("host"):
        for case in (stored(), stored(spans=((0, 41), (7, 12), (5, 5))), stored(5, spans=((3, 41),))):
            given = (case.queries, case.keys, case.values, case.spans, case.scale)
            assert same(attended(case), fused.packed_attention(host_run, *given))
        case = stored(5)
        given = (case.queries, case.keys, case.values, case.spans, case.scale)
        assert same(attended(case), folded.packed_attention("folded", *given))


@pytest.mark.parametrize("form", ["folded", "quantised"])
def test_each_read_is_its_product_to_the_bit(form: folded.Products) -> None:
    with dispatch.forced(form):
        for case in (stored(), stored(5), stored(5, spans=((0, 41), (7, 12)))):
            given = (case.queries, case.keys, case.values)
            assert same(attended(case), folded.packed_attention(form, *given, case.spans, case.scale))
            mask = causal(case)
            assert same(attended(case, mask), folded.masked_attention(form, *given, mask, case.scale))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 5])
def test_fused_and_unfused_agree_to_rounding(count: int, form: Form) -> None:
    """Both are sums in float32: at most one step of bfloat16 lies between."""
    if form == "host" and not host.compiler():
        pytest.skip("no g++")
    case = stored(count)
    with dispatch.forced(form):
        fused_read, unfused = attended(case), attended(case, causal(case))
    apart = mx.abs(fused_read.output.astype(mx.float32) - unfused.output.astype(mx.float32))
    step = mx.finfo(mx.bfloat16).eps * mx.abs(unfused.output.astype(mx.float32))
    assert (apart <= step + 2e-6).all().item()
    np.testing.assert_allclose(np.array(fused_read.lse), np.array(unfused.lse), atol=8e-6)


@pytest.mark.parametrize("form", FORMS)
def test_planes_quantised_from_the_first_append_or_later_read_the_same(form: Form) -> None:
    """Groups lie along the head: what grew token by token has the bits of what was converted at once."""
    if form == "host" and not host.compiler():
        pytest.skip("no g++")
    numbers = np.random.default_rng(3).normal(size=(1, 3, 11, 256)).astype(np.float32)
    dense = mx.array(numbers).astype(mx.bfloat16)
    converted = quantised(dense, 64, 4)
    tokens = [arrays(quantised(dense[:, :, token : token + 1], 64, 4)) for token in range(11)]
    grown = like(converted, [mx.concatenate(parts, axis=2) for parts in zip(*tokens, strict=True)])
    queries = mx.array(numbers[:, :, :2].reshape(1, 6, 1, 256)).astype(mx.bfloat16)
    with dispatch.forced(form):
        one, other = (
            kv4_set.attend(queries, plane, plane, Spans.of([0], [11]), 0.05) for plane in (converted, grown)
        )
    assert same(one, other)
