"""Which columns a query may see. Boolean, never additive -inf: a fully masked query must stay finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import mlx.core as mx

from stateroom.caches.layout import Layout
from stateroom.caches.reach import FULL, Chunk, Full, Reach, Window

Mask = mx.array | Literal["causal"] | None


def narrowed(reach: Reach, window: int | None) -> Reach:
    """The reach of a layer whose model asks for the last `window` tokens only."""
    if window is None:
        return reach
    if isinstance(reach, Full):
        return Window(window)
    if isinstance(reach, Window) and window < reach.size:
        return Window(window, min(reach.pinned, window - 1))
    return reach


def make_mask(layout: Layout, n: int, reach: Reach = FULL, first: int = 0) -> Mask:
    """The mask of `n` new tokens behind the rows of `layout`, over the columns from `first` on.

    None (everything visible) or "causal" when every row is unpadded and level and nothing has slid out of
    sight; else [B, 1, n, width + n - first], true where column k is visible to query j of row i:
    `left_pad[i] <= k <= end[i] + j`, and within the reach of a query at `offset[i] + j`.
    """
    if layout.level and (not layout.rows or not _hides(layout, n, reach, first)):
        return None if n == 1 else "causal"
    return boolean_mask(layout, n, reach, first)


def _hides(layout: Layout, n: int, reach: Reach, first: int) -> bool:
    """Some query of level rows doesn't see all columns from `first` up to its own."""
    position = layout.offset[0] + n - 1
    token = reach.first_seen(position) - layout.forgotten[0]  # its column, the rows being unpadded
    return token > (reach.pinned or first)


def _per_row(values: tuple[int, ...]) -> mx.array:
    # [B, 1, 1, 1]
    return mx.array(values, dtype=mx.int32)[:, None, None, None]


def _columns(layout: Layout, n: int, first: int) -> mx.array:
    # [1, 1, 1, S]
    return mx.arange(first, layout.width + n)[None, None, None]


def boolean_mask(layout: Layout, n: int, reach: Reach = FULL, first: int = 0) -> mx.array:
    """`make_mask` as an array, whatever the layout."""
    column = _columns(layout, n, first)
    # [B, 1, n, 1]
    query = _per_row(layout.ends) + mx.arange(n)[:, None]
    visible = column <= query
    if any(layout.left_pad):
        visible = visible & (column >= _per_row(layout.left_pad))
    if isinstance(reach, Window):
        near = query < column + (reach.size - reach.pinned)
        if reach.pinned:
            near = near | (column < _per_row(layout.left_pad) + reach.pinned)
        visible = visible & near
    elif isinstance(reach, Chunk):
        to_token = _per_row(tuple(f - p for f, p in zip(layout.forgotten, layout.left_pad, strict=True)))
        visible = visible & ((column + to_token) // reach.size == (query + to_token) // reach.size)
    return visible


def block_overlay(
    layout: Layout, n: int, reach: Reach, first: int, blocks: Sequence[tuple[int, int]]
) -> mx.array:
    """`boolean_mask`, but the new tokens of a block [start, end) all see each other too."""
    new = _columns(layout, n, first) - _per_row(layout.ends)  # which of the new tokens a column holds
    query = mx.arange(n)[:, None]
    visible = boolean_mask(layout, n, reach, first)
    for start, end in blocks:
        visible = visible | ((start <= query) & (query < end) & (start <= new) & (new < end))
    return visible


def encoder_mask(layout: Layout, n: int, window: int, first: int) -> mx.array:
    """What `n` new tokens see that see everything fewer than `window` tokens away, on either side."""
    starts, ends, column = _per_row(layout.left_pad), _per_row(layout.ends), _columns(layout, n, first)
    query = ends + mx.arange(n)[:, None]
    return (starts <= column) & (column < ends + n) & (mx.abs(query - column) < window)


def next_mask(layout: Layout, reach: Reach, first: int) -> mx.array:
    """The stored columns, from `first` on, that each row's next token would see: bool [B, 1, 1, S]."""
    stored = _columns(layout, 0, first) < _per_row(layout.ends)
    return boolean_mask(layout, 1, reach, first)[..., :-1] & stored
