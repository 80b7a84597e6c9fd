"""The same reads as products of mlx, one for all query heads of a KV head: for CPUs, where no kernel fits."""

from __future__ import annotations

import math
from typing import Literal

import mlx.core as mx

from stateroom.kernels import levels
from stateroom.kernels.decode_attention import LOG2_E, product_with_keys
from stateroom.kernels.join_segments.reference import Attended
from stateroom.kernels.planes import Affine, Plane, arrays, columns, like, silenced
from stateroom.kernels.spans import Spans
from stateroom.kernels.weights import plainly_weighed, weighed

# How affine planes are multiplied: "folded" unpacks them, for CPUs; "quantised" is mlx's own product.
Products = Literal["folded", "quantised"]
# Queries of a KV head up to which mlx's own product is as fast on x86 also: it dequantises for each anew.
KEY_PRODUCT_MAX = 1
VALUE_PRODUCT_MAX = 3
# Scores made at a time: 4 MiB on a CPU, where more comes from the system page by page; 256 MiB on a GPU.
SCORES_MAX: dict[Products, int] = {"folded": 1 << 20, "quantised": 1 << 26}
QUERIES_MIN = 8  # of one product: planes are unpacked for each anew
LOWEST = -3.0e38  # a finite score below any other


def packed_attention(
    products: Products,
    queries: mx.array,
    keys: Plane,
    values: Plane,
    spans: Spans,
    scale: float,
    window: int | None = None,
    clean: bool = False,
) -> Attended:
    """As the reference. `clean`: values outside the spans are finite, and need no silencing."""
    count = queries.shape[2]
    first, stop = spans.reach(count, window)
    # On a CPU mlx's quantised product copies a slice, and pays even so; on Metal it takes it as it is.
    keys, values = columns(keys, first, stop), columns(values, first, stop)
    if spans.level(count, window):
        return _attend(products, queries, keys, values, None, scale)
    if not clean:
        values = silenced(values, spans.live(stop, first))
    return _attend(products, queries, keys, values, spans.seen(count, stop, window, first)[:, None], scale)


def masked_attention(
    products: Products,
    queries: mx.array,
    keys: Plane,
    values: Plane,
    mask: mx.array,
    scale: float,
    clean: bool = False,
) -> Attended:
    """As the reference; and with `clean` false, values that the mask hides from all queries may be NaN."""
    if not clean:
        values = silenced(values, mask.any(axis=(1, 2)))
    return _attend(products, queries, keys, values, mask, scale)


