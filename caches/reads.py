"""Reading attention from packed rows: what a model's own read becomes, and the named reads.

A named read appends and attends, inside an open forward; each has one meaning, for every codec. Queries
[B, H, N, D], keys [B, Hkv, N, D], values [B, Hkv, N, Dv] → [B, H, N, Dv] in the dtype of the queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import mlx.core as mx

from stateroom.caches.codecs.read import read, read_masked
from stateroom.caches.errors import NotShared
from stateroom.caches.masks import Mask, block_overlay, encoder_mask, narrowed
from stateroom.caches.reach import Window
from stateroom.caches.rows import PackedRows
from stateroom.caches.shared_reads import join_trunks, plain_pays, read_plainly
from stateroom.kernels.dispatch import decode_attention, decode_form, join_segments, span_attention
from stateroom.kernels.join_segments.reference import Attended
from stateroom.kernels.sinks import with_sinks
from stateroom.kernels.spans import Spans


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

    A mask that hides columns is read with the planes as they are stored, so that quantised ones needn't be
    decoded (and dense ones, on a CPU, are read in products that take two thirds of mlx's time); with any
    other, or with other keys, what was given is what is computed. `sinks` [H]: logits without a value.
    """
    if queries.dtype != mx.float32 and (sinks is not None or decode_form() == "folded"):
        # A CPU would add up halves in halves; and what sinks take their share of must not be rounded before.
        exactly = queries.astype(mx.float32)
        return attend(rows, layer, exactly, keys, values, scale, mask, sinks).astype(queries.dtype)
    if rows.shares:
        simple = queries.shape[2] == 1 and sinks is None and decode_form() == "folded"
        if (
            simple
            and _hides_no_trunk(mask, rows)
            and rows.is_ours(layer, keys, values)
            and plain_pays(rows, layer)
        ):
            return read_plainly(rows, layer, queries, keys, values, scale, mask)
        joined = _attend_shared(rows, layer, queries, keys, values, scale, mask)
        return (joined if sinks is None else with_sinks(joined, sinks)).output
    alone = queries.shape[2] == 1
    by_planes = not rows.is_dense(layer) or (not alone and decode_form() == "folded")
    if by_planes and rows.is_ours(layer, keys, values):
        attended = _read_planes(rows, layer, queries, scale, mask)
        if attended is not None:
            return (attended if sinks is None else with_sinks(attended, sinks)).output
    if alone and sinks is None and not isinstance(mask, str) and _is_of_columns(mask):
        return decode_attention(queries, keys, values, scale, mask)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def _hides_no_trunk(mask: Mask, rows: PackedRows) -> TypeGuard[mx.array | None]:
    """It is one of the rows' own, about their columns alone."""
    columns = None if isinstance(mask, str) else rows.spans(mask)
    return columns is not None and columns[1] is None


def _attend_shared(
    rows: PackedRows,
    layer: int,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Mask,
) -> Attended:
    """Rows of which some have tokens in trunks. `NotShared` where the model does something of its own."""
    own = _read_planes(rows, layer, queries, scale, mask) if rows.is_ours(layer, keys, values) else None
    columns = rows.spans(mask)
    if own is None or columns is None:
        raise NotShared("keys, values or a mask that are not those of the rows")
    return join_trunks(rows, layer, queries, own, scale, columns[1])


def _read_planes(
    rows: PackedRows, layer: int, queries: mx.array, scale: float, mask: Mask
) -> Attended | None:
    """None where the mask does something else than to hide columns."""
    tokens = queries.shape[2]
    if mask is None and tokens > 1:  # nothing is hidden, not even what comes later
        return None
    keys, values = rows.codecs[layer]
    # Columns without a token: a lone row's lie behind its end, and are cut off; a group's are zeros.
    if (columns := rows.spans(mask)) is not None:
        spans, window = columns
        key_planes, value_planes = rows.stored(layer)
        return read(queries, keys, key_planes, values, value_planes, spans, scale, window, clean=True)
    key_planes, value_planes = rows.shown(layer)
    each = (1, tokens, key_planes[0].shape[2])
    if isinstance(mask, mx.array) and mask.dtype == mx.bool_ and mask.shape[1:] == each:
        return read_masked(queries, keys, key_planes, values, value_planes, mask, scale, clean=True)
    return None


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
    layout, first, count = rows.forward.layout, rows.forward.first, queries.shape[2]
    mask = rows.leased(("blocks", *blocks), lambda: block_overlay(layout, count, rows.reach, first, blocks))
    fetched = rows.write(layer, keys, values)
    return attend(rows, layer, queries, *fetched, scale, mask)


def append_encoder_window(
    rows: PackedRows,
    layer: int,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    window: int,
) -> mx.array:
    """As an encoder with a window: a query sees what is fewer than `window` tokens away, on either side.

    ValueError when the rows may have forgotten some of that.
    """
    if rows.reach.pinned or narrowed(rows.reach, window) != Window(window):
        raise ValueError(f"rows that hold {rows.reach} can't be read by an encoder's window of {window}")
    layout, first, count = rows.forward.layout, rows.forward.first, queries.shape[2]
    mask = rows.leased(("encoder", window), lambda: encoder_mask(layout, count, window, first))
    fetched = rows.write(layer, keys, values)
    return attend(rows, layer, queries, *fetched, scale, mask)


def read_block(
    rows: PackedRows, layer: int, queries: mx.array, keys: mx.array, values: mx.array, scale: float
) -> mx.array:
    """What a row's next token would see, in the order of time, then the block's own tokens; all queries see
    all of that. Stores nothing."""
    many, _, count, _ = queries.shape
    exactly = queries.astype(mx.float32)  # parts are joined before they are rounded
    own = span_attention(exactly, keys, values, Spans.of([0] * many, [count] * many), scale)
    if not rows.layout.width:
        return own.output.astype(queries.dtype)
    key_planes, value_planes, seen = rows.next_token(layer)
    key_codec, value_codec = rows.codecs[layer]
    mask = mx.broadcast_to(seen, (many, 1, count, seen.shape[-1]))
    held = read_masked(exactly, key_codec, key_planes, value_codec, value_planes, mask, scale, clean=True)
    outputs, lse = mx.stack([held.output, own.output], axis=-2), mx.stack([held.lse, own.lse], axis=-1)
    return join_segments(outputs, lse).output.astype(queries.dtype)
