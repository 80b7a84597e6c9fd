"""Layers of every codec, content for them, and beside them in numpy what each row must hold, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from tests.caches.tokens import held, visible

from stateroom.caches.codecs.affine import Affine
from stateroom.caches.codecs.dense import Dense
from stateroom.caches.codecs.turbo import Turbo
from stateroom.caches.layout import Layout
from stateroom.caches.reach import FULL, Reach
from stateroom.caches.rows import PackedRows
from stateroom.caches.stored_rows import LayerCodecs

Bits = npt.NDArray[np.generic]
SPECIAL = [np.nan, -0.0, np.inf, 1e-30]  # bits that arithmetic on the way would change
WORD = 2**32 - 1


@dataclass(frozen=True)
class Layer:
    """A layer of `heads` KV heads."""

    codecs: LayerCodecs
    heads: int
    key_width: int
    value_width: int
    dtype: mx.Dtype

    @property
    def scale(self) -> float:
        """As models have it: scores of wide heads would differ so much else that their roundings show."""
        return float(self.key_width**-0.5)

    @property
    def quantised(self) -> bool:
        return not isinstance(self.codecs[0], Dense)


# All dimensions differ within a layer, and are prime where the codec has no groups.
DENSE = Layer((Dense(), Dense()), 2, 5, 3, mx.float32)
HALF = Layer((Dense(), Dense()), 7, 1, 11, mx.bfloat16)
AFFINE4 = Layer((Affine(4, 32, mx.float32), Affine(4, 64, mx.float32)), 3, 96, 64, mx.float32)
AFFINE8 = Layer((Affine(8, 128, mx.bfloat16), Affine(8, 32, mx.bfloat16)), 2, 128, 32, mx.bfloat16)
TURBO = Layer((Turbo(8, 64, mx.float32), Turbo(3, 128, mx.float32)), 1, 64, 128, mx.float32)
LAYERS = (DENSE, HALF, AFFINE4, AFFINE8, TURBO)


def bits(array: mx.array) -> Bits:
    """The array's bits; numpy has no bfloat16."""
    return np.array(array.view(mx.uint16)) if array.dtype == mx.bfloat16 else np.array(array)


def raw(array: mx.array) -> bytes:
    return bits(array).tobytes()


def noise(random: np.random.Generator, layers: Sequence[Layer], rows: int, tokens: int) -> list[mx.array]:
    """Keys and values of each layer in turn, [B, Hkv, N, D]."""
    made = []
    for layer in layers:
        for width in (layer.key_width, layer.value_width):
            values = random.normal(size=(rows, layer.heads, tokens, width)).astype(np.float32)
            if not layer.quantised:
                flat = values.reshape(-1)
                flat[random.integers(0, flat.size, 3)] = random.choice(SPECIAL, 3)
            made.append(mx.array(values).astype(layer.dtype))
    return made


def encoded(layers: Sequence[Layer], content: Sequence[mx.array]) -> list[Bits]:
    """The planes of new keys and values, [B, Hkv, N, field] each."""
    planes = []
    for i, layer in enumerate(layers):
        for codec, fields in zip(layer.codecs, content[2 * i : 2 * i + 2], strict=True):
            planes += [bits(plane) for plane in codec.encode(fields)]
    return planes


def feed(rows: PackedRows, content: Sequence[mx.array]) -> None:
    """One forward."""
    rows.begin(content[0].shape[2])
    for layer in range(len(rows.codecs)):
        rows.write(layer, content[2 * layer], content[2 * layer + 1])
    rows.commit()


def packed(layers: Sequence[Layer], rows: int = 1, reach: Reach = FULL) -> PackedRows:
    return PackedRows([layer.codecs for layer in layers], rows, reach)


@dataclass
class Kept:
    """One row: of each plane the bits of all its tokens, [Hkv, N, field], forgotten ones too."""

    planes: list[Bits]

    @classmethod
    def empty(cls, layers: Sequence[Layer]) -> Kept:
        content = noise(np.random.default_rng(0), layers, 1, 1)
        return cls([plane[0, :, :0] for plane in encoded(layers, content)])

    @property
    def length(self) -> int:
        return int(self.planes[0].shape[1])

    def and_then(self, new: Sequence[Bits]) -> Kept:
        return Kept([np.concatenate(pair, 1) for pair in zip(self.planes, new, strict=True)])

    def until(self, length: int) -> Kept:
        return Kept([plane[:, :length] for plane in self.planes])

    def of(self, tokens: Sequence[int]) -> list[bytes]:
        return [np.ascontiguousarray(plane[:, list(tokens)]).tobytes() for plane in self.planes]