def _attend(
    products: Products, queries: mx.array, keys: Plane, values: Plane, mask: mx.array | None, scale: float
) -> Attended:
    """Without a mask all is seen, but for the causal order of the queries, whose the last N columns are.

    Row by row, and some queries at a time, where all scores together were too many.
    """
    rows, heads, count, _ = queries.shape
    stored = keys.shape[2]
    if not stored:
        return _nothing(queries, values)
    if rows * heads * count * stored <= SCORES_MAX[products] or (rows == 1 and count <= QUERIES_MIN):
        return _attend_at_once(products, queries, keys, values, mask, scale)
    parts: list[Attended] = []
    if rows > 1:
        for row in range(rows):
            own = None if mask is None else mask[row % mask.shape[0]][None]
            asked = _after(parts, queries[row : row + 1])
            parts.append(_attend(products, asked, _row(keys, row), _row(values, row), own, scale))
        return _concatenated(parts, axis=0)
    at_once = max(QUERIES_MIN, SCORES_MAX[products] // (heads * stored))
    for first in range(0, count, at_once):
        stop = min(first + at_once, count)
        own = None if mask is None else mask[:, :, first:stop]
        seen = stored if mask is not None else max(0, stored - count + stop)
        asked = _after(parts, queries[:, :, first:stop])
        shown = columns(keys, 0, seen), columns(values, 0, seen)
        parts.append(_attend(products, asked, *shown, own, scale))
    return _concatenated(parts, axis=2)


def _after(parts: list[Attended], queries: mx.array) -> mx.array:
    """One part after the other: mlx would hold the scores of several."""
    return mx.depends([queries], [parts[-1].output])[0] if parts else queries


def _concatenated(parts: list[Attended], axis: int) -> Attended:
    outputs, lse = ([part[i] for part in parts] for i in range(2))
    return Attended(mx.concatenate(outputs, axis=axis), mx.concatenate(lse, axis=axis))


def _row(plane: Plane, row: int) -> Plane:
    return like(plane, [part[row : row + 1] for part in arrays(plane)])


def _attend_at_once(
    products: Products, queries: mx.array, keys: Plane, values: Plane, mask: mx.array | None, scale: float
) -> Attended:
    rows, heads, count, width = queries.shape
    kv_heads, stored = keys.shape[1], keys.shape[2]
    # [B, Hkv, H / Hkv x N, D]; weights are powers of two, see `decode_attention`.
    folded = (queries.astype(mx.float32) * (scale * LOG2_E)).reshape(rows, kv_heads, -1, width)
    scores = _times_transposed(products, folded, keys)
    if mask is not None or count > 1:
        grouped = scores.reshape(rows, kv_heads, -1, count, stored)
        hidden = _causal(grouped) if mask is None else mx.where(mask[:, :, None], grouped, LOWEST)
        scores = hidden.reshape(scores.shape)
    weights, total, most = (weighed if products == "folded" else plainly_weighed)(scores)
    output = _times(products, weights, values) / total
    lse = most / LOG2_E + mx.log(total)
    if mask is not None or count > stored:
        nothing = most <= LOWEST
        output, lse = mx.where(nothing, 0.0, output), mx.where(nothing, -mx.inf, lse)
    return Attended(
        output.reshape(rows, heads, count, -1).astype(queries.dtype), lse.reshape(rows, heads, count)
    )


def _causal(scores: mx.array) -> mx.array:
    """[..., N, S]: only the last N columns are compared, no mask is made of the others."""
    count, stored = scores.shape[-2:]
    own = min(count, stored)
    seen = mx.tri(count, own, own - count).astype(mx.bool_)
    last = mx.where(seen, scores[..., stored - own :], LOWEST)
    return last if own == stored else mx.concatenate([scores[..., : stored - own], last], axis=-1)


def _nothing(queries: mx.array, values: Plane) -> Attended:
    lead = queries.shape[:3]
    return Attended(mx.zeros((*lead, values.shape[-1]), queries.dtype), mx.full(lead, -math.inf))


def _times_transposed(products: Products, left: mx.array, plane: Plane) -> mx.array:
    """[B, Hkv, M, D] and [B, Hkv, S, D] → [B, Hkv, M, S]."""
    if not isinstance(plane, Affine):
        return product_with_keys(left, plane.astype(mx.float32))
    if products == "folded" and left.shape[2] > KEY_PRODUCT_MAX:
        return levels.times_transposed(left, plane)
    return _quantised_product(left, plane, transpose=True)


def _times(products: Products, left: mx.array, plane: Plane) -> mx.array:
    """[B, Hkv, M, S] and [B, Hkv, S, D] → [B, Hkv, M, D]."""
    if not isinstance(plane, Affine):
        return left @ plane.astype(mx.float32)
    if products == "folded" and left.shape[2] > VALUE_PRODUCT_MAX:
        return levels.times(left, plane)
    return _quantised_product(left, plane, transpose=False)


def _quantised_product(left: mx.array, plane: Affine, transpose: bool) -> mx.array:
    return mx.quantized_matmul(
        left,
        plane.words,
        plane.scales.astype(mx.float32),
        plane.biases.astype(mx.float32),
        transpose=transpose,
        group_size=plane.group,
        bits=plane.bits,
    )
