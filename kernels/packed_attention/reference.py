"""Attention of the last tokens of packed rows, in mlx operations: the definition."""

from __future__ import annotations

import mlx.core as mx

from stateroom.kernels.join_segments.reference import Attended
from stateroom.kernels.planes import Plane, dequantised, silenced
from stateroom.kernels.spans import Spans


def packed_attention(
    queries: mx.array, keys: Plane, values: Plane, spans: Spans, scale: float, window: int | None = None
) -> Attended:
    """Each of a row's last N tokens against the tokens up to itself, or the last `window` of them.

    queries [B, H, N, D], keys [B, Hkv, S, D], values [B, Hkv, S, Dv], H a multiple of Hkv (head h reads KV
    head h // (H / Hkv)); of row i the columns [start, end) of `spans` hold tokens, the queries' own among
    them: query j sees those before end - N + 1 + j. Columns outside may hold anything, NaN too. Computed in
    float32; the output has the dtype of the queries.
    """
    stored = keys.shape[2]
    seen = spans.seen(queries.shape[2], stored, window)[:, None]
    return masked_attention(queries, keys, silenced(values, spans.live(stored)), seen, scale)


def masked_attention(queries: mx.array, keys: Plane, values: Plane, mask: mx.array, scale: float) -> Attended:
    """Each query against the columns where `mask`, bool [B or 1, 1, N, S], is true; other shapes as above.

    Values must be finite where the mask hides them from some query, keys need not.
    """
    rows, heads, count, width = queries.shape
    kv_heads = keys.shape[1]
    # [B, Hkv, H / Hkv, N, D]
    grouped = (queries.astype(mx.float32) * scale).reshape(rows, kv_heads, -1, count, width)
    scores = grouped @ dequantised(keys)[:, :, None].swapaxes(-1, -2)
    seen = mask[:, :, None]
    scores = mx.where(seen, scores, -mx.inf)
    lse = mx.logsumexp(scores, axis=-1)
    weights = mx.where(seen, mx.exp(scores - lse[..., None]), 0.0)
    output = weights @ dequantised(values)[:, :, None]
    return Attended(
        output.reshape(rows, heads, count, -1).astype(queries.dtype), lse.reshape(rows, heads, count)
    )
