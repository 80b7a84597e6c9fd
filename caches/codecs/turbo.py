"""TurboQuant (arXiv 2504.19874): a random rotation, the best levels for each coordinate, the vector's length.

The rotation makes the coordinates of any vector look alike, so that one codebook fits all. This is the
paper's first variant, of least squared error. Its second spends a bit of each coordinate on a correction that
makes products unbiased; here they come out too small by the share that the error has of the squared length:
3.4 % with 3 bits, 0.004 % with 8.

The rotation is Hadamard's after fixed random signs: exact to float32's rounding, the same for a token
whatever comes with it (a product of matrices isn't), and D log D. On the keys and values of the demo model
the error with 3 bits is 0.0311 and 0.0331 of the squared length; with a random orthogonal matrix it is 0.0332
and 0.0335, with two such rounds in between. The price: a vector with one field that isn't zero becomes one of
equal coordinates, whose error with 3 bits is 0.062, beyond the paper's bound of 0.043 for random rotations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import shake_256

import mlx.core as mx
import numpy as np

from stateroom.caches.codecs.codebook import codebook
from stateroom.caches.codecs.packing import packed, unpacked

WIDTHS = (64, 128, 256, 512)
SIGNS = b"stateroom turbo"  # what the signs are drawn from; stored bytes mean something only with it


@dataclass(frozen=True)
class Turbo:
    """Planes: words [B, Hkv, N, D x bits / 32] uint32, levels in order; rms [B, Hkv, N, 1] float16.

    Kept is the root mean square of a vector's fields, not its length: that is never more than the greatest
    field, so float16 holds it for whatever float16 activations can be. Beyond 65,504 it is infinite, and
    visibly so in what is decoded. bfloat16 would hold more, but move all scores of a key by up to 0.4 %,
    float16 by 0.05 %.

    A vector takes D x bits / 8 + 2 bytes. Keys of 8 bits with values of 3, of a token and head: 92 bytes at
    width 64, 2.78 times less than bfloat16; 180 at 128, 2.84 times; 356 at 256, 2.88; 708 at 512, 2.89.
    """

    bits: int
    width: int
    dtype: mx.Dtype

    @property
    def name(self) -> str:
        return f"turbo{self.bits}"

    @property
    def planes(self) -> int:
        return 2

    def encode(self, fields: mx.array) -> tuple[mx.array, ...]:
        fields = fields.astype(mx.float32)
        # The transform's first field is the sum: in the same order for any number of tokens, unlike mx.sum.
        squares = mx.hadamard_transform(mx.square(fields), scale=1 / self.width)[..., :1]
        rms = mx.sqrt(squares)
        usable = mx.isfinite(rms) & (rms > 0)
        coordinates = mx.where(usable, self.turned(fields) / rms, 0.0)
        indices = codebook(self.width, self.bits).nearest(coordinates)
        return packed(indices, self.bits), rms.astype(mx.float16)

    def decode(self, planes: Sequence[mx.array]) -> mx.array:
        return self.turned_back(self.stored(planes)).astype(self.dtype)

    def stored(self, planes: Sequence[mx.array]) -> mx.array:
        """float32, turned."""
        words, rms = planes
        levels = codebook(self.width, self.bits).looked_up(unpacked(words, self.bits))
        return levels * rms.astype(mx.float32)

    def turned(self, vectors: mx.array) -> mx.array:
        return mx.hadamard_transform(vectors.astype(mx.float32) * signs(self.width))

    def turned_back(self, vectors: mx.array) -> mx.array:
        return mx.hadamard_transform(vectors.astype(mx.float32)) * signs(self.width)


@lru_cache
def signs(width: int) -> mx.array:
    """float32 [width] of 1 and -1."""
    drawn = np.frombuffer(shake_256(SIGNS).digest(width // 8), np.uint8)
    return mx.array(1 - 2 * np.unpackbits(drawn).astype(np.float32))
