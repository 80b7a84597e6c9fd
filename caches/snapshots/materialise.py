"""A session's cache as plain bytes, for a writer that has nothing to do with mlx: on mlx's thread.

Only tokens that the session has: of a trunk, as much as the session has in view.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Sequence

import mlx.core as mx

from stateroom.caches import snapshot
from stateroom.caches.blueprint import Blueprint, Store
from stateroom.caches.codecs.turbo import SIGNS
from stateroom.caches.rows import PackedRows
from stateroom.caches.session import SessionCache
from stateroom.caches.snapshots.content import Material, PlainRun
from stateroom.caches.snapshots.manifest import Fact
from stateroom.caches.snapshots.tensors import Plain, digest_of
from stateroom.caches.snapshots.trunks import Trunks
from stateroom.caches.trunk import View

WORDS: dict[mx.Dtype, str] = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.uint16: "U16",
    mx.uint32: "U32",
    mx.uint64: "U64",
    mx.int8: "I8",
    mx.int16: "I16",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.float32: "F32",
    mx.float64: "F64",
}


def materialise(cache: SessionCache, tokens: Sequence[int], trunks: Trunks, chat: bytes = b"") -> Material:
    """A lone session, evaluated and copied. `tokens`: all that it has, KV or not; `chat`: whatever else.

    Raises ValueError for a group, and for fewer tokens than have KV.
    """
    steps = materialising(cache, tokens, trunks, chat)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            made: Material = done.value
            return made


def materialising(
    cache: SessionCache, tokens: Sequence[int], trunks: Trunks, chat: bytes = b""
) -> Generator[None, None, Material]:
    """The same in steps of a tensor each, between which others may be served.

    What comes of it is the session as it was at the first step, whatever it does meanwhile; its own arrays
    are held until then, and one of them at a time twice.
    """
    if cache.rows != 1 or not cache.offsets[0] <= len(tokens):
        raise ValueError(f"{len(tokens)} tokens for KV of {cache.offsets}")
    all_tokens = array("I", tokens)
    views: list[tuple[int, View]] = []
    stores: list[Store] = []
    for n, store in enumerate(cache.stores):
        if isinstance(store, PackedRows) and store.chains[0]:
            views += [(n, view) for view in store.chains[0]]
            store = store.sharing()
            store.chains = ((),)
        stores.append(store)
    taken = snapshot.view(cache.holding(stores, cache.offsets))
    facts: dict[str, Fact] = dict(taken.facts)
    tail: list[Plain] = []
    for name in sorted(taken.arrays):
        tail.append(plain(name, taken.arrays.pop(name)))
        yield
    runs: list[PlainRun] = []
    for n, view in views:
        told = trunks.told(view.trunk, view.length)
        copied: list[Plain] = []
        for place, plane in enumerate(view.trunk.planes):
            if told is None and plane is not None:
                copied.append(plain(str(place), plane[:, :, : view.length]))
                yield
        at = n, view.trunk.start, view.length, trunks.key(view.trunk)
        runs.append(PlainRun(*at, tuple(copied), told))
    return Material(all_tokens, kv_parts(cache.blueprint), facts, tuple(tail), tuple(runs), chat)


def kv_parts(blueprint: Blueprint) -> dict[str, str]:
    """The parts of the fingerprint that tell how sessions of this blueprint are stored."""
    scheme = blueprint.scheme
    words: list[str] = [scheme.name]
    if scheme.group_size is not None:
        words.append(f"groups of {scheme.group_size}")
    if scheme.name == "turbo":
        words.append(f"{scheme.key_bits} and {scheme.value_bits} bits, turned by {SIGNS.decode()!r}")
    if scheme.quantise_after:
        words.append(f"after {scheme.quantise_after} tokens")
    # Codecs, reaches and numbers of layers; too long to be read, so their checksum.
    layers = repr((sorted(map(repr, blueprint.attention.items())), blueprint.states))
    return {"kv": ", ".join(words), "layers": digest_of(layers.encode())}


def plain(name: str, tensor: mx.array) -> Plain:
    """A copy in plain bytes; half precision stays as it is."""
    flat = mx.view(mx.contiguous(tensor).reshape(-1), mx.uint8)
    return Plain(name, WORDS[tensor.dtype], tuple(tensor.shape), bytes(memoryview(flat)))  # type: ignore[arg-type]  # stubs lack buffers
