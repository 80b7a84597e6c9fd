"""Products with affine planes on a CPU: levels become floats, scales and biases are applied beside them.

mlx's own take 1.7 to 2.7 ns a field there, in a quantised product for each query anew; these take 0.3 for 8
bits and 0.4 for 4. (x86, float32, 8 rows of 1,024 tokens, 3 KV heads of width 64.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx

from stateroom.kernels.decode_attention import BLOCK, product_with_keys
from stateroom.kernels.planes import Affine

TOP_BITS = 0x80808080  # of the bytes of a word
HIGH_HALVES = 0xF0F0F0F0
# Fields unpacked at a time, 4 MiB: more comes from the system page by page, and takes up to twice as long.
PIECE_MAX = 1 << 20


class Levels(NamedTuple):
    """value = scale x level + bias, with levels around zero: smaller terms, so less is lost in their sum.

    levels [B, Hkv, S, D], of 4 bits in the order of `_stored_order`, scales and biases
    [B, Hkv, S, D / group]; all float32.
    """

    levels: mx.array
    scales: mx.array
    biases: mx.array


def times_transposed(left: mx.array, plane: Affine) -> mx.array:
    """[B, Hkv, M, D] and [B, Hkv, S, D] → [B, Hkv, M, S], float32."""
    ordered = _stored_order(left, plane.bits)
    sums = mx.unflatten(left, -1, (-1, plane.group)).sum(axis=-1)
    products: list[mx.array] = []
    for first, stop in _pieces(plane):
        piece = _unpacked(_after(products, plane.columns(first, stop)))
        if plane.width == plane.group:
            product = product_with_keys(ordered, piece.levels) * piece.scales.swapaxes(-1, -2)
        else:
            product = product_with_keys(ordered, _scaled(piece, plane.bits))
        products.append(product + sums @ piece.biases.swapaxes(-1, -2))
    return products[0] if len(products) == 1 else mx.concatenate(products, axis=-1)


def times(left: mx.array, plane: Affine) -> mx.array:
    """[B, Hkv, M, S] and [B, Hkv, S, D] → [B, Hkv, M, D], float32."""
    totals: list[mx.array] = []
    for first, stop in _pieces(plane):
        piece = _unpacked(_after(totals, plane.columns(first, stop)))
        weights = left[..., first:stop]
        if plane.width == plane.group:
            products = (weights * piece.scales.swapaxes(-1, -2)) @ piece.levels
        else:
            products = weights @ _scaled(piece, plane.bits)
        grouped = mx.unflatten(_own_order(products, plane.bits), -1, (-1, plane.group))
        total = grouped + (weights @ piece.biases)[..., None]
        totals.append(totals[-1] + total if totals else total)
    return totals[-1].flatten(-2)


def _pieces(plane: Affine) -> Iterator[tuple[int, int]]:
    rows, kv_heads, stored, width = plane.shape
    tokens = max(1, PIECE_MAX // (rows * kv_heads * width * BLOCK)) * BLOCK
    for first in range(0, stored, tokens):
        yield first, min(first + tokens, stored)


def _after(done: list[mx.array], piece: Affine) -> Affine:
    """One piece after the other, for mlx would unpack them side by side."""
    if not done:
        return piece
    (words,) = mx.depends([piece.words], [done[-1]])
    return replace(piece, words=words)


def _unpacked(plane: Affine) -> Levels:
    scales, biases = plane.scales.astype(mx.float32), plane.biases.astype(mx.float32)
    words = plane.words
    if plane.bits == 4:
        # 16 x (level - 8) of the low halves of the bytes, then of the high ones.
        words = mx.concatenate([words << 4, words], axis=-1) & HIGH_HALVES
        scales = scales / 16
    levels = (words ^ TOP_BITS).view(mx.int8).astype(mx.float32)
    return Levels(levels, scales, biases + 128 * scales)


def _scaled(unpacked: Levels, bits: int) -> mx.array:
    """levels x scales, [B, Hkv, S, D]."""
    groups = unpacked.scales.shape[-1]
    if bits == 4:
        levels = mx.unflatten(unpacked.levels, -1, (2, groups, -1))
        return (levels * unpacked.scales[..., None, :, None]).flatten(-3)
    return (mx.unflatten(unpacked.levels, -1, (groups, -1)) * unpacked.scales[..., None]).flatten(-2)


def _stored_order(x: mx.array, bits: int) -> mx.array:
    """Fields as their levels come: of 4 bits the even ones, then the odd ones."""
    return x if bits == 8 else mx.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def _own_order(x: mx.array, bits: int) -> mx.array:
    return x if bits == 8 else mx.unflatten(x, -1, (2, -1)).swapaxes(-1, -2).flatten(-2)
