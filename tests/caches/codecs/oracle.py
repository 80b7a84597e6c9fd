"""What planes stand for, in float64 and from their bits, written without the codecs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import shake_256

import mlx.core as mx
import numpy as np
from tests.kernels.oracle import unpacked

from stateroom.caches.codecs.affine import Affine
from stateroom.caches.codecs.codebook import codebook
from stateroom.caches.codecs.codec import Codec
from stateroom.caches.codecs.dense import Dense
from stateroom.caches.codecs.turbo import Turbo


def numbers(array: mx.array) -> np.ndarray:
    halves = array.dtype in (mx.float16, mx.bfloat16)
    return np.array(array.astype(mx.float32) if halves else array)


def decoded(codec: Codec, planes: Sequence[mx.array]) -> np.ndarray:
    """float64 [B, Hkv, S, D]."""
    parts = [numbers(plane) for plane in planes]
    if isinstance(codec, Dense):
        return parts[0].astype(np.float64)
    if isinstance(codec, Affine):
        words, scales, biases = parts
        return unpacked(words, scales, biases, codec.group, codec.bits)
    assert isinstance(codec, Turbo)
    words, rms = parts
    chosen = levels(codec.width, codec.bits)[bit_stream(words, codec.bits)]
    return chosen * rms.astype(np.float64) @ rotation(codec.width)


def bit_stream(words: np.ndarray, bits: int) -> np.ndarray:
    """The integers of `bits` bits that stand one after the other in each row of words, lowest bit first."""
    single = np.stack([words >> np.uint32(i) & np.uint32(1) for i in range(32)], axis=-1)
    fields = single.reshape(*words.shape[:-1], -1, bits).astype(np.int64)
    return fields @ (2 ** np.arange(bits))


def rotation(width: int) -> np.ndarray:
    """[D, D]: vectors x are turned by `rotation @ x`, and turned rows back by `y @ rotation`."""
    index = np.arange(width)
    parity = np.array([[bin(i & j).count("1") % 2 for j in index] for i in index])
    drawn = shake_256(b"stateroom turbo").digest(width // 8)
    signs = np.array([-1.0 if drawn[i // 8] >> (7 - i % 8) & 1 else 1.0 for i in index])
    return (1 - 2 * parity) * signs / np.sqrt(width)


def levels(width: int, bits: int) -> np.ndarray:
    """By Lloyd's own iteration for few bits; else the codec's, which `test_codebook` shows to be the best."""
    return _lloyd(width, bits) if bits <= 4 else np.array(codebook(width, bits).levels, np.float64)


@lru_cache
def _lloyd(width: int, bits: int) -> np.ndarray:
    found = np.linspace(-2, 2, 2**bits)
    while True:
        following = means(found, width)
        if np.abs(following - found).max() < 1e-10:
            return following
        found = following


def means(of: np.ndarray, width: int) -> np.ndarray:
    """The mean of all coordinates that are nearest to each level, by the trapezoidal rule."""
    at, mass, moment = _integrals(width)
    edges = np.concatenate([at[:1], (of[1:] + of[:-1]) / 2, at[-1:]])
    return np.diff(np.interp(edges, at, moment)) / np.diff(np.interp(edges, at, mass))


@lru_cache
def _integrals(width: int) -> tuple[np.ndarray, ...]:
    """Of the density of a unit vector's coordinate times sqrt(D), and of that times the coordinate."""
    at = np.linspace(-1, 1, 1_000_001)
    weight = (1 - at**2) ** ((width - 3) / 2)
    at *= np.sqrt(width)
    return at, *(np.concatenate([[0], np.cumsum(x[1:] + x[:-1])]) for x in (weight, weight * at))
