"""Stored keys or values, as a kernel reads them: dense, or affine in mlx's packing."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

WORD_BITS = 32
GROUPS = (32, 64, 128)
BITS = (4, 8)


@dataclass(frozen=True)
class Affine:
    """A head's fields in groups, each field an integer of `bits`: value = scale x integer + bias.

    words [B, Hkv, S, D x bits / 32] uint32, the first field in the lowest bits; scales and biases
    [B, Hkv, S, D / group]; as `mx.quantize(plane, group, bits)` gives them.
    """

    words: mx.array
    scales: mx.array
    biases: mx.array
    group: int
    bits: int

    def __post_init__(self) -> None:
        if self.bits not in BITS or self.group not in GROUPS:
            raise ValueError(f"affine planes of {self.bits} bits in groups of {self.group} are not supported")
        groups = (*self.words.shape[:-1], self.width // self.group)
        if self.width % self.group or self.scales.shape != groups or self.biases.shape != groups:
            raise ValueError(
                f"{self.width} fields in groups of {self.group} do not fit scales {self.scales.shape}"
                f" and biases {self.biases.shape}"
            )

    @property
    def width(self) -> int:
        return self.words.shape[-1] * WORD_BITS // self.bits

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, Hkv, S, D], of what is stored."""
        return (*self.words.shape[:-1], self.width)

    @property
    def nbytes(self) -> int:
        return sum(part.size * part.dtype.size for part in (self.words, self.scales, self.biases))

    def columns(self, first: int, stop: int) -> Affine:
        """The tokens of [first, stop)."""
        words, scales, biases = (part[:, :, first:stop] for part in (self.words, self.scales, self.biases))
        return Affine(words, scales, biases, self.group, self.bits)


Plane = mx.array | Affine


def quantised(plane: mx.array, group: int, bits: int) -> Affine:
    words, scales, biases = mx.quantize(plane, group_size=group, bits=bits)
    return Affine(words, scales, biases, group, bits)


def arrays(plane: Plane) -> tuple[mx.array, ...]:
    return (plane.words, plane.scales, plane.biases) if isinstance(plane, Affine) else (plane,)


def like(plane: Plane, parts: list[mx.array]) -> Plane:
    """The plane with other arrays in the places of `arrays(plane)`."""
    if not isinstance(plane, Affine):
        return parts[0]
    words, scales, biases = parts
    return Affine(words, scales, biases, plane.group, plane.bits)


def columns(plane: Plane, first: int, stop: int) -> Plane:
    """The tokens of [first, stop)."""
    return plane.columns(first, stop) if isinstance(plane, Affine) else plane[:, :, first:stop]


def silenced(plane: Plane, live: mx.array) -> Plane:
    """Zeros where `live`, bool [B or 1, S], is false: a weight of 0 does not silence a NaN.

    Words mean nothing without a scale, and stay.
    """
    live = live[:, None, :, None]
    return like(
        plane,
        [
            part if part.dtype == mx.uint32 else mx.where(live, part, mx.zeros((), part.dtype))
            for part in arrays(plane)
        ],
    )


def nbytes(plane: Plane) -> int:
    return sum(part.size * part.dtype.size for part in arrays(plane))


def dequantised(plane: Plane) -> mx.array:
    """[B, Hkv, S, D] float32."""
    if not isinstance(plane, Affine):
        return plane.astype(mx.float32)
    scales, biases = plane.scales.astype(mx.float32), plane.biases.astype(mx.float32)
    return mx.dequantize(plane.words, scales, biases, group_size=plane.group, bits=plane.bits)
