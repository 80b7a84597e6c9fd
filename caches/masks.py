"""Which columns a query may see. Boolean, never additive -inf: a fully masked query must stay finite."""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

from stateroom.caches.layout import Layout

Mask = mx.array | Literal["causal"] | None


def make_mask(layout: Layout, n: int, window: int | None = None) -> Mask:
    """The mask of `n` new tokens behind the rows of `layout`; `window` counts the query itself.

    None (everything visible) or "causal" when every row is unpadded and level; else [B, 1, n, width + n],
    true where column k is visible to query j of row i: `left_pad[i] <= k <= end[i] + j` and, with a window,
    `end[i] + j < k + window`.
    """
    if layout.level and (window is None or layout.width + n <= window):
        return None if n == 1 else "causal"
    return boolean_mask(layout, n, window)


def boolean_mask(layout: Layout, n: int, window: int | None = None) -> mx.array:
    """`make_mask` as an array, whatever the layout."""
    # [1, 1, 1, S], [B, 1, n, 1]
    column = mx.arange(layout.width + n)[None, None, None]
    ends = mx.array(layout.ends, dtype=mx.int32)[:, None, None, None]
    query = ends + mx.arange(n)[:, None]
    visible = column <= query
    if any(layout.left_pad):
        visible = visible & (column >= mx.array(layout.left_pad, dtype=mx.int32)[:, None, None, None])
    if window is not None:
        visible = visible & (query < column + window)
    return visible
