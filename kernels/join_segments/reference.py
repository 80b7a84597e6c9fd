"""Attention over all keys from attention over parts of them, by their log-sum-exp: the definition."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx


class Attended(NamedTuple):
    """What queries saw of some keys. output [B, H, N, Dv]: the weighted mean of the values; lse [B, H, N],
    float32: log of the sum of exp(score). A query that saw nothing has zeros, and lse -inf."""

    output: mx.array
    lse: mx.array


def join_segments(outputs: mx.array, lse: mx.array) -> Attended:
    """outputs [B, H, N, segments, Dv] and lse [B, H, N, segments], of disjoint keys. In float32.

    The same as one softmax over all keys, to float32's rounding. Source: the blockwise softmax of
    FlashAttention (arXiv 2205.14135).
    """
    outputs, lse = outputs.astype(mx.float32), lse.astype(mx.float32)
    joined = mx.logsumexp(lse, axis=-1)
    none = mx.isinf(joined)
    # [B, H, N, segments]
    weights = mx.where(mx.isinf(lse), 0.0, mx.exp(lse - mx.where(none, 0.0, joined)[..., None]))
    return Attended((weights[..., None, :] @ outputs)[..., 0, :], joined)
