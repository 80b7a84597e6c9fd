"""The codecs that tests go through."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from stateroom.caches.codecs.affine import Affine
from stateroom.caches.codecs.codec import Codec
from stateroom.caches.codecs.dense import Dense
from stateroom.caches.codecs.turbo import Turbo

Kind = tuple[str, int]  # a codec's name and the head width

KINDS: tuple[Kind, ...] = (
    ("dense", 37),
    ("affine4", 96),
    ("affine4", 64),
    ("affine8", 128),
    ("affine8", 160),
    ("turbo1", 512),
    ("turbo3", 64),
    ("turbo5", 256),
    ("turbo7", 128),
    ("turbo8", 64),
)
DTYPES = (mx.float32, mx.bfloat16, mx.float16)


def codec_of(kind: Kind, dtype: mx.Dtype) -> Codec:
    name, width = kind
    if name == "dense":
        return Dense()
    bits = int(name[-1])
    if name.startswith("turbo"):
        return Turbo(bits, width, dtype)
    return Affine(bits, {96: 32, 160: 32, 64: 64, 128: 128}[width], dtype)


def fields(shape: tuple[int, ...], dtype: mx.Dtype, seed: int = 5) -> mx.array:
    """Vectors of very different lengths, with a few fields that stand out."""
    random = np.random.default_rng(seed)
    drawn = random.normal(size=shape) * np.exp(random.normal(size=(*shape[:-1], 1)))
    drawn[..., ::29] *= 5
    return mx.array(drawn.astype(np.float32)).astype(dtype)


def octets(plane: mx.array) -> np.ndarray:
    return np.array(mx.contiguous(plane).view(mx.uint8))