@dataclass
class Twin:
    """Packed rows, and beside them what they must hold."""

    layers: Sequence[Layer]
    packed: PackedRows
    rows: list[Kept]
    round: list[int] | None = None  # lengths when a speculative round was opened
    seed: int = field(default=0)

    @classmethod
    def start(cls, layers: Sequence[Layer], rows: int = 1, reach: Reach = FULL) -> Twin:
        return cls(layers, packed(layers, rows, reach), [Kept.empty(layers) for _ in range(rows)])

    def with_packed(self, packed: PackedRows) -> Twin:
        """Other rows that must hold the same."""
        return replace(self, packed=packed, rows=list(self.rows))

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    def append(self, tokens: int) -> None:
        self.seed += 1
        content = noise(
            np.random.default_rng([self.seed, *self.lengths]), self.layers, len(self.rows), tokens
        )
        feed(self.packed, content)
        new = encoded(self.layers, content)
        self.rows = [row.and_then([plane[i] for plane in new]) for i, row in enumerate(self.rows)]

    def check(self) -> None:
        """Bytes of all live columns; no row misses what its next query sees; what can be trimmed; zeros."""
        layout, reach = self.packed.layout, self.packed.reach
        assert layout.offset == tuple(self.lengths)
        for row, kept in enumerate(self.rows):
            there = held(reach, kept.length, layout.forgotten[row])
            assert live(self.packed, row) == kept.of(there)
            assert {t for t in visible(reach, kept.length) if t < kept.length} <= set(there)
        if layout.rows > 1:
            assert_zeros_outside(self.packed)


def live(rows: PackedRows, row: int) -> list[bytes]:
    """The bytes of a row's live columns in every plane, read through the layout alone."""
    layout = rows.layout
    start, end = layout.left_pad[row], layout.ends[row]
    return [b"" if plane is None else raw(plane[row, :, start:end]) for plane in rows.planes]


def assert_zeros_outside(rows: PackedRows) -> None:
    layout = rows.layout
    for plane in rows.planes:
        if plane is None:
            continue
        columns = np.arange(plane.shape[2])
        for row, (start, end) in enumerate(zip(layout.left_pad, layout.ends, strict=True)):
            outside = (columns < start) | (columns >= end)
            assert not bits(plane)[row][:, outside].any()


@lru_cache
def dtypes(layer: Layer) -> tuple[mx.Dtype, ...]:
    """Of its planes."""
    keys, values = noise(np.random.default_rng(0), [layer], 1, 1)
    return tuple(p.dtype for p in (*layer.codecs[0].encode(keys), *layer.codecs[1].encode(values)))


def array(plane: Bits, dtype: mx.Dtype) -> mx.array:
    return mx.array(np.ascontiguousarray(plane)).view(dtype)


def decoded(layer: Layer, planes: Sequence[Bits]) -> list[mx.array]:
    """Keys and values [Hkv, N, D] of one row's planes of a layer."""
    arrays = [array(plane[None], dtype) for plane, dtype in zip(planes, dtypes(layer), strict=True)]
    split = layer.codecs[0].planes
    return [layer.codecs[0].decode(arrays[:split])[0], layer.codecs[1].decode(arrays[split:])[0]]


def with_padding(
    rows: Sequence[Kept], layers: Sequence[Layer], layout: Layout, reach: Reach, capacity: int
) -> list[mx.array]:
    """Planes as someone else might hand them over: what is no token is NaN, or a word of ones."""
    made = []
    kinds = [dtype for layer in layers for dtype in dtypes(layer)]
    for at, (empty, dtype) in enumerate(zip(Kept.empty(layers).planes, kinds, strict=True)):
        heads, _, width = empty.shape
        filled = mx.full((len(rows), heads, capacity, width), mx.nan if dtype != mx.uint32 else WORD, dtype)
        plane = np.array(bits(filled))
        for row, kept in enumerate(rows):
            tokens = held(reach, kept.length, layout.forgotten[row])
            plane[row, :, layout.left_pad[row] : layout.ends[row]] = kept.planes[at][:, tokens]
        made.append(array(plane, dtype))
    return made
