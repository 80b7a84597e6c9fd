"""Integers of 4 or 8 bits in groups along the head's fields, each group with a scale and a bias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from stateroom.kernels import planes as kernel
from stateroom.kernels.planes import Plane


@dataclass(frozen=True)
class Affine:
    """As `mx.quantize` packs: words [B, Hkv, N, D x bits / 32] uint32, scales, biases [B, Hkv, N, D / group].

    Scales and biases are of `dtype`, that of the activations. Bytes of a token's keys or values and a head,
    in groups of 64:

        width 64:  4 bits 36 in bfloat16, 40 in float32; 8 bits 68 and 72   (dense bfloat16: 128)
        width 128: 4 bits 72 and 80;                     8 bits 136 and 144 (dense bfloat16: 256)

    These are the bits of mlx-lm's quantised cache. Halves beside float32 activations would do for the demo
    model (float16; bfloat16 triples the KL of 8 bits), but not for groups whose fields lie within 0.01 of
    each other: with 8 bits their scale would be a subnormal.
    """

    bits: int
    group: int
    dtype: mx.Dtype

    @property
    def name(self) -> str:
        return f"affine{self.bits}"

    @property
    def planes(self) -> int:
        return 3

    def encode(self, fields: mx.array) -> tuple[mx.array, ...]:
        fields = fields.astype(self.dtype)
        words, scales, biases = mx.quantize(fields, group_size=self.group, bits=self.bits)
        # mx.quantize looks for the least and the greatest field, and some backends overlook a NaN there.
        groups = fields.reshape(*scales.shape, self.group)
        finite = mx.all(mx.isfinite(groups), axis=-1)
        return words, mx.where(finite, scales, mx.array(mx.nan, self.dtype)), biases

    def decode(self, planes: Sequence[mx.array]) -> mx.array:
        return kernel.dequantised(self.stored(planes)).astype(self.dtype)

    def stored(self, planes: Sequence[mx.array]) -> Plane:
        words, scales, biases = planes
        return kernel.Affine(words, scales, biases, self.group, self.bits)

    def turned(self, vectors: mx.array) -> mx.array:
        return vectors

    def turned_back(self, vectors: mx.array) -> mx.array:
        return vectors
