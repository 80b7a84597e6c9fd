"""Attention of rows that have tokens in trunks: each trunk once for all its rows, then the rows' own columns.

Partial attentions are joined by their log-sum-exp. A trunk's tokens all come before the queries, so that its
read needs no mask, and all queries of all its rows lie side by side as the queries of one row. Source of the
idea: Hydragen (arXiv 2402.05099).

For few rows or few tokens a pass of its own costs more than it saves, on a CPU: then each row reads its
trunks by itself (`read_costs.py`).
"""

from __future__ import annotations

import mlx.core as mx

from stateroom.caches.codecs.read import read, read_masked
from stateroom.caches.read_costs import USUAL, ReadCosts
from stateroom.caches.rows import PackedRows
from stateroom.caches.trunk import Level, Trunk, levels
from stateroom.kernels.decode_attention import attention_in_parts
from stateroom.kernels.join_segments.reference import Attended
from stateroom.kernels.spans import Spans

_costs = USUAL


def costs() -> ReadCosts:
    """By which they are now."""
    return _costs


def use_costs(costs: ReadCosts) -> None:
    """From now on trunks are read plainly or not by these."""
    global _costs
    _costs = costs


def plain_pays(rows: PackedRows, layer: int) -> bool:
    """Whether the open forward's rows have the same trunks, of a dense layer, and should each read them."""
    same = all(len(level.reads) == 1 and not level.missing for level in _levels(rows))
    if not same or not rows.is_dense(layer):
        return False
    nbytes = 0
    for view in rows.chains[0]:
        for (plane,) in rows.layer_planes(view.trunk.planes, layer):
            nbytes += view.length * plane.shape[1] * plane.shape[3] * plane.itemsize
    return _costs.plain(rows.layout.rows, nbytes, len(rows.chains[0]))


def join_trunks(
    rows: PackedRows, layer: int, queries: mx.array, own: Attended, scale: float, window: int | None
) -> Attended:
    """`own`, what queries [B, H, N, D] saw of their rows' columns, joined with what they see of trunks.

    Every query sees something of its row's columns: its own token at least.
    """
    joined = Attended(own.output.astype(mx.float32), own.lse)
    for level in _levels(rows):
        joined = _joined(joined, _level(rows, layer, queries, level, scale, window))
    return Attended(joined.output.astype(queries.dtype), joined.lse)


def read_plainly(
    rows: PackedRows,
    layer: int,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | None,
) -> mx.array:
    """One query a row, of dense rows with the same trunks: each row reads them by itself, all in one softmax.

    keys and values are of the rows' own columns, and `mask` is about those.
    """
    parts = []
    for view in rows.chains[0]:
        planes = rows.layer_planes(view.trunk.planes, layer)
        parts.append([plane[:, :, : view.length] for (plane,) in planes])
    parts.append([keys, values])
    return attention_in_parts(queries, [k for k, _ in parts], [v for _, v in parts], scale, mask)


def _levels(rows: PackedRows) -> list[Level]:
    forward = rows.forward
    if forward.levels is None:
        forward.levels = levels(rows.chains)
    return forward.levels


def _joined(one: Attended, other: Attended) -> Attended:
    """`join_segments` of two, `one` of which saw something: few operations, and an lse for those who ask."""
    gain = other.lse - one.lse
    # Each share by itself: what is left of 1 would be off by as much as the larger share is rounded.
    kept, taken = mx.sigmoid(-gain)[..., None], mx.sigmoid(gain)[..., None]
    return Attended(one.output * kept + other.output * taken, mx.logaddexp(one.lse, other.lse))


def _level(
    rows: PackedRows, layer: int, queries: mx.array, level: Level, scale: float, window: int | None
) -> Attended:
    parts = []
    for trunk, length, members in level.reads:
        some = queries if members is None else queries[members]
        hidden = None
        if window is not None:
            hidden = rows.query_positions - window
            hidden = hidden if members is None else hidden[members]
        parts.append(_read(rows, layer, some, trunk, length, scale, hidden))
    if level.missing:
        _, heads, count, _ = queries.shape
        nothing = mx.zeros(
            (level.missing, heads, count, parts[0].output.shape[-1]), dtype=parts[0].output.dtype
        )
        parts.append(Attended(nothing, mx.full((level.missing, heads, count), -mx.inf)))
    if len(parts) == 1:
        return parts[0]
    output = mx.concatenate([part.output for part in parts])
    lse = mx.concatenate([part.lse for part in parts])
    return Attended(output, lse) if level.order is None else Attended(output[level.order], lse[level.order])


def _read(
    rows: PackedRows,
    layer: int,
    queries: mx.array,
    trunk: Trunk,
    length: int,
    scale: float,
    hidden: mx.array | None,
) -> Attended:
    """Queries [R, H, N, D] of rows that see the first `length` tokens of a trunk.

    `hidden` [R, N]: the last token that is too far from each query, where a window is asked for.
    """
    keys, values = rows.codecs[layer]
    key_planes, value_planes = rows.layer_planes(trunk.planes, layer)
    count, heads, tokens, width = queries.shape
    if hidden is not None:
        # [1, H, R x N, D]
        side = queries.swapaxes(0, 1).reshape(1, heads, count * tokens, width)
        at = mx.arange(trunk.start, trunk.start + length)[None]
        near = (at > hidden.reshape(-1, 1))[None, None]
        planes = ([p[:, :, :length] for p in key_planes], [p[:, :, :length] for p in value_planes])
        output, lse = read_masked(side, keys, planes[0], values, planes[1], near, scale, clean=True)
        shape = (heads, count, tokens)
        return Attended(output.reshape(*shape, -1).swapaxes(0, 1), lse.reshape(*shape).swapaxes(0, 1))
    kv_heads = key_planes[0].shape[1]
    each = heads // kv_heads * tokens
    # [1, Hkv x R x each, 1, D]: as heads of one token, so that nothing is causal
    folded = queries.reshape(count, kv_heads, each, width).swapaxes(0, 1).reshape(1, -1, 1, width)
    output, lse = read(
        folded, keys, key_planes, values, value_planes, Spans.of([0], [length]), scale, clean=True
    )
    output = output.reshape(kv_heads, count, each, -1).swapaxes(0, 1).reshape(count, heads, tokens, -1)
    return Attended(output, lse.reshape(kv_heads, count, each).swapaxes(0, 1).reshape(count, heads, tokens))
