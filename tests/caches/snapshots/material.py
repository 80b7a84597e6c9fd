"""Sessions as plain bytes, without a model and without mlx."""

from __future__ import annotations

import os
import random
from array import array
from pathlib import Path

from stateroom.caches.snapshots.content import Content, Material, PlainRun
from stateroom.caches.snapshots.library import Library
from stateroom.caches.snapshots.manifest import About
from stateroom.caches.snapshots.tensors import Plain

MODEL = {"weights": "w", "config": "c"}
KV = {"kv": "dense"}
EXPECTED = MODEL | KV


def about(name: str | None = None, *, at: int = 0, automatic: bool = False) -> About:
    return About("owner", "model", at, name, automatic=automatic)


def run(seed: int, length: int = 11, start: int = 0) -> PlainRun:
    drawn = random.Random(seed)
    tensors = tuple(
        Plain(str(n), "BF16", (1, 2, length, 3), drawn.randbytes(2 * length * 3 * 2)) for n in range(2)
    )
    return PlainRun(0, start, length, seed, tensors)


def material(seed: int, length: int = 7, runs: tuple[PlainRun, ...] = ()) -> Material:
    """Everything in it follows from the seed."""
    drawn = random.Random(seed)
    tokens = array("I", [drawn.randrange(2**32) for _ in range(length + 1)])
    tail = (
        Plain("0.0", "F32", (1, 2, length, 5), drawn.randbytes(4 * 2 * length * 5)),
        Plain("0.1", "U8", (1, 3, length), drawn.randbytes(3 * length)),
    )
    facts = {"format": 1, "length": length, "quantised": bool(seed % 2), "0.signature": f"seed {seed}"}
    return Material(tokens, KV, facts, tail, runs, f"chat of {seed}".encode())


def plain_of(found: Content) -> tuple[object, ...]:
    """What was read, to be compared with `plain_of_material`."""
    runs = tuple(_bytes(tensors or ()) for tensors in found.runs)
    return found.tokens, found.chat, dict(found.manifest.facts), _bytes(found.tail), runs


def plain_of_material(made: Material) -> tuple[object, ...]:
    runs = tuple(_bytes(each.tensors) for each in made.runs)
    return made.tokens, made.chat, dict(made.facts), _bytes(made.tail), runs


def _bytes(tensors: tuple[Plain, ...]) -> tuple[tuple[str, str, tuple[int, ...], bytes], ...]:
    return tuple((t.name, t.dtype, t.shape, bytes(t.content)) for t in tensors)


def files(library: Library) -> list[Path]:
    """All that is on disk but for the lock, by name."""
    found = [Path(at) / name for at, _, names in os.walk(library.folder) for name in names]
    return sorted(path for path in found if path.name != "lock")
