"""Reading attention from packed rows: what a model's own read becomes, and the named reads.

A named read appends and attends, inside an open forward; each has one meaning, for every codec. Queries
[B, H, N, D], keys [B, Hkv, N, D], values [B, Hkv, N, Dv] → [B, H, N, Dv] in the dtype of the queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from stateroom.caches.codecs.read import read
from stateroom.caches.masks import Mask
from stateroom.caches.rows import PackedRows
from stateroom.kernels.dispatch import decode_attention, decode_form
from stateroom.kernels.sinks import with_sinks


def attend(
    rows: PackedRows,
    layer: int,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """softmax(scale x queries keysᵀ + mask) values, of keys and values as the rows gave them to the model.

    A mask that the rows made is read as the columns that it shows, so that quantised planes needn't be
    decoded (and dense ones, on a CPU, are read in products that take two thirds of mlx's time); with any
    other, or with other keys, what was given is what is computed. `sinks` [H]: logits without a value.
    """
    tokens = queries.shape[2]
    causal = mask is not None or tokens == 1
    by_columns = (
        decode_form() == "folded" if rows.is_dense(layer) and tokens > 1 else not rows.is_dense(layer)
    )
    if causal and by_columns and rows.is_ours(layer, keys):
        columns = rows.spans(mask)
        if columns is not None:
            spans, window = columns
            (key_codec, value_codec), (key_planes, value_planes) = rows.codecs[layer], rows.stored(layer)
            # A lone row has bytes behind its end only, which are cut off; a group has zeros.
            attended = read(
                queries, key_codec, key_planes, value_codec, value_planes, spans, scale, window, clean=True
            )
            return (attended if sinks is None else with_sinks(attended, sinks)).output
    if tokens == 1 and sinks is None and not isinstance(mask, str) and _is_of_columns(mask):
        return decode_attention(queries, keys, values, scale, mask)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def _is_of_columns(mask: mx.array | None) -> bool:
    """It hides columns of rows; others add to scores or differ between heads."""
    return mask is None or (mask.dtype == mx.bool_ and (mask.ndim < 3 or mask.shape[-3] == 1))


def append_decode(
    rows: PackedRows, layer: int, queries: mx.array, keys: mx.array, values: mx.array, scale: float
) -> mx.array:
    """One token a row, which sees all that its row's reach shows."""
    if queries.shape[2] != 1:
        raise ValueError(f"one token a row is decoded, not {queries.shape[2]}")
    return append_window(rows, layer, queries, keys, values, scale)


def append_window(
    rows: PackedRows,
    layer: int,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    window: int | None = None,
) -> mx.array:
    """N tokens a row, causal: the last query sees everything, or the last `window` tokens."""
    fetched = rows.write(layer, keys, values)
    return attend(rows, layer, queries, *fetched, scale, rows.mask(queries.shape[2], window))


def append_committed(
    rows: PackedRows, layer: int, queries: mx.array, keys: mx.array, values: mx.array, scale: float
) -> mx.array:
    """As `append_window`: what was appended is read back as it is stored, like any later step will."""
    return append_window(rows, layer, queries, keys, values, scale)


def append_bidirectional(
    rows: PackedRows,
    layer: int,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    blocks: Sequence[tuple[int, int]],
) -> mx.array:
    """Causal, or within one image: the new tokens of a block [start, end) all see each other too."""
    count = queries.shape[2]

    def make() -> mx.array:
        query = (
            rows.forward.layout.width - rows.forward.first
        )  # columns of the rows' ends, counted from first
        causal = rows.mask(count, as_array=True)
        assert isinstance(causal, mx.array)
        ends = mx.array(rows.forward.layout.ends, dtype=mx.int32)[:, None, None, None] - rows.forward.first
        column = mx.arange(query + count)[None, None, None] - ends  # of each row's new tokens, from 0 on
        token = mx.arange(count)[None, None, :, None]
        seen = causal
        for start, end in blocks:
            seen = seen | ((start <= token) & (token < end) & (start <= column) & (column < end))
        return seen

    return _append_masked(rows, layer, queries, keys, values, scale, rows.leased(("blocks", *blocks), make))


def append_encoder_window(
    rows: PackedRows,
    layer: int,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    window: int,
) -> mx.array:
    """As an encoder with a window: a query sees what is fewer than `window` tokens away, on either side."""
    count = queries.shape[2]

    def make() -> mx.array:
        layout, first = rows.forward.layout, rows.forward.first
        starts = mx.array(layout.left_pad, dtype=mx.int32)[:, None, None, None]
        ends = mx.array(layout.ends, dtype=mx.int32)[:, None, None, None]
        column = mx.arange(first, layout.width + count)[None, None, None]
        query = ends + mx.arange(count)[:, None]
        return (starts <= column) & (column < ends + count) & (mx.abs(query - column) < window)

    return _append_masked(rows, layer, queries, keys, values, scale, rows.leased(("encoder", window), make))


def read_block(
    rows: PackedRows, layer: int, queries: mx.array, keys: mx.array, values: mx.array, scale: float
) -> mx.array:
    """The tokens stored, in the order of time, then the block's own; all queries see all. Stores nothing."""
    layout, count = rows.layout, queries.shape[2]
    if not layout.width:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)
    held = rows.temporal_view(layer)
    both = [
        mx.concatenate([old, new.astype(old.dtype)], axis=2)
        for old, new in zip(held, (keys, values), strict=True)
    ]
    column = mx.arange(layout.width + count)[None, None, None]
    starts = mx.array(layout.left_pad, dtype=mx.int32)[:, None, None, None]
    ends = mx.array(layout.ends, dtype=mx.int32)[:, None, None, None]
    seen = ((starts <= column) & (column < ends)) | (column >= layout.width)
    padded = layout.rows > 1 and not layout.level
    mask = mx.broadcast_to(seen, (layout.rows, 1, count, seen.shape[-1])) if padded else None
    return mx.fast.scaled_dot_product_attention(queries, *both, scale=scale, mask=mask)


def _append_masked(
    rows: PackedRows,
    layer: int,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array,
) -> mx.array:
    fetched = rows.write(layer, keys, values)
    return mx.fast.scaled_dot_product_attention(queries, *fetched, scale=scale, mask=mask)
