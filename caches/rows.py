"""The keys and values of all layers of one reach, of a group of rows, in shared columns: the forward.

A forward pass is `begin(n)`, one `write` per layer, then `commit` or `rollback`. What happens to rows between
forwards is in `stored_rows.py`, and so are the rules about who owns what.

Rows whose reach is a window hold more than it: columns are cut off the front only when the planes are full,
so that a step moves nothing and the last tokens can be trimmed exactly (`TRIM_BACK` of them at any time).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import mlx.core as mx

from stateroom.caches import planes as plane_of
from stateroom.caches.errors import Mismatch
from stateroom.caches.forward import Forward
from stateroom.caches.layout import CAPACITY_STEP, Layout, capacity_for
from stateroom.caches.masks import Mask, boolean_mask, make_mask, narrowed, next_mask
from stateroom.caches.planes import Plane
from stateroom.caches.reach import FULL
from stateroom.caches.stored_rows import DENSE, StoredRows
from stateroom.kernels.spans import Spans

FORGET_MIN = 64  # columns; cutting fewer would move the rows too often


class PackedRows(StoredRows):
    """The planes of some layers for `rows` rows, and the one layout they share."""

    __slots__ = ()

    # ------------------------------------------------------------ one forward

    def begin(self, n: int, position: int | mx.array | None = None) -> None:
        """Opens the append of `n` tokens to every row. `position`: as `position`, if it was made already.

        Raises RuntimeError inside another forward, ValueError for no tokens or no rows.
        """
        if self._forward is not None:
            raise RuntimeError("a forward is open already")
        if n < 1 or self.layout.rows < 1:
            raise ValueError(f"a forward of {n} tokens on {self.layout.rows} rows")
        position = self.position if position is None else position
        before = (list(self.planes), self.layout)
        cut, capacity = self._room(n)
        layout = self.layout.forget(cut) if cut else self.layout
        scatter = not layout.ends_agree
        self._forward = Forward(
            tokens=n,
            layout=layout,
            cut=cut,
            first=self._first(layout),
            capacity=capacity,
            position=position,
            start=_columns(layout, n) if scatter else mx.array([layout.width], dtype=mx.int32),
            scatter=scatter,
            width=layout.width + n,
            before=before,
        )

    def write(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends keys and values [B, Hkv, n, D] of one layer; `Mismatch` when they don't fit what it holds.

        Returns those of the columns that any query of this forward sees, [B, Hkv, S, D], as they are stored.
        """
        forward = self._open()
        start, planes = self._at[2 * layer], self.planes
        key_codec, value_codec = codecs = self.codecs[layer]
        if codecs is DENSE:  # at every layer of every step: no lists
            new_keys = planes[start] = self._appended(planes[start], keys, forward)
            new_values = planes[start + 1] = self._appended(planes[start + 1], values, forward)
            first, width = forward.first, forward.width
            fetched = new_keys[:, :, first:width], new_values[:, :, first:width]
            if forward.tokens > 1 or self.shares:
                forward.fetched[layer] = fetched
            return fetched
        for place, new in enumerate((*key_codec.encode(keys), *value_codec.encode(values)), start):
            planes[place] = self._appended(planes[place], new, forward)
        fetched = self._decoded(layer, forward.first, forward.width)
        forward.fetched[layer] = fetched
        return fetched

    def commit(self) -> None:
        """Every row now holds the tokens of the forward; RuntimeError when none is open."""
        forward = self._open()
        if forward.cut:
            for i, old in enumerate(forward.before[0]):  # layers that this forward passed over
                if old is not None and self.planes[i] is old:
                    self.planes[i] = self._moved(old, forward.before[1], forward.cut, forward.capacity)
        self.layout = forward.layout.append(forward.tokens)
        self._forward = None

    def rollback(self) -> None:
        """Puts the planes back as they were at `begin`; RuntimeError when no forward is open."""
        self.planes, self.layout = self._open().before
        self._forward = None

    def make_room(self, n: int) -> None:
        """What `begin(n)` would do to make room, done now: forgets, grows, and silences what trims left."""
        self._refuse_inside_forward()
        cut, capacity = self._room(n)
        if cut or capacity > self.capacity or self._junk:
            width = self.layout.width
            self.planes = [
                None if p is None else self._moved(p[:, :, :width], self.layout, cut, capacity)
                for p in self.planes
            ]
            self.layout, self._junk = self.layout.forget(cut), False

    def advance(self, planes: Sequence[mx.array], n: int) -> None:
        """Takes planes that `n` tokens of every row were written to, elsewhere."""
        self._refuse_inside_forward()
        held = iter(planes)
        self.planes = [None if plane is None else next(held) for plane in self.planes]
        self.layout = self.layout.append(n)

    @property
    def position(self) -> int | mx.array:
        """RoPE position of the next token: a number for a lone row, else int32 [B]."""
        if self._forward is not None:
            return self._forward.position
        # A scalar RoPE offset with more than one row and one token is wrong on some Metal builds.
        if self.layout.rows == 1:
            return self.layout.offset[0]
        return mx.array(self.layout.offset, dtype=mx.int32)

    def mask(self, n: int, window: int | None = None, as_array: bool = False) -> Mask:
        """The mask of `n` new tokens, made once for all layers of a forward that ask the same."""
        reach = narrowed(self.reach, window)
        key = (n, reach, as_array)
        leases = self._forward.masks if self._forward is not None else {}
        if key not in leases:
            layout, first = self._view()
            mask = make_mask(layout, n, reach, first)
            # A window that shows all of a row's own columns may still hide some of its trunks.
            spelled = (as_array and isinstance(mask, str)) or (window is not None and self.shares)
            leases[key] = boolean_mask(layout, n, reach, first) if spelled else mask
        return leases[key]

    def leased(self, key: Hashable, make: Callable[[], mx.array]) -> mx.array:
        """A mask of the caller's own kind, made once for all layers of the open forward."""
        overlays = self._open().overlays
        if key not in overlays:
            overlays[key] = make()
        return overlays[key]

    def spans(self, mask: Mask) -> tuple[Spans, int | None] | None:
        """The columns that `mask`, one of `mask`'s, shows of whole planes, and the window; None: not ours."""
        forward = self._open()
        if isinstance(mask, mx.array):
            reach = next((key[1] for key, own in forward.masks.items() if own is mask), None)
            window = getattr(reach, "size", None)
            if reach is None or reach.pinned or reach.kind == "chunked":
                return None
        else:  # everything that is read
            reach, window = None, None
        if reach not in forward.spans:
            layout = forward.layout
            starts = layout.left_pad if reach is not None else (forward.first,) * layout.rows
            forward.spans[reach] = Spans.of(starts, [end + forward.tokens for end in layout.ends])
        return forward.spans[reach], window

    def shown(self, layer: int) -> tuple[Sequence[mx.array], Sequence[mx.array]]:
        """The same, cut to the columns that are read: those that `mask` is about."""
        first, width = self._read_columns(self._at[2 * layer])
        return self._cut(layer, first, width)

    def live(self, layer: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the columns that are read, what the open forward has written to this layer
        included."""
        first, width = self._read_columns(self._at[2 * layer])
        return self._decoded(layer, first, width)

    @property
    def first_token(self) -> int:
        """The token of a lone row in the first column that is read."""
        layout, first = self._view()
        return layout.forgotten[0] + first

    @property
    def query_positions(self) -> mx.array:
        """The position of each new token, int32 [B, N]."""
        forward = self._open()
        first = mx.array(forward.layout.offset, dtype=mx.int32)[:, None]
        return first + mx.arange(forward.tokens)[None]

    def is_ours(self, layer: int, keys: mx.array, values: mx.array) -> bool:
        """Both are what this forward gave the layer's model, untouched."""
        given = self._forward.fetched.get(layer) if self._forward is not None else None
        return given is not None and given[0] is keys and given[1] is values

    def next_token(self, layer: int) -> tuple[Sequence[mx.array], Sequence[mx.array], mx.array]:
        """`shown`, and which of these columns each row's next token would see: bool [B, 1, 1, S]."""
        self._refuse_inside_forward()
        return *self.shown(layer), next_mask(self.layout, self.reach, self._first(self.layout))

    @property
    def forward(self) -> Forward:
        """The open forward."""
        return self._open()

    def _open(self) -> Forward:
        if self._forward is None:
            raise RuntimeError("keys and values can only be appended inside a forward")
        return self._forward

    def _view(self) -> tuple[Layout, int]:
        forward = self._forward
        return (forward.layout, forward.first) if forward else (self.layout, self._first(self.layout))

    def _read_columns(self, plane: int) -> tuple[int, int]:
        forward = self._forward
        if forward is None or self.planes[plane] is forward.before[0][plane]:  # not written in this forward
            return self._first(self.layout), self.layout.width
        return forward.first, forward.width

    def _first(self, layout: Layout) -> int:
        """Columns before this one are seen by no coming query, of any row."""
        if self.reach is FULL or self.reach.pinned:
            return 0
        seen = (layout.first_seen(self.reach, at, row) for row, at in enumerate(layout.offset))
        return min(seen, default=0)

    def _room(self, n: int) -> tuple[int, int]:
        """Columns to forget before `n` tokens are appended, and the capacity to hold the rest."""
        needed, capacity = self.layout.width + n, self.capacity
        cut = 0 if self.reach is FULL else self._unseen()
        if needed <= capacity and cut < max(CAPACITY_STEP, self.layout.width - cut):
            return 0, capacity
        if cut < FORGET_MIN:
            return 0, max(capacity, capacity_for(needed))
        return cut, capacity_for(needed - cut + FORGET_MIN)

    def _moved(self, plane: mx.array, layout: Layout, cut: int, capacity: int) -> mx.array:
        """A plane of `layout` without its first `cut` columns, and with room behind the rest."""
        if cut:
            plane = plane_of.forgetting(plane, layout, cut, self.reach.pinned)
        return plane_of.grown(plane, capacity)

    def _appended(self, plane: Plane, new: mx.array, forward: Forward) -> mx.array:
        rows, heads, tokens, field_width = new.shape
        if rows != forward.layout.rows or tokens != forward.tokens:
            raise Mismatch(f"{new.shape} appended to {forward.layout.rows} rows of {forward.tokens} tokens")
        if plane is None:
            plane = mx.zeros((rows, heads, forward.capacity, field_width), dtype=new.dtype)
        else:
            _, held, capacity, held_width = plane.shape
            if (heads, field_width) != (held, held_width):
                raise Mismatch(f"{new.shape} appended to a plane of {plane.shape}")
            if forward.cut or capacity < forward.capacity:
                plane = self._moved(plane, forward.before[1], forward.cut, forward.capacity)
        if forward.scatter:
            return mx.put_along_axis(plane, forward.start, new.astype(plane.dtype), axis=2)
        return mx.slice_update(plane, new, forward.start, (2,))


def _columns(layout: Layout, n: int) -> mx.array:
    # [B, 1, n, 1]
    return (mx.array(layout.ends, dtype=mx.int32)[:, None] + mx.arange(n))[:, None, :, None]
