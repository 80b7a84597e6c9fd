"""Sessions of tiny models, and the law they keep: logits are those of a fresh session's one forward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from tests.caches.models import VOCAB, tiny

from stateroom.caches.attention import install
from stateroom.caches.codecs.scheme import Scheme
from stateroom.caches.session import SessionCache

RELATIVE = 1e-4  # of the largest logit, float32

Logits = npt.NDArray[np.float32]


@cache
def model_of(architecture: str) -> Any:
    model = tiny(architecture)
    install(model)
    return model


def fresh_logits(model: Any, tokens: Sequence[int], scheme: Scheme | None = None) -> Logits:
    """[N, V]."""
    return np.array(SessionCache.create(model, scheme).forward(model, mx.array([list(tokens)]))[0])


def assert_same(got: Logits, want: Logits, relative: float = RELATIVE) -> None:
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= relative * np.abs(want).max()


def drawn(random: np.random.Generator, n: int) -> list[int]:
    return [int(token) for token in random.integers(0, VOCAB, n)]


class Rows:
    """A session or a group, and beside it the tokens of each of its rows."""

    def __init__(
        self, model: Any, cache: SessionCache, tokens: list[list[int]], scheme: Scheme | None = None
    ) -> None:
        self.model, self.cache, self.tokens, self.scheme = model, cache, tokens, scheme

    @classmethod
    def of(cls, model: Any, prompts: Sequence[Sequence[int]], scheme: Scheme | None = None) -> Rows:
        sessions = []
        for prompt in prompts:
            session = SessionCache.create(model, scheme)
            session.forward(model, mx.array([list(prompt)]))
            mx.eval(session.arrays())
            sessions.append(session)
        return cls(model, SessionCache.merge_rows(sessions), [list(prompt) for prompt in prompts], scheme)

    def feed(self, new: Sequence[Sequence[int]]) -> Logits:
        """[B, N, V]; the tokens that the rows have then are checked against fresh sessions."""
        logits = self.cache.forward(self.model, mx.array([list(row) for row in new]))
        mx.eval(logits, self.cache.arrays())
        got = np.array(logits)
        for row, tokens in enumerate(self.tokens):
            tokens.extend(new[row])
            want = fresh_logits(self.model, tokens, self.scheme)[-len(new[row]) :]
            assert_same(got[row], want)
        assert self.cache.offsets == tuple(map(len, self.tokens))
        return got

    def cut(self, lengths: Sequence[int]) -> None:
        """The rows were trimmed or rolled back to these lengths."""
        self.tokens = [tokens[:length] for tokens, length in zip(self.tokens, lengths, strict=True)]
        assert self.cache.offsets == tuple(lengths)
