"""Attention of one query per row, in mlx operations: the definition, and the faster read on a CPU.

Measured with OpenBLAS on x86 (CPU time of one layer, 8 rows of 1,024 tokens, 9 heads on 3): a product of
few query heads with many keys is fast while its result is small, so longer ones go in blocks; mlx's exp
takes 12 ns an element and its power 4.4, so weights are powers of two (`weights.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from stateroom.kernels.weights import weighed

LOG2_E = math.log2(math.e)
BLOCK = 256  # keys per product
PRODUCT_MAX = 1_152  # elements of a product's result for which OpenBLAS packs nothing
REPEATS_MAX = 4  # query heads per KV head; with more, packing pays for itself
SOFTMAX_MAX = 4_096  # scores for which one softmax beats three operations


def decode_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None = None
) -> mx.array:
    """softmax(scale x queries keysᵀ) values, with all query heads of a KV head in one product.

    queries [B, H, 1, D], keys [B, Hkv, S, D], values [B, Hkv, S, Dv], H a multiple of Hkv (head h reads
    KV head h // (H / Hkv)); mask boolean, true where visible, broadcastable to [B, Hkv, H / Hkv, S]: in
    practice [B, 1, 1, S]. Returns [B, H, 1, Dv] in the dtype of the queries. A key that is hidden may hold
    anything, a value that is hidden must be finite; a row that sees nothing gives a finite result.
    """
    rows, heads, _, width = queries.shape
    kv_heads, stored = keys.shape[1], keys.shape[2]
    powers = rows * heads * stored > SOFTMAX_MAX
    # [B, Hkv, H / Hkv, D]
    folded = (queries * (scale * LOG2_E if powers else scale)).reshape(
        rows, kv_heads, heads // kv_heads, width
    )
    scores = product_with_keys(folded, keys)
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    if powers:
        attended = _weighted(scores, values).astype(queries.dtype)
    else:
        attended = mx.softmax(scores, axis=-1, precise=True) @ values
    return attended.reshape(rows, heads, 1, values.shape[-1])


def attention_in_parts(
    queries: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    scale: float,
    mask: mx.array | None = None,
) -> mx.array:
    """`decode_attention` of tokens that lie in several arrays, in one softmax over all their scores.

    Parts of one row are seen by all rows. `mask`: of the last part; all of the others is visible. No key or
    value is copied, and nothing has to be joined by log-sum-exp.
    """
    rows, heads, _, width = queries.shape
    kv_heads = keys[0].shape[1]
    folded = (queries * (scale * LOG2_E)).reshape(rows, kv_heads, heads // kv_heads, width)
    each = [product_with_keys(folded, part) for part in keys]
    if mask is not None:
        each[-1] = mx.where(mask, each[-1], mx.finfo(each[-1].dtype).min)
    weights, total, _ = weighed(mx.concatenate(each, axis=-1).astype(mx.float32))
    first, attended = 0, mx.array(0.0)
    for scores, part in zip(each, values, strict=True):
        stop = first + scores.shape[-1]
        attended, first = attended + weights[..., first:stop] @ part, stop
    return (attended / total).astype(queries.dtype).reshape(rows, heads, 1, values[0].shape[-1])


def product_with_keys(folded: mx.array, keys: mx.array) -> mx.array:
    """[B, Hkv, repeats, D] and [B, Hkv, S, D] → [B, Hkv, repeats, S]; few repeats in blocks of keys."""
    rows, kv_heads, repeats, _ = folded.shape
    stored = keys.shape[2]
    if repeats > REPEATS_MAX or repeats * stored <= PRODUCT_MAX:
        return folded @ keys.swapaxes(-1, -2)
    whole = stored // BLOCK * BLOCK
    blocks = mx.unflatten(keys[:, :, :whole], 2, (whole // BLOCK, BLOCK))
    # [B, Hkv, blocks, repeats, BLOCK]
    scores = folded[:, :, None] @ blocks.swapaxes(-1, -2)
    scores = scores.swapaxes(2, 3).reshape(rows, kv_heads, repeats, whole)
    if whole == stored:
        return scores
    return mx.concatenate([scores, folded @ keys[:, :, whole:].swapaxes(-1, -2)], axis=-1)


def _weighted(scores: mx.array, values: mx.array) -> mx.array:
    """The mean of values with weights 2^scores, in float32."""
    weights, total, _ = weighed(scores.astype(mx.float32))
    return (weights @ values) / total
