"""The law that every architecture is held to: whatever was done to a session's rows, its next logits are
those of a fresh session that was given the same tokens in one forward.

The bound is relative to the largest logit. Where a model chooses (experts, tokens to read by an index), a
choice flips only when two candidates lie within rounding of each other; the tiny models' candidates don't.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from tests.architectures.configs import VOCAB, make

from stateroom.caches.session import SessionCache

RELATIVE = 1e-4  # of the largest logit, float32

Logits = npt.NDArray[np.float32]


@lru_cache(maxsize=2)
def model_of(name: str) -> Any:
    return make(name)


def random_tokens(random: np.random.Generator, n: int) -> list[int]:
    return [int(token) for token in random.integers(0, VOCAB, n)]


def fresh_logits(model: Any, tokens: list[int]) -> Logits:
    """[N, V] of one forward in a session of its own."""
    return np.array(SessionCache.create(model).forward(model, mx.array([tokens]))[0])


def distance(got: Logits, want: Logits) -> float:
    """The largest difference, of the largest logit; infinite when anything isn't finite."""
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - want).max() / np.abs(want).max())


@dataclass
class Rows:
    """A session or a group, and beside it the tokens of each of its rows."""

    model: Any
    cache: SessionCache
    tokens: list[list[int]]

    @classmethod
    def start(cls, model: Any, tokens: list[int] | None = None) -> Rows:
        rows = cls(model, SessionCache.create(model), [[]])
        if tokens:
            rows.feed([tokens])
        return rows

    def feed(self, new: list[list[int]]) -> float:
        """Appends [B, N] tokens; how far the new logits are from the law in the worst row."""
        logits = self.cache.forward(self.model, mx.array(new))
        mx.eval(logits, self.cache.arrays())
        worst = 0.0
        for row, tokens in enumerate(self.tokens):
            tokens.extend(new[row])
            want = fresh_logits(self.model, tokens)[-len(new[row]) :]
            worst = max(worst, distance(np.array(logits[row]), want))
        if self.cache.offsets != tuple(map(len, self.tokens)):
            raise AssertionError(f"offsets {self.cache.offsets} of {list(map(len, self.tokens))} tokens")
        return worst

    def trim(self, row: int, n: int) -> None:
        self.cache.trim(row, n)
        del self.tokens[row][len(self.tokens[row]) - n :]

    def fork(self) -> Rows:
        return Rows(self.model, self.cache.fork(), [list(self.tokens[0])])

    def extract(self, row: int) -> Rows:
        return Rows(self.model, self.cache.extract_row(row), [list(self.tokens[row])])

    def filter(self, keep: list[int]) -> None:
        self.cache.filter_rows(keep)
        self.tokens = [self.tokens[i] for i in keep]

    @classmethod
    def merge(cls, sources: list[Rows]) -> Rows:
        cache = SessionCache.merge_rows([source.cache for source in sources])
        return cls(sources[0].model, cache, [list(row) for source in sources for row in source.tokens])
