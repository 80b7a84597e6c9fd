"""Next-token distributions over quantised keys and values against dense ones. Runs in a process of its own.

    python -m benchmarks.quality MODEL TEXT TOKENS SCHEME...

The model reads the text in pieces, in one session for each scheme, quantised from its first token on; every
token is predicted from the true ones before it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from stateroom.caches.attention import install
from stateroom.caches.codecs.scheme import Name, Scheme, codecs_for
from stateroom.caches.rows import PackedRows
from stateroom.caches.session import SessionCache
from stateroom.daemon.engine.model import load

DENSE = "dense"
PIECE = 100


def measure(model: Any, tokens: list[int], schemes: list[str]) -> dict[str, Any]:
    """By scheme: KL of each prediction in nats, the share of equal likeliest tokens, and bytes of a token."""
    install(model)
    asked = {name: Scheme(cast("Name", name)) for name in (DENSE, *schemes)}
    caches = {name: SessionCache.create(model, scheme) for name, scheme in asked.items()}
    found: dict[str, Any] = {name: {"kl": [], "same": 0.0} for name in schemes}
    for start in range(0, len(tokens), PIECE):
        piece = mx.array([tokens[start : start + PIECE]])
        logs = {name: _log_probabilities(cache.forward(model, piece)) for name, cache in caches.items()}
        mx.eval(logs, [cache.arrays() for cache in caches.values()])
        dense = logs[DENSE]
        for name, made in found.items():
            made["kl"] += mx.sum(mx.exp(dense) * (dense - logs[name]), axis=-1).tolist()
            same = mx.argmax(dense, axis=-1) == mx.argmax(logs[name], axis=-1)
            made["same"] += cast("int", same.sum().item()) / len(tokens)
    for name, made in found.items():
        made |= _bytes(asked[name], caches[DENSE])
    return found


def _log_probabilities(logits: mx.array) -> mx.array:
    """[1, N, V] → [N, V] float32."""
    logits = logits[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _bytes(scheme: Scheme, dense: SessionCache) -> dict[str, int]:
    """What a token takes in all layers of a model whose activations are bfloat16."""
    counted = {"bytes": 0, "dense_bytes": 0}
    for store in dense.stores:
        assert isinstance(store, PackedRows)
        for keys, values in (store.live(layer) for layer in range(len(store.codecs))):
            token = [fields[:, :, :1].astype(mx.bfloat16) for fields in (keys, values)]
            codecs = codecs_for(scheme, keys.shape[3], values.shape[3], mx.bfloat16)
            for codec, fields in zip(codecs, token, strict=True):
                counted["bytes"] += sum(plane.nbytes for plane in codec.encode(fields))
                counted["dense_bytes"] += fields.nbytes
    return counted


def main() -> None:
    path, text, count, *schemes = sys.argv[1:]
    loaded = load(path)
    tokens = loaded.tokenizer.encode(Path(text).read_text(encoding="utf-8"), first=True)
    assert len(tokens) >= int(count), f"the text has only {len(tokens)} tokens"
    print(json.dumps(measure(loaded.model, tokens[: int(count)], schemes)))


if __name__ == "__main__":
    main()
