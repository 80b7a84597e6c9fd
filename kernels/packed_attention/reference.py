"""Attention of the last tokens of packed rows, in mlx operations: the definition."""

from __future__ import annotations

import mlx.core as mx

from stateroom.kernels.join_segments.reference import Attended
from stateroom.kernels.planes import Affine, Plane, arrays, dequantised, like
from stateroom.kernels.spans import Spans

# Queries of a KV head up to which mlx's quantised product is faster on x86: it dequantises for each anew.
KEY_PRODUCT_MAX = 4
VALUE_PRODUCT_MAX = 12


def packed_attention(
    queries: mx.array, keys: Plane, values: Plane, spans: Spans, scale: float, window: int | None = None
) -> Attended:
    """Each of a row's last N tokens against the tokens up to itself, or the last `window` of them.

    queries [B, H, N, D], keys [B, Hkv, S, D], values [B, Hkv, S, Dv], H a multiple of Hkv (head h reads KV
    head h // (H / Hkv)); of row i the columns [start, end) of `spans` hold tokens, the queries' own among
    them: query j sees those before end - N + 1 + j. Columns outside may hold anything, NaN too. Computed in
    float32, all query heads of a KV head in one product (a quantised one, for few queries); the output has
    the dtype of the queries.
    """
    rows, heads, count, width = queries.shape
    _, kv_heads, stored, _ = keys.shape
    # [B, Hkv, H / Hkv x N, D]
    folded = (queries.astype(mx.float32) * scale).reshape(rows, kv_heads, -1, width)
    scores = _times_transposed(folded, keys).reshape(rows, kv_heads, -1, count, stored)
    seen = spans.seen(count, stored, window)[:, None, None]
    scores = mx.where(seen, scores, -mx.inf)
    lse = mx.logsumexp(scores, axis=-1)
    weights = mx.where(seen, mx.exp(scores - lse[..., None]), 0.0)
    output = _times(weights.reshape(*folded.shape[:-1], stored), _without_junk(values, spans))
    return Attended(
        output.reshape(rows, heads, count, -1).astype(queries.dtype), lse.reshape(rows, heads, count)
    )


def _without_junk(plane: Plane, spans: Spans) -> Plane:
    """Zeros where no token is: a weight of 0 does not silence a NaN. Words mean nothing without a scale."""
    live = spans.live(plane.shape[2])[:, None, :, None]
    return like(
        plane,
        [
            part if part.dtype == mx.uint32 else mx.where(live, part, mx.zeros((), part.dtype))
            for part in arrays(plane)
        ],
    )


def _times_transposed(left: mx.array, plane: Plane) -> mx.array:
    """[..., M, D] and [..., S, D] → [..., M, S]."""
    if isinstance(plane, Affine) and left.shape[-2] <= KEY_PRODUCT_MAX:
        return _quantised_product(left, plane, transpose=True)
    return left @ dequantised(plane).swapaxes(-1, -2)


def _times(left: mx.array, plane: Plane) -> mx.array:
    """[..., M, S] and [..., S, D] → [..., M, D]."""
    if isinstance(plane, Affine) and left.shape[-2] <= VALUE_PRODUCT_MAX:
        return _quantised_product(left, plane, transpose=False)
    return left @ dequantised(plane)


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
