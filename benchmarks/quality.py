"""Next-token distributions over quantised keys and values against dense ones. Runs in a process of its own.

    python -m benchmarks.quality MODEL TEXT TOKENS SCHEME...

The model reads the text in pieces, once for each scheme, over a cache that stores planes and reads them back
through their codec, the piece's own tokens too; every token is predicted from the true ones before it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from stateroom.caches.codecs.codec import Codec
from stateroom.caches.codecs.scheme import Name, Scheme, codecs_for
from stateroom.daemon.engine.model import load

DENSE = "dense"
PIECE = 100


class Stored:
    """One layer's cache, as mlx-lm's models use it: planes, decoded whenever they are read."""

    def __init__(self, scheme: str) -> None:
        self.scheme = Scheme(cast("Name", scheme))
        self.offset = 0
        self.codecs: tuple[Codec, ...] = ()
        self.planes: tuple[list[mx.array], ...] = ([], [])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        """Keys and values [B, Hkv, N, D] → all that are stored [B, Hkv, S, D]."""
        self.codecs = self.codecs or codecs_for(self.scheme, keys.shape[3], values.shape[3], keys.dtype)
        self.offset += keys.shape[2]
        for codec, stored, new in zip(self.codecs, self.planes, (keys, values), strict=True):
            planes = codec.encode(new)
            before = stored or [plane[:, :, :0] for plane in planes]
            stored[:] = [mx.concatenate(pair, axis=2) for pair in zip(before, planes, strict=True)]
        return tuple(codec.decode(stored) for codec, stored in zip(self.codecs, self.planes, strict=True))

    def make_mask(self, n: int, **_: Any) -> str | None:
        return "causal" if n > 1 else None


def measure(model: Any, tokens: list[int], schemes: list[str]) -> dict[str, Any]:
    """By scheme: KL of each prediction in nats, the share of equal likeliest tokens, and bytes of a token."""
    caches = {name: [Stored(name) for _ in model.layers] for name in (DENSE, *schemes)}
    found: dict[str, Any] = {name: {"kl": [], "same": 0.0} for name in schemes}
    for start in range(0, len(tokens), PIECE):
        piece = mx.array([tokens[start : start + PIECE]])
        logs = {name: _log_probabilities(model(piece, cache=cache)) for name, cache in caches.items()}
        mx.eval(logs, [layer.planes for cache in caches.values() for layer in cache])
        dense = logs[DENSE]
        for name, made in found.items():
            made["kl"] += mx.sum(mx.exp(dense) * (dense - logs[name]), axis=-1).tolist()
            same = mx.argmax(dense, axis=-1) == mx.argmax(logs[name], axis=-1)
            made["same"] += cast("int", same.sum().item()) / len(tokens)
    for name, made in found.items():
        made |= _bytes(name, caches[DENSE])
    return found


def _log_probabilities(logits: mx.array) -> mx.array:
    """[1, N, V] → [N, V] float32."""
    logits = logits[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _bytes(scheme: str, dense: list[Stored]) -> dict[str, int]:
    """What a token takes in all layers of a model whose activations are bfloat16."""
    counted = {"bytes": 0, "dense_bytes": 0}
    for layer in dense:
        token = [planes[0][:, :, :1].astype(mx.bfloat16) for planes in layer.planes]
        stored = Stored(scheme)
        stored.update_and_fetch(*token)
        counted["bytes"] += sum(plane.nbytes for planes in stored.planes for plane in planes)
        counted["dense_bytes"] += sum(fields.nbytes for fields in token)
    return counted


def main() -> None:
    path, text, count, *schemes = sys.argv[1:]
    loaded = load(path)
    tokens = loaded.tokenizer.encode(Path(text).read_text(encoding="utf-8"), first=True)
    assert len(tokens) >= int(count), f"the text has only {len(tokens)} tokens"
    print(json.dumps(measure(loaded.model, tokens[: int(count)], schemes)))


if __name__ == "__main__":
    main()
