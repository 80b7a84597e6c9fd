"""Layer kinds that mlx-lm implements (windows, recurrent states, composites) behind a few functions.

A lone row uses mlx-lm's plain caches, two or more its batched ones. mlx-lm writes into its arrays
through the Python object that holds them, so two caches must never hold the same object.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from stateroom.caches.errors import Mismatch

Cache = Any  # one of mlx-lm's cache classes; they share no useful base type


@dataclass(frozen=True, slots=True)
class Species:
    """What is known about one of mlx-lm's plain cache classes."""

    kind: str
    batches: Callable[[Cache], bool]
    floor: Callable[[Cache, int], int]  # the shortest length that trim reaches exactly, from this length
    scalars: Callable[[Cache], Hashable]  # what must be equal for two to merge


def _chunk_floor(cache: Cache, length: int) -> int:
    # The next token attends from the start of its chunk on; what lies before start_position is gone.
    start, chunk = int(cache.start_position), int(cache.chunk_size)
    return min(length, -(-start // chunk) * chunk)


SPECIES: dict[type, Species] = {
    KVCache: Species("full", lambda c: True, lambda c, length: 0, lambda c: ()),
    QuantizedKVCache: Species(
        "quantised", lambda c: False, lambda c, length: 0, lambda c: (c.bits, c.group_size)
    ),
    RotatingKVCache: Species(
        "window",
        lambda c: c.keep == 0,  # mlx-lm's batched window forgets the pinned tokens
        lambda c, length: 0 if length < c.max_size else length,  # once it is full, old tokens are overwritten
        lambda c: (c.max_size, c.keep),
    ),
    ChunkedKVCache: Species("chunked", lambda c: False, _chunk_floor, lambda c: c.chunk_size),
    ArraysCache: Species("state", lambda c: True, lambda c, length: length, lambda c: len(c.cache)),
}


def unknown(cache: Cache) -> list[str]:
    """The names of the classes in `cache` that aren't understood."""
    if type(cache) is CacheList:
        return [name for part in cache.caches for name in unknown(part)]
    return [] if type(cache) in SPECIES else [type(cache).__name__]


def kind(cache: Cache) -> str:
    return "composite" if type(cache) is CacheList else SPECIES[type(cache)].kind


def batches(cache: Cache) -> bool:
    if type(cache) is CacheList:
        return all(batches(part) for part in cache.caches)
    return SPECIES[type(cache)].batches(cache)


def holds_state(cache: Cache) -> bool:
    """It has recurrent state, which can't be told apart from zeros once rows are merged."""
    if type(cache) is CacheList:
        return any(holds_state(part) for part in cache.caches)
    return type(cache) is ArraysCache


def signature(cache: Cache) -> Hashable:
    if type(cache) is CacheList:
        return ("CacheList", *(signature(part) for part in cache.caches))
    return (type(cache).__name__, SPECIES[type(cache)].scalars(cache))


def scheme(cache: Cache) -> str:
    return f"affine{cache.bits}" if type(cache) is QuantizedKVCache else "dense"


def floor(cache: Cache, length: int) -> int:
    """The shortest length that `length` tokens can be trimmed to, exactly.

    `cache` is the plain cache that holds them; for kinds that batch, any of its kind does.
    """
    if type(cache) is CacheList:
        return max((floor(part, length) for part in cache.caches), default=0)
    return SPECIES[type(cache)].floor(cache, length)


def trim(cache: Cache, n: int) -> None:
    """Forgets `n` tokens of a plain cache; the caller has checked `floor`."""
    if type(cache) is CacheList:
        for part in cache.caches:
            trim(part, n)
    elif n:
        trimmed = cache.trim(n)
        if trimmed != n:
            raise RuntimeError(f"{type(cache).__name__} trimmed {trimmed} of {n}")


def merge(plain: Sequence[Cache], blank: Cache) -> Cache:
    """One batched cache of two or more plain ones, in order. `blank` is an unused plain cache."""
    if type(blank) is CacheList:
        parts = [merge([c[i] for c in plain], part) for i, part in enumerate(blank.caches)]
        return CacheList(*parts)
    if type(blank) is ArraysCache:
        blank.cache = [_stacked(entry) for entry in zip(*(c.cache for c in plain), strict=True)]
        return blank
    return type(blank).merge(list(plain))


def _stacked(entry: tuple[mx.array | None, ...]) -> mx.array | None:
    """One array of a recurrent state for all rows, [B, ...]."""
    held = [array for array in entry if array is not None]
    if held and len(held) != len(entry):
        raise Mismatch("rows with and without a recurrent state")
    return mx.concatenate(held) if held else None


def extract(cache: Cache, row: int, length: int, blank: Cache) -> Cache:
    """One row of a batched cache as a plain one that holds `length` tokens."""
    if not length:
        return blank
    if type(blank) is CacheList:
        return CacheList(*(extract(cache[i], row, length, part) for i, part in enumerate(blank.caches)))
    if type(blank) is ArraysCache:
        blank.cache = [None if a is None else mx.contiguous(a[row : row + 1]) for a in cache.cache]
        return blank
    return cache.extract(row)


def prepare(cache: Cache, tokens: int) -> None:
    """Before a forward of `tokens` tokens on a group.

    mlx-lm's batched window counts from its write cursor when it masks several tokens, which is wrong once
    the window has wrapped; in order of time the cursor is the end.
    """
    if type(cache) is CacheList:
        for part in cache.caches:
            prepare(part, tokens)
    elif type(cache) is BatchRotatingKVCache and tokens > 1 and cache.rotated:
        cache._temporal_order()


def duplicate(cache: Cache) -> Cache:
    """A copy whose array objects are its own."""
    return copy.deepcopy(cache)


def arrays(state: Any) -> Iterator[mx.array]:
    """The arrays in a cache's state, however nested."""
    if isinstance(state, mx.array):
        yield state
    elif isinstance(state, (list, tuple)):
        for part in state:
            yield from arrays(part)


def nbytes(cache: Cache) -> int:
    """What the arrays occupy, from their shapes."""
    return sum(a.size * a.dtype.size for a in arrays(cache.state))


def state_bytes(cache: Cache) -> int:
    """What one row's recurrent state occupies, however many tokens it has seen."""
    if type(cache) is CacheList:
        return sum(state_bytes(part) for part in cache.caches)
    return nbytes(cache) if type(cache) is ArraysCache else 0


def bytes_per_token(cache: Cache) -> int:
    """What one more token of one row adds, until a window is full."""
    if type(cache) is CacheList:
        return sum(bytes_per_token(part) for part in cache.caches)
    if type(cache) in (RotatingKVCache, BatchRotatingKVCache) and cache.size() >= cache.max_size:
        return 0
    if type(cache) in (
        KVCache,
        RotatingKVCache,
        ChunkedKVCache,
        QuantizedKVCache,
        BatchKVCache,
        BatchRotatingKVCache,
    ):
        planes = arrays([cache.keys, cache.values])
        return sum(a.shape[1] * a.shape[3] * a.dtype.size for a in planes)
    return 0
