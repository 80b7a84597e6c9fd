"""One decode step over several caches, ours and two of mlx-lm's. In the peer's process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import ConcatenateKVCache, KVCache

from stateroom.caches.compiled import CompiledDecode
from stateroom.caches.session import SessionCache
from stateroom.daemon.engine.engine import Engine
from stateroom.daemon.engine.model import LoadedModel

Forward = Callable[[mx.array], mx.array]  # tokens [1, N] → logits [1, N, V]
OURS, TRACED, STEPPED, CONCATENATED = "ours", "ours, traced", "KVCache", "ConcatenateKVCache"


def prepare(loaded: LoadedModel) -> None:
    """Makes of the model what the engine makes of it. mlx-lm's caches are to be measured without."""
    Engine(loaded, clock_ms=lambda: 0.0, emit=lambda _: None, report=lambda *_: "")


def measure(loaded: LoadedModel, kinds: list[str], prompt: int, steps: int) -> dict[str, Any]:
    """By kind of cache, milliseconds a step and the tokens drawn: {"ms": …, "tokens": […]}.

    Args:
        prompt: tokens there are before the first step.
    """
    model = loaded.model
    made: dict[str, Callable[[], Forward]] = {
        OURS: lambda: _ours(model),
        TRACED: lambda: _traced(model),
        STEPPED: lambda: _peer(model, KVCache),
        CONCATENATED: lambda: _peer(model, ConcatenateKVCache),
    }
    found: dict[str, Any] = {}
    for kind in kinds:
        ms, tokens = _run(made[kind](), prompt, loaded.vocab, steps)
        found[kind] = {"ms": ms, "tokens": tokens}
    return found


def _ours(model: Any) -> Forward:
    cache = SessionCache.create(model)
    return lambda tokens: cache.forward(model, tokens)


def _traced(model: Any) -> Forward:
    cache, compiled = SessionCache.create(model), CompiledDecode(model)

    def forward(tokens: mx.array) -> mx.array:
        return cache.forward(model, tokens) if tokens.shape[1] > 1 else compiled.step(cache, tokens)

    return forward


def _peer(model: Any, kind: type[Any]) -> Forward:
    caches = [kind() for _ in model.layers]
    return lambda tokens: model(tokens, cache=caches)


def _run(forward: Forward, prompt: int, vocab: int, steps: int) -> tuple[float, list[int]]:
    """Greedy steps, each begun before the last one is read, as both engines do."""
    last = mx.argmax(forward(mx.arange(prompt)[None] % vocab)[:, -1], axis=-1)
    mx.eval(last)
    tokens = []
    begin = time.perf_counter()
    for _ in range(steps):
        following = mx.argmax(forward(last[:, None])[:, -1], axis=-1)
        mx.async_eval(following)
        tokens.append(cast("int", last.item()))
        last = following
    mx.eval(last)
    return (time.perf_counter() - begin) * 1000 / steps, tokens
