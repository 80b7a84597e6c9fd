"""Attention over the tokens of one row, in float64, from positions alone."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from tests.caches.content import Bits, Layer, array, dtypes

from stateroom.caches.codecs.affine import Affine
from stateroom.caches.codecs.codec import Codec

Floats = npt.NDArray[np.float64]

# Of the norm of a head's answer. Halves are summed in float32 too; beyond this they may be off by one
# rounding, which is 2e-3 of the norm in bfloat16, more or less.
BOUND = 2e-6


def floats(x: mx.array) -> Floats:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def exact(layer: Layer, planes: Sequence[Bits]) -> tuple[Floats, Floats]:
    """What one row's planes of a layer stand for: keys and values [Hkv, T, D]."""
    arrays = [array(plane[None], dtype) for plane, dtype in zip(planes, dtypes(layer), strict=True)]
    split = layer.codecs[0].planes
    return _exact(layer.codecs[0], arrays[:split]), _exact(layer.codecs[1], arrays[split:])


def _exact(codec: Codec, planes: Sequence[mx.array]) -> Floats:
    if not isinstance(codec, Affine):
        return floats(codec.decode(planes)[0])
    words, scales, biases = np.array(planes[0][0]), floats(planes[1][0]), floats(planes[2][0])
    per_word = 32 // codec.bits
    shifts = np.arange(per_word, dtype=np.uint32) * codec.bits
    levels = (words[..., None] >> shifts) & (2**codec.bits - 1)
    levels = levels.reshape(*words.shape[:-1], -1)
    groups: Floats = np.repeat(scales, codec.group, axis=-1) * levels + np.repeat(
        biases, codec.group, axis=-1
    )
    return groups


def attended(
    queries: Floats,
    keys: Floats,
    values: Floats,
    sees: Sequence[Sequence[int]],
    scale: float,
    sinks: Floats | None = None,
    added: Floats | None = None,
) -> Floats:
    """Queries [H, N, D] of one row, keys and values [Hkv, T, D] of all its tokens; `sees`: the tokens that
    each query sees; `added` [H, N, T] to the scores; `sinks` [H] → [H, N, Dv]."""
    heads, count, _ = queries.shape
    repeats = heads // keys.shape[0]
    out = np.zeros((heads, count, values.shape[-1]))
    for head in range(heads):
        for query, tokens in enumerate(sees):
            at = list(tokens)
            scores = scale * keys[head // repeats, at] @ queries[head, query]
            if added is not None:
                scores = scores + added[head, query, at]
            if sinks is not None:
                scores = np.append(scores, sinks[head])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[head, query] = weights[: len(at)] @ values[head // repeats, at]
    return out


def assert_close(got: mx.array, want: Floats, bound: float = BOUND) -> None:
    """Each head's answer [..., Dv] lies within `bound` of its norm, but for the rounding of the dtype."""
    found = floats(got)
    assert np.isfinite(found).all()
    rounding = mx.finfo(got.dtype).eps / 2 * np.abs(want)
    beyond = (np.abs(found - want) - rounding) / np.linalg.norm(want, axis=-1, keepdims=True)
    assert (beyond <= bound).all(), f"off by {beyond.max():.2e} of the norm"
