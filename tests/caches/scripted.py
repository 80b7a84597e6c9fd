"""A model of any layers that stores each token's number, so that a test can read what every query sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList

from stateroom.caches.codecs.scheme import Scheme
from stateroom.caches.layers.attention_layer import AttentionLayer
from stateroom.caches.session import SessionCache

WIDTH = 64  # of heads: wide enough to quantise


class Scripted:
    """Keys and values are the tokens, all fields alike; states are sums of them, and of their squares.

    `fails_at`: the layer, or part of a composite, before which a forward raises.
    """

    def __init__(self, *make: Callable[[], Any]) -> None:
        self.make = make
        self.fails_at: int | None = None
        self.stored = 0
        self.noted: list[tuple[Any, mx.array, int]] = []  # per attention layer: mask, keys, new tokens

    def make_cache(self) -> list[Any]:
        return [make() for make in self.make]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        self.stored, self.noted = 0, []
        for layer in cache:
            self.store(layer, inputs.astype(mx.float32))
        return mx.repeat(inputs.astype(mx.float32)[..., None], 3, axis=2)

    def store(self, layer: Any, tokens: mx.array) -> None:
        if isinstance(layer, CacheList):
            for part in layer.caches:
                self.store(part, tokens)
            return
        if self.stored == self.fails_at:
            raise RuntimeError("injected")
        self.stored += 1
        if isinstance(layer, ArraysCache):
            mask = layer.make_mask(tokens.shape[1])
            real = tokens if mask is None else mx.where(mask, tokens, 0.0)
            total = mx.concatenate(
                [real.sum(axis=1, keepdims=True), mx.square(real).sum(axis=1, keepdims=True)], 1
            )
            layer[0] = total if layer[0] is None else layer[0] + total
            layer.advance(tokens.shape[1])
        else:
            self.attend(layer, tokens)

    def attend(self, layer: AttentionLayer, tokens: mx.array) -> None:
        mask = layer.make_mask(tokens.shape[1])
        wide = mx.repeat(tokens[:, None, :, None], WIDTH, axis=3)
        keys, values = layer.update_and_fetch(wide, 2 * wide)
        self.noted.append((mask, keys[:, 0, :, 0], tokens.shape[1]))
        layer.attend(wide, keys, values, 1.0, mask)

    def seen(self, layer: int, row: int) -> list[list[int]]:
        """The tokens that each query of the last forward saw in an attention layer, by column."""
        mask, keys, n = self.noted[layer]
        stored = keys.shape[1]
        shown = np.tri(n, stored, stored - n, dtype=bool)
        if isinstance(mask, mx.array):
            shown = np.broadcast_to(np.array(mask), (keys.shape[0], 1, n, stored))[row, 0]
        numbers = np.array(keys.astype(mx.float32))[row]
        return [[round(float(token)) for token in numbers[query]] for query in shown]


def feed(model: Scripted, session: SessionCache, tokens: Sequence[Sequence[int]]) -> None:
    session.forward(model, mx.array([list(row) for row in tokens]))
    mx.eval(session.arrays())


def fed(
    model: Scripted, tokens: Sequence[int], chunk: int | None = None, scheme: Scheme | None = None
) -> SessionCache:
    """A session of those tokens, in pieces of `chunk`."""
    session = SessionCache.create(model, scheme)
    step = chunk or max(len(tokens), 1)
    for start in range(0, len(tokens), step):
        feed(model, session, [tokens[start : start + step]])
    return session
