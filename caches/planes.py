"""What is done to one plane [B, Hkv, S, field], whatever its codec: every cut is along tokens or rows.

Every function gives a new array; columns that hold no token are zeros where the function makes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from stateroom.caches.errors import Mismatch
from stateroom.caches.layout import Layout, capacity_for

Plane = mx.array | None  # None until the first append, whose geometry it takes


def grown(plane: mx.array, capacity: int) -> mx.array:
    """Zeros behind it, up to `capacity` columns."""
    rows, heads, stored, width = plane.shape
    if stored >= capacity:
        return plane
    return mx.concatenate([plane, mx.zeros((rows, heads, capacity - stored, width), dtype=plane.dtype)], 2)


def forgetting(plane: mx.array, layout: Layout, cut: int, pinned: int) -> mx.array:
    """The columns of `layout.forget(cut)`: the first `cut` are gone, pinned tokens moved up to the rest."""
    if not pinned:
        return plane[:, :, cut : layout.width]
    column = mx.arange(layout.width - cut)[None]
    pads = mx.array(layout.left_pad, dtype=mx.int32)[:, None]
    moved = (column < pinned) & (pads < cut)
    return gathered(plane, mx.where(moved, column + pads, column + cut))


def aligned(plane: mx.array, old: Layout, new: Layout) -> mx.array:
    """Each row's live tokens at the columns of `new`, zeros elsewhere."""
    column = mx.arange(new.width)[None]
    shift = [before - after for before, after in zip(old.left_pad, new.left_pad, strict=True)]
    source = column + mx.array(shift, dtype=mx.int32)[:, None]
    moved = gathered(plane, mx.clip(source, 0, plane.shape[2] - 1))
    return only_live(moved, new)


def gathered(plane: mx.array, source: mx.array) -> mx.array:
    """Column c of row i is column source[i, c]."""
    return mx.take_along_axis(plane, source[:, None, :, None], axis=2)


def only_live(plane: mx.array, layout: Layout) -> mx.array:
    """Zeros in every column without a token; what was there may have been NaN."""
    column = mx.arange(plane.shape[2])[None]
    starts = mx.array(layout.left_pad, dtype=mx.int32)[:, None]
    ends = mx.array(layout.ends, dtype=mx.int32)[:, None]
    live = ((starts <= column) & (column < ends))[:, None, :, None]
    return mx.where(live, plane, mx.zeros((), dtype=plane.dtype))


def zeroed(plane: mx.array, row: int, start: int, end: int) -> mx.array:
    """Zeros in the columns [start, end) of one row."""
    _, heads, _, width = plane.shape
    nothing = mx.zeros((1, heads, end - start, width), dtype=plane.dtype)
    return mx.slice_update(plane, nothing, mx.array([row, start], dtype=mx.int32), (0, 2))


def merged(planes: Sequence[Plane], layouts: Sequence[Layout], shifts: Sequence[int], to: Layout) -> Plane:
    """One plane of all rows; sources that hold nothing are zeros in the geometry of those that do."""
    filled = [p for p, held in zip(planes, layouts, strict=True) if p is not None and held.width]
    if not filled:
        return None
    kinds = {(p.shape[1], p.shape[3], p.dtype) for p in filled}
    if len(kinds) != 1:
        raise Mismatch(f"rows of different geometry or dtype: {sorted(map(str, kinds))}")
    heads, width, dtype = filled[0].shape[1], filled[0].shape[3], filled[0].dtype
    made = mx.zeros((to.rows, heads, capacity_for(to.width + 1), width), dtype=dtype)
    row = 0
    for plane, held, shift in zip(planes, layouts, shifts, strict=True):
        if plane is not None and held.width:
            at = mx.array([row, shift], dtype=mx.int32)
            made = mx.slice_update(made, plane[:, :, : held.width], at, (0, 2))
        row += held.rows
    return made
