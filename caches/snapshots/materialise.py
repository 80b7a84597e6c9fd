"""A session's cache as plain bytes, for a writer that has nothing to do with mlx: on mlx's thread.

Only tokens that the session has: of a trunk, as much as the session has in view.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

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
    if cache.rows != 1 or not cache.offsets[0] <= len(tokens):
        raise ValueError(f"{len(tokens)} tokens for KV of {cache.offsets}")
    runs: list[PlainRun] = []
    stores: list[Store] = []
    for n, store in enumerate(cache.stores):
        if isinstance(store, PackedRows) and store.chains[0]:
            runs += [_run(n, view, trunks) for view in store.chains[0]]
            store = store.sharing()
            store.chains = ((),)
        stores.append(store)
    taken = snapshot.take(cache.holding(stores, cache.offsets))
    facts: dict[str, Fact] = dict(taken.facts)
    tail = tuple(plain(name, tensor) for name, tensor in sorted(taken.arrays.items()))
    return Material(array("I", tokens), kv_parts(cache.blueprint), facts, tail, tuple(runs), chat)


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


def _run(store: int, view: View, trunks: Trunks) -> PlainRun:
    trunk, length = view.trunk, view.length
    at = store, trunk.start, length, trunks.key(trunk)
    if (told := trunks.told(trunk, length)) is not None:
        return PlainRun(*at, told=told)
    live = {f"{n}": mx.contiguous(p[:, :, :length]) for n, p in enumerate(trunk.planes) if p is not None}
    mx.eval(list(live.values()))
    return PlainRun(*at, tensors=tuple(plain(name, tensor) for name, tensor in live.items()))
