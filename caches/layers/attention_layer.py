"""The cache that a model sees for one of its attention layers, of whatever reach."""

from __future__ import annotations

import mlx.core as mx

from stateroom.caches import reads
from stateroom.caches.masks import Mask
from stateroom.caches.rows import PackedRows


class AttentionLayer:
    """A view of one layer of packed rows, with the attributes that mlx-lm's models use.

    It holds nothing of its own: positions, masks and commits are common to all layers of a forward.
    """

    __slots__ = ("index", "rows")

    def __init__(self, rows: PackedRows, index: int) -> None:
        self.rows = rows
        self.index = index

    @property
    def offset(self) -> int | mx.array:
        """Position of the first token of the forward, the same before and after the append."""
        return self.rows.position

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends [B, Hkv, N, D], returns keys and values of the columns that are read [B, Hkv, S, D]."""
        return self.rows.write(self.index, keys, values)

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        return self.rows.mask(n, window_size, return_array)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """The read of this layer: queries [B, H, N, D] against what `update_and_fetch` returned."""
        return reads.attend(self.rows, self.index, queries, keys, values, scale, mask, sinks)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.rows.live(self.index)

    @property
    def keys(self) -> mx.array | None:
        return self.rows.plane(self.index, of_values=False)

    @keys.setter
    def keys(self, plane: mx.array) -> None:  # models tie work to the cache by mx.depends(cache.keys, ...)
        self.rows.set_plane(self.index, plane, of_values=False)

    @property
    def values(self) -> mx.array | None:
        return self.rows.plane(self.index, of_values=True)

    @values.setter
    def values(self, plane: mx.array) -> None:
        self.rows.set_plane(self.index, plane, of_values=True)

    @property
    def state(self) -> list[mx.array]:
        return [plane for plane in (self.keys, self.values) if plane is not None]

    def size(self) -> int:
        return self.rows.layout.width

    def empty(self) -> bool:
        return self.keys is None

    def is_trimmable(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return sum(plane.size * plane.dtype.size for plane in self.state)

    # Of chunked layers: llama4 masks for itself, from the token of the first column.

    @property
    def start_position(self) -> int:
        return self.rows.first_token

    def maybe_trim_front(self) -> None:
        """Nothing: the rows forget by themselves when a forward begins."""
