"""Log-probabilities of a continuation, computed on a copy of the session's rows and dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx
from mlx import nn

from stateroom.caches.session import SessionCache
from stateroom.client.protocol import ScoreResult
from stateroom.daemon.engine.session import Session


@dataclass(slots=True, eq=False)
class Score:
    """One `score` request, by quanta like a prefill; the session itself never changes."""

    rid: int
    session: Session
    continuation: list[int]
    then: Callable[[Score], None]
    received_ms: float
    started_ms: float | None = None
    cache: SessionCache | None = None
    logprobs: list[float] = field(default_factory=list)
    cancelled: bool = False

    def start(self, now_ms: float) -> None:
        self.started_ms = now_ms
        if self.session.cache is not None:
            self.cache = self.session.cache.fork()

    def end(self) -> None:
        self.then(self)

    @property
    def done(self) -> bool:
        return self.remaining == 0

    @property
    def to_compute(self) -> int:
        return self.remaining

    @property
    def remaining(self) -> int:
        return len(self.continuation) - len(self.logprobs)

    def piece(self, tokens: int) -> int:
        return tokens if self.cache is None else self.cache.piece(tokens)

    def launch(self, model: nn.Module, tokens: int) -> list[mx.array]:
        """Feeds the token before each of the next `tokens` of the continuation."""
        if self.cache is None:
            self.cache = self.session.served.empty()
        at = len(self.logprobs)
        fed = [self.session.tokens[-1], *self.continuation][at : at + tokens]
        # logits [1, N, V]; the targets are the tokens that follow the fed ones
        logits = self.cache.forward(model, mx.array([fed], dtype=mx.uint32)).astype(mx.float32)[0]
        targets = mx.array(self.continuation[at : at + tokens], dtype=mx.uint32)[:, None]
        chosen = mx.take_along_axis(logits, targets, axis=-1)[:, 0] - mx.logsumexp(logits, axis=-1)
        return [chosen, *self.cache.arrays()]

    def landed(self, tokens: int, arrays: list[mx.array]) -> None:
        self.logprobs.extend(cast("list[float]", arrays[0].tolist()))

    def result(self) -> ScoreResult:
        return ScoreResult(tokens=self.continuation, logprobs=self.logprobs, total=sum(self.logprobs))
