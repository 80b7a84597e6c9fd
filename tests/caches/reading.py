"""A model of any layers of attention that computes each row by itself: company changes no bit of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache

from stateroom.caches.attention import scaled_dot_product_attention
from stateroom.caches.codecs.scheme import Scheme
from stateroom.caches.session import SessionCache

WIDTH = 64  # of heads: wide enough to quantise
VOCAB = 50
SIZE = 8  # of windows and chunks


def window(keep: int = 0) -> RotatingKVCache:
    return RotatingKVCache(max_size=SIZE, keep=keep)


class Reading:
    """Two query heads on one of keys and values; what a layer reads is added to what it was given."""

    def __init__(self, *make: Callable[[], Any], sinks: bool = False) -> None:
        self.make = make
        random = np.random.default_rng(7)
        self.embedding = mx.array(random.standard_normal((VOCAB, WIDTH)), dtype=mx.float32)
        self.turns = mx.array(random.standard_normal((len(make), 3, WIDTH)), dtype=mx.float32)
        self.sinks = mx.array([0.3, -0.7]) if sinks else None
        self.caches: list[Any] = []  # of the last forward

    def make_cache(self) -> list[Any]:
        return [make() for make in self.make]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        self.caches = cache
        n = inputs.shape[1]
        # [B, 1, N, D]
        x = self.embedding[inputs][:, None]
        for layer, turn in zip(cache, self.turns, strict=True):
            mask = layer.make_mask(n)
            position = (mx.array(layer.offset).reshape(-1, 1) + mx.arange(n))[:, None, :, None]
            placed = x + mx.sin(0.1 * position)
            queries = mx.concatenate([placed * turn[0], placed * turn[1]], axis=1)
            keys, values = layer.update_and_fetch(placed * turn[2], x)
            read = scaled_dot_product_attention(
                queries, keys, values, cache=layer, scale=0.1, mask=mask, sinks=self.sinks
            )
            x = x + read.mean(axis=1, keepdims=True)
        return x[:, 0]


ALL = Reading(KVCache, window, lambda: window(keep=3), lambda: ChunkedKVCache(SIZE))
MERGEABLE = Reading(KVCache, window, lambda: window(keep=3), sinks=True)  # chunks run one row at a time
FULL = Reading(KVCache, KVCache)


def fed(model: Reading, tokens: Sequence[int], scheme: Scheme | None = None) -> SessionCache:
    session = SessionCache.create(model, scheme)
    if len(tokens):
        session.forward(model, mx.array([list(tokens)]))
        mx.eval(session.arrays())
    return session
