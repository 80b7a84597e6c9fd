"""Small integers without a gap between them: field f in bits [f x bits, (f + 1) x bits) of a row of words,
lowest bits first. Where mlx has a packing of so many bits (2 to 6 and 8), it is the same."""

from __future__ import annotations

import mlx.core as mx

EIGHT = 8  # fields that fill whole bytes, whatever their bits


def packed(indices: mx.array, bits: int) -> mx.array:
    """uint8 [..., D] below 2^bits → uint32 [..., D x bits / 32]."""
    if bits == EIGHT:
        return indices.view(mx.uint32)
    *lead, width = indices.shape
    eights = indices.reshape(*lead, width // EIGHT, EIGHT).astype(mx.uint64) << _shifts(bits)
    # [..., D / 8, 8] bytes, of which `bits` are used
    octets = eights.sum(axis=-1, keepdims=True).view(mx.uint8)
    return octets[..., :bits].reshape(*lead, width * bits // EIGHT).view(mx.uint32)


def unpacked(words: mx.array, bits: int) -> mx.array:
    """uint32 [..., D x bits / 32] → uint8 [..., D]."""
    if bits == EIGHT:
        return words.view(mx.uint8)
    octets = words.view(mx.uint8)
    *lead, count = octets.shape
    octets = octets.reshape(*lead, count // bits, bits)
    octets = mx.pad(octets, [(0, 0)] * (octets.ndim - 1) + [(0, EIGHT - bits)])
    eights: mx.array = (octets.view(mx.uint64) >> _shifts(bits)) & (2**bits - 1)
    return eights.astype(mx.uint8).reshape(*lead, count * EIGHT // bits)


def _shifts(bits: int) -> mx.array:
    return mx.array([bits * field for field in range(EIGHT)], dtype=mx.uint64)
