"""A session's cache from what was read of a snapshot: on mlx's thread, beside everything that is there."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping, Sequence
from pathlib import Path

import mlx.core as mx

from stateroom.caches import snapshot
from stateroom.caches.blueprint import Store
from stateroom.caches.planes import Plane
from stateroom.caches.reach import FULL
from stateroom.caches.rows import PackedRows
from stateroom.caches.session import SessionCache
from stateroom.caches.snapshots.content import Content
from stateroom.caches.snapshots.manifest import Run
from stateroom.caches.snapshots.materialise import WORDS
from stateroom.caches.snapshots.refusals import Corrupt
from stateroom.caches.snapshots.tensors import Plain
from stateroom.caches.snapshots.trunks import Trunks
from stateroom.caches.trunk import Trunk, View

DTYPES = {word: dtype for dtype, word in WORDS.items()}


def rebuild(
    content: Content,
    empty: SessionCache,
    trunks: Trunks,
    alive: Mapping[str, Trunk] | None = None,
    samples: Sequence[SessionCache] = (),
) -> SessionCache:
    """The session's cache, evaluated.

    Args:
        content: what `Library.read` gave.
        empty: an unused cache of the same model and scheme; it stays as it is.
        trunks: of this process.
        alive: trunks for the runs that were left out when `content` was read.
        samples: caches of the model and scheme that were fed, dense and quantised where it may be either;
            files from elsewhere must hold tensors of their shapes and types.

    Raises `Corrupt` for a manifest that is whole but tells what can't be; nothing was changed then.
    """
    steps = rebuilding(content, empty, trunks, alive, samples)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            made: SessionCache = done.value
            return made


def rebuilding(
    content: Content,
    empty: SessionCache,
    trunks: Trunks,
    alive: Mapping[str, Trunk] | None = None,
    samples: Sequence[SessionCache] = (),
) -> Generator[None, None, SessionCache]:
    """The same in steps of a tensor each, between which others may be served."""
    told = content.manifest
    file = Path(told.id) / "manifest"
    arrays: dict[str, mx.array] = {}
    for each in content.tail:
        arrays[each.name] = tensor(each)
        yield
    taken = snapshot.Snapshot(arrays, dict(told.facts))
    try:
        cache = snapshot.restore(empty, taken)
    except ValueError as error:  # among them the caches' own `Mismatch`
        raise Corrupt(file, f"tells what can't be: {error}") from error
    if cache.offsets[0] > told.length:
        raise Corrupt(file, f"tells of KV of {cache.offsets[0]} of {told.length} tokens")
    if any(run.store >= len(cache.stores) for run in told.runs):
        raise Corrupt(file, "tells of runs of a store that isn't there")
    held: list[Trunk] = []
    for run, plain in zip(told.runs, content.runs, strict=True):
        held.append(
            (alive or {})[run.digest] if plain is None else (yield from _trunk(run, plain, cache, file))
        )
    for n, store in enumerate(cache.stores):
        runs = [(run, trunk) for run, trunk in zip(told.runs, held, strict=True) if run.store == n]
        if wrong := _wrong_with(store, [run for run, _ in runs]):
            raise Corrupt(file, wrong)
        if isinstance(store, PackedRows):
            store.chains = (tuple(View(trunk, run.length) for run, trunk in runs),)
    for sample in samples:
        if _signatures(sample) == _signatures(cache):
            for store, like in zip(cache.stores, sample.stores, strict=True):
                if (kinds := _kinds(store)) and kinds != _kinds(like):
                    raise Corrupt(file, "tells of tensors that this model doesn't make")
    for run, trunk in zip(told.runs, held, strict=True):
        trunks.note(trunk, run.length, run.tensors)
    mx.eval(cache.arrays(), [plane for trunk in cache.trunks for plane in trunk.planes if plane is not None])
    return cache


def _wrong_with(store: Store, runs: Sequence[Run]) -> str | None:
    """Why these can't be the runs of a store, in words: every token is in a run or in a column, once."""
    if not isinstance(store, PackedRows):
        return "tells of runs of recurrent states" if runs else None
    (forgotten,), (length,) = store.layout.forgotten, store.layout.offset
    if store.reach is not FULL:
        if runs:
            return "tells of runs of a window"
        return "lacks what its window shows" if store.reach.floor(forgotten) > length else None
    edges = [0, *(run.start + run.length for run in runs)]
    if [run.start for run in runs] != edges[:-1] or edges[-1] != forgotten or not all(r.length for r in runs):
        return "tells of runs that aren't all of its first tokens"
    return None


def _trunk(run: Run, plain: Sequence[Plain], cache: SessionCache, file: Path) -> Generator[None, None, Trunk]:
    store = cache.stores[run.store]
    if not isinstance(store, PackedRows):
        raise Corrupt(file, "tells of runs of recurrent states")
    planes: list[Plane] = [None] * len(store.planes)
    places = {str(place): place for place in range(len(planes))}
    for each in plain:
        fits = len(each.shape) == 4 and each.shape[0] == 1 and each.shape[2] == run.length
        if each.name not in places or not fits:
            raise Corrupt(
                file, f"tells of a plane {each.name} of {each.shape} in a run of {run.length} tokens"
            )
        planes[places[each.name]] = tensor(each)
        yield
    for plane, own in zip(planes, store.planes, strict=True):
        if own is not None and (plane is None or _kind(plane) != _kind(own)):
            raise Corrupt(file, "tells of runs of other planes than the tail's")
    return Trunk(planes, run.start, run.start + run.length)


def _signatures(cache: SessionCache) -> list[Hashable]:
    return [store.signature for store in cache.stores]


def _kinds(store: Store) -> list[object]:
    """Shapes, but for the number of tokens, and types of what a store holds; nothing, when it is empty."""
    if isinstance(store, PackedRows):
        planes = next((chain[0].trunk.planes for chain in store.chains if chain), store.planes)
        kinds: list[object] = [None if plane is None else _kind(plane) for plane in planes]
    else:
        held = [array for layer in store.layers for array in layer.cache]
        kinds = [None if array is None else (array.shape, array.dtype) for array in held]
    return kinds if any(kinds) else []


def _kind(plane: mx.array) -> tuple[int, int, mx.Dtype]:
    return plane.shape[1], plane.shape[3], plane.dtype


def tensor(plain: Plain) -> mx.array:
    """[shape], as it was, evaluated; never through a type that mlx doesn't have."""
    dtype = DTYPES[plain.dtype]
    octets = mx.array(memoryview(plain.content).cast("B"))  # type: ignore[arg-type]  # stubs lack buffers
    made = (octets.astype(dtype) if dtype == mx.bool_ else octets.view(dtype)).reshape(plain.shape)
    mx.eval(made)
    return made
