"""Attention over planes, whatever the codecs of keys and of values."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from stateroom.caches.codecs.codec import Codec
from stateroom.caches.codecs.turbo import Turbo
from stateroom.kernels import kv4_set
from stateroom.kernels.dispatch import masked_attention, packed_attention
from stateroom.kernels.join_segments.reference import Attended
from stateroom.kernels.spans import Spans


def read(
    queries: mx.array,
    key_codec: Codec,
    key_planes: Sequence[mx.array],
    value_codec: Codec,
    value_planes: Sequence[mx.array],
    spans: Spans,
    scale: float,
    window: int | None = None,
    clean: bool = False,
) -> Attended:
    """`kernels.dispatch.packed_attention` over planes: each of a row's last N tokens sees its row's columns
    up to itself, or the last `window` of them.

    queries [B, H, N, D]; planes of S columns, whole; of row i the columns [start, end) of `spans` hold
    tokens, the others may hold anything, or, if `clean`, what is finite. The output [B, H, N, Dv] has the
    dtype of the queries.

    Turned keys meet turned queries, and the mean of turned values is turned back: once a query, not once a
    stored token.
    """
    given = queries
    if isinstance(key_codec, Turbo) or isinstance(value_codec, Turbo):
        # What is turned back must not have been rounded to a half before. And spare columns aren't looked up.
        given = queries.astype(mx.float32)
        first, stop = min(spans.starts), max(spans.ends)
        key_planes, value_planes = (
            [plane[:, :, first:stop] for plane in planes] for planes in (key_planes, value_planes)
        )
        spans = Spans.of([at - first for at in spans.starts], [at - first for at in spans.ends])
    keys, values = key_codec.stored(key_planes), value_codec.stored(value_planes)
    given = key_codec.turned(given)
    if window is None:
        output, lse = kv4_set.attend(given, keys, values, spans, scale, clean=clean)
    else:
        output, lse = packed_attention(given, keys, values, spans, scale, window, clean)
    return Attended(value_codec.turned_back(output).astype(queries.dtype), lse)


def read_masked(
    queries: mx.array,
    key_codec: Codec,
    key_planes: Sequence[mx.array],
    value_codec: Codec,
    value_planes: Sequence[mx.array],
    mask: mx.array,
    scale: float,
    clean: bool = False,
) -> Attended:
    """`kernels.dispatch.masked_attention` over planes: as `read`, but each query sees the columns where
    `mask`, bool [B or 1, 1, N, S], is true."""
    turned = isinstance(key_codec, Turbo) or isinstance(value_codec, Turbo)
    given = key_codec.turned(queries.astype(mx.float32) if turned else queries)
    keys, values = key_codec.stored(key_planes), value_codec.stored(value_planes)
    output, lse = masked_attention(given, keys, values, mask, scale, clean)
    return Attended(value_codec.turned_back(output).astype(queries.dtype), lse)
