"""Attention sinks: a logit of each head that takes its share of the softmax and brings no value."""

from __future__ import annotations

import mlx.core as mx

from stateroom.kernels.join_segments.reference import Attended


def with_sinks(attended: Attended, sinks: mx.array) -> Attended:
    """The answer as if `sinks` [H] had been one more score of every query, its value zero.

    Once, after all segments of the keys are joined; lse then counts the sink too.
    Source: gpt-oss, as `mx.fast.scaled_dot_product_attention(sinks=...)` reads it.
    """
    sink = sinks.astype(mx.float32)[None, :, None]
    # What saw nothing stays zeros, also beside a sink of -inf, which is none.
    share = mx.where(mx.isinf(attended.lse), 0.0, mx.sigmoid(attended.lse - sink))
    output = (attended.output.astype(mx.float32) * share[..., None]).astype(attended.output.dtype)
    return Attended(output, mx.logaddexp(attended.lse, sink))
