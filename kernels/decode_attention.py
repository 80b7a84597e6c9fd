"""Attention of one query per row, in mlx operations: the definition, and the faster read on a CPU."""

from __future__ import annotations

import mlx.core as mx


def decode_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None = None
) -> mx.array:
    """softmax(scale x queries keysᵀ) values, with all query heads of a KV head in one product.

    queries [B, H, 1, D], keys [B, Hkv, S, D], values [B, Hkv, S, Dv], H a multiple of Hkv (head h reads
    KV head h // (H / Hkv)); mask boolean and broadcastable to [B, Hkv, H / Hkv, S], true where visible: in
    practice [B, 1, 1, S]. Returns [B, H, 1, Dv] in the dtype of the queries. A key that is hidden may hold
    anything, a value that is hidden must be finite; a row that sees nothing gives a finite result.
    """
    rows, heads, _, width = queries.shape
    kv_heads = keys.shape[1]
    # [B, Hkv, H / Hkv, D]
    folded = (queries * scale).reshape(rows, kv_heads, heads // kv_heads, width)
    scores = folded @ keys.swapaxes(-1, -2)
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ values).reshape(rows, heads, 1, values.shape[-1])
