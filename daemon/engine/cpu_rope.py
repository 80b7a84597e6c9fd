"""Rotary positions as one product a row, for CPUs.

mlx composes `fast.rope` of 32 primitives there, at every call. But what a position does to a head's fields is
one matrix (RoFormer, arXiv 2104.09864), the same for all heads, for queries and keys, and for all layers that
turn alike. So it is made once a step. Angles are computed as mlx does, to the last bit: tokens of a session
are turned by either form, and a float32 angle of a far position is off by more than a rounding.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.rope_utils import Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE

FIELDS_MOST = 1 << 17  # of all matrices of a step: half a MiB, read by every layer
KEPT_MOST = 4  # matrices: rows of some model may be told their positions in more than one way


class Rotation:
    """How modules of equal parameters turn the first `dims` fields of a head, in float32.

    `frequencies` [dims / 2]: radians a token. `factor`: what the turned fields are multiplied by. Pairs are
    neighbours if `traditional`, else half of `dims` apart.
    """

    def __init__(
        self, dims: int, traditional: bool, frequencies: mx.array, scale: float = 1.0, factor: float = 1.0
    ) -> None:
        self._dims = dims
        self._traditional = traditional
        self._frequencies = frequencies
        self._scale = scale
        self._factor = factor
        mx.eval(frequencies)
        self._kept: dict[Hashable, mx.array] = {}
        self._constants: dict[int, tuple[mx.array, mx.array]] = {}

    def turned(self, x: mx.array, offset: int | mx.array) -> mx.array | None:
        """x [B, H, N, D], the first of the N tokens at `offset`, a number or int [B].

        None where that has no such form, or mlx's own is faster.
        """
        if x.ndim != 4 or x.dtype != mx.float32:
            return None
        rows, _, count, width = x.shape
        if isinstance(offset, mx.array):
            if offset.ndim > 1 or offset.size not in (1, rows):
                return None
            at_once = offset.size * count
        else:
            at_once = count
        if at_once * width * width > FIELDS_MOST:
            return None
        # [B, N, H, D] @ [B or 1, N, D, D]
        return (x.swapaxes(1, 2) @ self._matrices(offset, count, width)).swapaxes(1, 2)

    def _matrices(self, offset: int | mx.array, count: int, width: int) -> mx.array:
        try:
            # By value: mlx-lm's caches change their arrays of offsets in place.
            values = offset.tolist() if isinstance(offset, mx.array) else offset
        except ValueError:  # a trace, which has no values yet, and finds equal parts by itself
            return self._made(offset, count, width)
        at = tuple(values) if isinstance(values, list) else values
        key = (at, count, width)
        if key not in self._kept:
            while len(self._kept) >= KEPT_MOST:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = self._made(offset, count, width)
        return self._kept[key]

    def _made(self, offset: int | mx.array, count: int, width: int) -> mx.array:
        first = mx.array(offset, dtype=mx.float32).reshape(-1, 1)
        # [B or 1, N, dims / 2]
        angles = ((first + mx.arange(count)) * self._scale)[..., None] * self._frequencies
        cos, sin = self._spread(mx.cos(angles), 1.0, width), self._spread(mx.sin(angles), 0.0, width)
        stays, crosses = self._pattern(width)
        return stays * cos + crosses * sin

    def _spread(self, of_pairs: mx.array, beyond: float, width: int) -> mx.array:
        """[..., dims / 2] → [..., 1, D]: for each field of a head."""
        rest = (*of_pairs.shape[:-1], width - self._dims)
        if self._factor != 1.0:
            of_pairs = of_pairs * self._factor
        both = [mx.repeat(of_pairs, 2, axis=-1)] if self._traditional else [of_pairs, of_pairs]
        return mx.concatenate([*both, mx.full(rest, beyond)], axis=-1)[..., None, :]

    def _pattern(self, width: int) -> tuple[mx.array, mx.array]:
        """[D, D]: where a field goes by its cosine, and where, with which sign, by its sine."""
        if width not in self._constants:
            half = self._dims // 2
            first = np.arange(half) * 2 if self._traditional else np.arange(half)
            second = first + (1 if self._traditional else half)
            crosses = np.zeros((width, width), np.float32)
            crosses[second, first], crosses[first, second] = -1.0, 1.0
            self._constants[width] = mx.array(np.eye(width, dtype=np.float32)), mx.array(crosses)
        return self._constants[width]


class _Turning(nn.Module):
    """Before one of mlx's or mlx-lm's modules in the order of classes."""

    _rotation: Rotation

    def __call__(self, x: mx.array, offset: int | mx.array = 0, **more: Any) -> mx.array:
        turned = None if more else self._rotation.turned(x, offset)
        return super().__call__(x, offset=offset, **more) if turned is None else turned


def _rotation_of(module: Any) -> tuple[Hashable, Rotation]:
    """The rotation of a module, and what tells it from others."""
    if type(module) is nn.RoPE:
        dims, scale = module.dims, module.scale
        # As mlx spells it, for its rounding.
        half = dims // 2
        frequencies = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (np.log(module.base) / half))
        return (dims, module.traditional, module.base, scale), Rotation(
            dims, module.traditional, frequencies, scale
        )
    dims = module.dim if isinstance(module, SuScaledRoPE) else module.dims
    factor = {SuScaledRoPE: "_scale", YarnRoPE: "mscale"}.get(type(module))
    by = 1.0 if factor is None else float(getattr(module, factor))
    traditional = False if isinstance(module, SuScaledRoPE) else module.traditional
    frequencies = mx.reciprocal(module._freqs.astype(mx.float32))
    return (dims, traditional, bytes(np.array(frequencies)), by), Rotation(
        dims, traditional, frequencies, factor=by
    )


KINDS: dict[type[nn.Module], type[nn.Module]] = {
    kind: type(f"Turning{kind.__name__}", (_Turning, kind), {})
    for kind in (nn.RoPE, Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE)
}


def use_rotations(model: nn.Module) -> int:
    """Makes a model's rotary modules turn few float32 tokens by one product; gives how many."""
    shared: dict[Hashable, Rotation] = {}
    swapped = 0
    for module in model.modules():
        if type(module) in KINDS:
            key, rotation = _rotation_of(module)
            module._rotation = shared.setdefault(key, rotation)
            module.__class__ = KINDS[type(module)]
            swapped += 1
    return swapped
