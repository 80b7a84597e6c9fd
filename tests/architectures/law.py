"""The law that every architecture is held to: whatever was done to a session's rows, its next logits are
those of a fresh session that was given the same tokens in one forward.

The bound is relative to the largest logit. Where a model chooses (experts, tokens to read by an index), a
choice flips only when two candidates lie within rounding of each other; the tiny models' candidates don't.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from tests.architectures.configs import VOCAB, make

from stateroom.caches.codecs.scheme import Scheme
from stateroom.caches.probe import rows_agree
from stateroom.caches.session import SessionCache

RELATIVE = 1e-4  # of the largest logit, float32
QUANTISED_NATS = 0.02  # by how much quantised rows may differ from the same rows in one forward

Logits = npt.NDArray[np.float32]


@lru_cache(maxsize=2)
def model_of(name: str) -> Any:
    return make(name)


@lru_cache(maxsize=2)
def rows_may_share(name: str) -> bool:
    """What the library says of rows of different lengths in one group."""
    return rows_agree(model_of(name))


def random_tokens(random: np.random.Generator, n: int) -> list[int]:
    return [int(token) for token in random.integers(0, VOCAB, n)]


def fresh_logits(model: Any, tokens: list[int], scheme: Scheme | None = None) -> Logits:
    """[N, V] of one forward in a session of its own."""
    return np.array(SessionCache.create(model, scheme).forward(model, mx.array([tokens]))[0])


def distance(got: Logits, want: Logits) -> float:
    """The largest difference, of the largest logit; infinite when anything isn't finite."""
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - want).max() / np.abs(want).max())


def divergence(got: Logits, want: Logits) -> float:
    """The mean KL divergence of predictions [N, V], in nats; infinite when anything isn't finite."""
    if not np.isfinite(got).all():
        return float("inf")
    got, want = (logits - np.logaddexp.reduce(logits, -1, keepdims=True) for logits in (got, want))
    return float((np.exp(want) * (want - got)).sum(-1).mean())


@dataclass(repr=False)
class Rows:
    """A session or a group, and beside it the tokens of each of its rows.

    Quantised rows are measured by `divergence`: one rounding may move a stored number by a whole level, and
    a choice with it.
    """

    model: Any
    cache: SessionCache
    tokens: list[list[int]]
    scheme: Scheme | None = None
    unchecked: list[mx.array] = field(default_factory=list)  # logits [B, N, V] since the last check

    @classmethod
    def start(cls, model: Any, tokens: list[int] | None = None, scheme: Scheme | None = None) -> Rows:
        rows = cls(model, SessionCache.create(model, scheme), [[]], scheme)
        if tokens:
            rows.grow([tokens])
        return rows

    def grow(self, new: list[list[int]]) -> None:
        """Appends [B, N] tokens."""
        logits = self.cache.forward(self.model, mx.array(new))
        mx.eval(logits, self.cache.arrays())
        for tokens, more in zip(self.tokens, new, strict=True):
            tokens.extend(more)
        self.unchecked.append(logits)
        self.check_offsets()

    def off(self) -> float:
        """How far the logits since the last time (or trim, or other change of rows) are from the law."""
        got = np.concatenate([np.array(logits) for logits in self.unchecked], axis=1)
        self.unchecked = []
        return max(self._off(row, got[row]) for row in range(len(self.tokens)))

    def feed(self, new: list[list[int]]) -> float:
        """`grow`, and how far these logits are from the law."""
        self.unchecked = []
        self.grow(new)
        return self.off()

    def feed_ragged(self, new: list[list[int]]) -> float:
        """As `feed`, of as many tokens for each row as there are: one forward, padded at the right."""
        longest = max(map(len, new))
        self.cache.prepare_prefill([len(tokens) for tokens in new], probed=True)
        padded = [tokens + [0] * (longest - len(tokens)) for tokens in new]
        logits = self.cache.forward(self.model, mx.array(padded))
        self.cache.finalize_prefill()
        mx.eval(logits, self.cache.arrays())
        for tokens, more in zip(self.tokens, new, strict=True):
            tokens.extend(more)
        self.check_offsets()
        return max(self._off(row, np.array(logits[row, : len(more)])) for row, more in enumerate(new))

    def _off(self, row: int, got: Logits) -> float:
        want = fresh_logits(self.model, self.tokens[row], self.scheme)[-len(got) :]
        return distance(got, want) if self.scheme is None else divergence(got, want)

    def check_offsets(self) -> None:
        if self.cache.offsets != tuple(map(len, self.tokens)):
            raise AssertionError(f"offsets {self.cache.offsets} of {list(map(len, self.tokens))} tokens")

    def trim(self, row: int, n: int) -> None:
        self.cache.trim(row, n)
        self.unchecked = []
        del self.tokens[row][len(self.tokens[row]) - n :]

    def fork(self) -> Rows:
        return Rows(self.model, self.cache.fork(), [list(self.tokens[0])], self.scheme)

    def extract(self, row: int) -> Rows:
        return Rows(self.model, self.cache.extract_row(row), [list(self.tokens[row])], self.scheme)

    def filter(self, keep: list[int]) -> None:
        self.cache.filter_rows(keep)
        self.unchecked = []
        self.tokens = [self.tokens[i] for i in keep]

    @classmethod
    def merge(cls, sources: list[Rows]) -> Rows:
        cache = SessionCache.merge_rows([source.cache for source in sources])
        tokens = [list(row) for source in sources for row in source.tokens]
        return cls(sources[0].model, cache, tokens, sources[0].scheme)
