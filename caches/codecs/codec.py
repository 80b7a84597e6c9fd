"""What a codec is: keys or values in, planes out, and the way back.

A plane is [B, Hkv, N, field]; axis 2 counts tokens. What a token becomes depends on nothing but its own
fields, so that planes can be cut, joined, appended and padded with zeros along axis 2, and along the rows,
without knowing what they mean: any chunking of the tokens gives the same bytes, and zeros stand for zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from stateroom.kernels.planes import Plane


class Codec(Protocol):
    """Frozen dataclasses; equal ones write and read the same bytes, so equality is the signature."""

    @property
    def name(self) -> str:
        """As in "dense", "affine4", "turbo8"."""
        ...

    @property
    def planes(self) -> int:
        """How many planes `encode` gives."""
        ...

    def encode(self, fields: mx.array) -> tuple[mx.array, ...]:
        """[B, Hkv, N, D] → planes [B, Hkv, N, …]. What is NaN or infinite decodes to something that is."""
        ...

    def decode(self, planes: Sequence[mx.array]) -> mx.array:
        """Planes of S tokens → [B, Hkv, S, D], in the dtype that the codec was made for."""
        ...

    def stored(self, planes: Sequence[mx.array]) -> Plane:
        """[B, Hkv, S, D] as kernels read it: the vectors, turned."""
        ...

    def turned(self, vectors: mx.array) -> mx.array:
        """[..., D], turned as the stored vectors are: products of two vectors stay what they were."""
        ...

    def turned_back(self, vectors: mx.array) -> mx.array:
        """What `turned` undoes."""
        ...
