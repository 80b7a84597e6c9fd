"""Keys and values as the model computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from stateroom.kernels.planes import Plane


@dataclass(frozen=True)
class Dense:
    """One plane, itself: 4 bytes a field in float32, 2 in bfloat16 and float16."""

    @property
    def name(self) -> str:
        return "dense"

    @property
    def planes(self) -> int:
        return 1

    def encode(self, fields: mx.array) -> tuple[mx.array, ...]:
        return (fields,)

    def decode(self, planes: Sequence[mx.array]) -> mx.array:
        return planes[0]

    def stored(self, planes: Sequence[mx.array]) -> Plane:
        return planes[0]

    def turned(self, vectors: mx.array) -> mx.array:
        return vectors

    def turned_back(self, vectors: mx.array) -> mx.array:
        return vectors
