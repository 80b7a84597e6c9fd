"""The keys and values of all full-attention layers of a group of rows, in shared columns.

Ownership: every array here is replaced, never written in place, so that an array that is still held
elsewhere (a forward that failed, a copy) keeps its content. For the same reason nobody may hold an old
plane while a step is evaluated: mlx would copy the whole plane instead of writing into it.

A forward pass is `begin(n)`, one `write` per layer, then `commit` or `rollback`. Between forwards, every
column of a group of two or more rows that lies outside a row's live run is zero: masked columns are still
multiplied (by a weight of 0), and 0 x NaN is NaN. A lone row never reads past its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from stateroom.caches.errors import Mismatch
from stateroom.caches.layout import Layout, capacity_for
from stateroom.caches.masks import Mask, boolean_mask, make_mask

Plane = mx.array | None  # [B, Hkv, capacity, D]; None until the first append, whose geometry it takes


@dataclass(slots=True)
class _Forward:
    """What all layers of one forward share."""

    tokens: int
    width: int  # after the append
    capacity: int
    position: int | mx.array  # of the first new token, for RoPE
    start: mx.array  # the column where all rows write, or [B, 1, n, 1] columns when ends differ
    scatter: bool
    before: list[Plane]
    masks: dict[tuple[int, int | None, bool], Mask] = field(default_factory=dict)


class PackedRows:
    """`layers` x (keys, values) planes of `rows` rows, and the one layout they share."""

    __slots__ = ("_forward", "layout", "planes")

    def __init__(self, layers: int, rows: int = 1) -> None:
        self.planes: list[Plane] = [None] * (2 * layers)
        self.layout = Layout.empty(rows)
        self._forward: _Forward | None = None

    # ------------------------------------------------------------ one forward

    def begin(self, n: int) -> None:
        """Opens the append of `n` tokens to every row."""
        if self._forward is not None:
            raise RuntimeError("a forward is open already")
        if n < 1 or self.layout.rows < 1:
            raise ValueError(f"a forward of {n} tokens on {self.layout.rows} rows")
        layout, width = self.layout, self.layout.width + n
        # A scalar RoPE offset with more than one row and one token is wrong on some Metal builds.
        one = layout.rows == 1
        position = layout.offset[0] if one else mx.array(layout.offset, dtype=mx.int32)
        scatter = not layout.ends_agree
        self._forward = _Forward(
            tokens=n,
            width=width,
            capacity=self.capacity if width <= self.capacity else capacity_for(width),
            position=position,
            start=_columns(layout, n) if scatter else mx.array([width - n], dtype=mx.int32),
            scatter=scatter,
            before=list(self.planes),
        )

    def write(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends keys and values [B, Hkv, n, D] of one layer; returns its columns in use, [B, Hkv, S, D]."""
        forward = self._forward
        if forward is None:
            raise RuntimeError("keys and values can only be appended inside SessionCache.forward")
        index = 2 * layer
        new_keys = self._appended(self.planes[index], keys, forward)
        new_values = self._appended(self.planes[index + 1], values, forward)
        self.planes[index], self.planes[index + 1] = new_keys, new_values
        width = forward.width
        return new_keys[:, :, :width], new_values[:, :, :width]

    def commit(self) -> None:
        """Every row now holds the tokens of the forward."""
        self.layout = self.layout.append(self._open().tokens)
        self._forward = None

    def rollback(self) -> None:
        """Puts the planes back as they were at `begin`."""
        self.planes = self._open().before
        self._forward = None

    @property
    def position(self) -> int | mx.array:
        """RoPE position of the next token: a number for a lone row, else int32 [B]."""
        if self._forward is not None:
            return self._forward.position
        if self.layout.rows == 1:
            return self.layout.offset[0]
        return mx.array(self.layout.offset, dtype=mx.int32)

    def mask(self, n: int, window: int | None, as_array: bool) -> Mask:
        """The mask of `n` new tokens, made once for all layers of a forward that ask the same."""
        leases = self._forward.masks if self._forward is not None else {}
        key = (n, window, as_array)
        if key not in leases:
            mask = make_mask(self.layout, n, window)
            spelled = as_array and isinstance(mask, str)
            leases[key] = boolean_mask(self.layout, n, window) if spelled else mask
        return leases[key]

    def live(self, layer: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the columns in use, what the open forward has written to this layer included."""
        keys, values = self.planes[2 * layer], self.planes[2 * layer + 1]
        if keys is None or values is None:
            raise ValueError("this layer holds nothing yet")
        width = self.layout.width
        if self._forward is not None and self._forward.before[2 * layer] is not keys:
            width = self._forward.width
        return keys[:, :, :width], values[:, :, :width]

    def _open(self) -> _Forward:
        if self._forward is None:
            raise RuntimeError("no forward is open")
        return self._forward

    def _appended(self, plane: Plane, new: mx.array, forward: _Forward) -> mx.array:
        rows, heads, tokens, field_width = new.shape
        if plane is None:
            if rows != self.layout.rows or tokens != forward.tokens:
                raise Mismatch(f"{new.shape} appended to {self.layout.rows} rows of {forward.tokens} tokens")
            plane = mx.zeros((rows, heads, forward.capacity, field_width), dtype=new.dtype)
        else:
            held = plane.shape
            if (rows, heads, field_width) != (held[0], held[1], held[3]) or tokens != forward.tokens:
                raise Mismatch(f"{new.shape} appended to a plane of {held}, {forward.tokens} tokens")
            if held[2] < forward.capacity:
                more = mx.zeros((rows, heads, forward.capacity - held[2], field_width), dtype=plane.dtype)
                plane = mx.concatenate([plane, more], axis=2)
        if forward.scatter:
            return mx.put_along_axis(plane, forward.start, new.astype(plane.dtype), axis=2)
        return mx.slice_update(plane, new, forward.start, (2,))

    # ------------------------------------------------------------ row surgery

    @classmethod
    def merge_rows(cls, sources: Sequence[PackedRows]) -> PackedRows:
        """All rows in one group, in order, aligned at the right. The sources stay as they are.

        Raises `Mismatch` when planes differ in number, heads, field width or dtype.
        """
        if not sources:
            raise ValueError("nothing to merge")
        for source in sources:
            source._refuse_inside_forward()
        if len({len(source.planes) for source in sources}) != 1:
            raise Mismatch("rows of models with different numbers of layers")
        layout, shifts = Layout.merge([source.layout for source in sources])
        planes = [
            _merged([source.planes[i] for source in sources], [s.layout for s in sources], shifts, layout)
            for i in range(len(sources[0].planes))
        ]
        return cls._made(planes, layout)

    def extract_row(self, row: int) -> PackedRows:
        """One row alone, without padding or spare capacity."""
        self._refuse_inside_forward()
        only, _ = self.layout.filter([row])
        start, end = self.layout.left_pad[row], self.layout.ends[row]
        planes = [
            None if p is None or start == end else mx.contiguous(p[row : row + 1, :, start:end])
            for p in self.planes
        ]
        return self._made(planes, only)

    def filtered(self, keep: Sequence[int]) -> PackedRows:
        """The rows of `keep`, in its order, without the padding that all of them share. None is legal."""
        self._refuse_inside_forward()
        layout, cut = self.layout.filter(keep)
        if not layout.width:
            return self._made([None] * len(self.planes), layout)
        index = mx.array(list(keep), dtype=mx.int32)
        planes = [None if p is None else mx.take(p[:, :, cut:], index, axis=0) for p in self.planes]
        return self._made(planes, layout)

    def filter_rows(self, keep: Sequence[int]) -> None:
        """`filtered`, in place."""
        kept = self.filtered(keep)
        self.planes, self.layout = kept.planes, kept.layout

    def trim(self, row: int, n: int) -> None:
        """`row` forgets its last `n` tokens; ValueError when it holds fewer."""
        self._refuse_inside_forward()
        layout = self.layout.trim(row, n)
        if n and layout.rows > 1:
            start, end = layout.ends[row], self.layout.ends[row]
            self.planes = [None if p is None else _zeroed(p, row, start, end) for p in self.planes]
        self.layout = layout

    def copy(self) -> PackedRows:
        """The same rows in arrays of their own; nothing beyond the columns in use is taken along."""
        self._refuse_inside_forward()
        width = self.layout.width
        planes = [None if p is None or not width else mx.contiguous(p[:, :, :width]) for p in self.planes]
        return self._made(planes, self.layout)

    @classmethod
    def _made(cls, planes: list[Plane], layout: Layout) -> PackedRows:
        """Computes the planes now: a lazy copy would pin the rows that it comes from, and fail too late."""
        mx.eval([p for p in planes if p is not None])
        made = cls(len(planes) // 2)
        made.planes, made.layout = planes, layout
        return made

    def _refuse_inside_forward(self) -> None:
        if self._forward is not None:
            raise RuntimeError("rows can't be rearranged inside a forward")

    # ------------------------------------------------------------ sizes, from shapes alone

    @property
    def capacity(self) -> int:
        """Columns that are allocated."""
        return next((p.shape[2] for p in self.planes if p is not None), 0)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one row in all planes; 0 before the first append."""
        return sum(p.shape[1] * p.shape[3] * p.dtype.size for p in self.planes if p is not None)

    @property
    def nbytes_live(self) -> int:
        return self.bytes_per_token * sum(self.layout.offset)

    @property
    def nbytes_capacity(self) -> int:
        """What the planes occupy."""
        return self.bytes_per_token * self.capacity * self.layout.rows


def _columns(layout: Layout, n: int) -> mx.array:
    # [B, 1, n, 1]
    return (mx.array(layout.ends, dtype=mx.int32)[:, None] + mx.arange(n))[:, None, :, None]


def _zeroed(plane: mx.array, row: int, start: int, end: int) -> mx.array:
    _, heads, _, field_width = plane.shape
    nothing = mx.zeros((1, heads, end - start, field_width), dtype=plane.dtype)
    return mx.slice_update(plane, nothing, mx.array([row, start], dtype=mx.int32), (0, 2))


def _merged(planes: list[Plane], layouts: list[Layout], shifts: Sequence[int], layout: Layout) -> Plane:
    """One plane of all rows; sources that hold nothing are zeros in the geometry of those that do."""
    filled = [p for p, held in zip(planes, layouts, strict=True) if p is not None and held.width]
    if not filled:
        return None
    kinds = {(p.shape[1], p.shape[3], p.dtype) for p in filled}
    if len(kinds) != 1:
        raise Mismatch(f"rows of different geometry or dtype: {sorted(map(str, kinds))}")
    heads, field_width, dtype = filled[0].shape[1], filled[0].shape[3], filled[0].dtype
    merged = mx.zeros((layout.rows, heads, capacity_for(layout.width + 1), field_width), dtype=dtype)
    row = 0
    for plane, held, shift in zip(planes, layouts, shifts, strict=True):
        if plane is not None and held.width:
            at = mx.array([row, shift], dtype=mx.int32)
            merged = mx.slice_update(merged, plane[:, :, : held.width], at, (0, 2))
        row += held.rows
    return merged
