"""The cache that a model sees for one layer of a pass over rows that are stored apart.

Linear layers see all rows side by side; here they part: each part appends to planes of its own and reads
them under masks of its own, as if it were alone. What is none of one array (keys, values and masks of
several parts) is handed to the model as an object that is good for passing on to our attention only; a model
that does anything else with it is found out there and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Never

import mlx.core as mx

from stateroom.caches.errors import NotShared
from stateroom.caches.layers.attention_layer import AttentionLayer
from stateroom.caches.masks import Mask


class Apart:
    """The keys, values or masks of several parts."""

    __slots__ = ("of",)

    def __init__(self, of: Sequence[Any]) -> None:
        self.of = of

    def __getattr__(self, name: str) -> Never:
        raise NotShared(f"the model asks for the {name} of what is stored apart")


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a pass: the first of every part but the first one, and int32 [B] positions."""

    cuts: list[int]
    position: mx.array

    def split(self, of_all: mx.array) -> Sequence[mx.array]:
        """[B, ...] by parts; views, not copies."""
        parts: list[mx.array] = mx.split(of_all, self.cuts)  # type: ignore[assignment]  # stubs say one array
        return parts


class GroupLayer:
    """One layer of several parts. It lives for one forward, so that it pins no plane."""

    __slots__ = ("_keys", "_parts", "_rows", "_values")

    def __init__(self, parts: Sequence[AttentionLayer], rows: Rows) -> None:
        self._parts = parts
        self._rows = rows
        self._keys = self._values = Apart(())

    @property
    def offset(self) -> mx.array:
        """Positions of the first token of the forward, [B], the same before and after the append."""
        return self._rows.position

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Apart, Apart]:
        """Appends [B, Hkv, N, D], to each part its own rows; for `attend` only."""
        split = self._rows.split
        fetched = [
            part.update_and_fetch(*new)
            for part, *new in zip(self._parts, split(keys), split(values), strict=True)
        ]
        self._keys, self._values = (Apart(of) for of in zip(*fetched, strict=True))
        return self._keys, self._values

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Mask | Apart:
        """None or "causal" where each part alone would get that; else for `attend` only."""
        masks = [part.make_mask(n, return_array, window_size) for part in self._parts]
        first = masks[0]
        if (first is None or isinstance(first, str)) and all(mask is first for mask in masks):
            return first
        return Apart(masks)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array | Apart,
        values: mx.array | Apart,
        scale: float,
        mask: Mask | Apart = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Each part's own read of its queries [B, H, N, D]; `NotShared` for anything but what was given."""
        if keys is not self._keys or values is not self._values:
            raise NotShared("the model reads other keys and values than it was given")
        if isinstance(mask, mx.array):
            raise NotShared("the model reads under a mask of its own")
        masks = mask.of if isinstance(mask, Apart) else [mask] * len(self._parts)
        return mx.concatenate(
            [
                part.attend(own, k, v, scale, seen, sinks)
                for part, own, k, v, seen in zip(
                    self._parts, self._rows.split(queries), self._keys.of, self._values.of, masks, strict=True
                )
            ]
        )
