"""A lone session's cache as named arrays and plain values, and back: what persistence writes, byte for byte.

Live tokens only, as they are stored. Every scalar is a typed value of its own: a length that is left out, or
a flag that comes back as text, is how restored caches go wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from stateroom.caches.blueprint import Store
from stateroom.caches.errors import Mismatch
from stateroom.caches.layers.state import StateRows
from stateroom.caches.layout import Layout
from stateroom.caches.rows import PackedRows
from stateroom.caches.session import SessionCache

FORMAT = 1
Facts = dict[str, int | bool | str]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`arrays`: contiguous, "store.place"; `facts`: integers, booleans and strings."""

    arrays: dict[str, mx.array]
    facts: Facts


def take(cache: SessionCache) -> Snapshot:
    """Of a lone session; the arrays are evaluated, and nobody else's."""
    if cache.rows != 1:
        raise ValueError(f"a snapshot is of one row, not of {cache.rows}")
    return _taken(cache, [store.whole() for store in cache.extract_row(0).stores])


def view(cache: SessionCache) -> Snapshot:
    """The same without a copy: views of the session's arrays, to be evaluated one after the other."""
    if cache.rows != 1:
        raise ValueError(f"a snapshot is of one row, not of {cache.rows}")
    return _taken(cache, [s.seen_row(0) if isinstance(s, PackedRows) else s for s in cache.stores])


def _taken(cache: SessionCache, stores: Sequence[Store]) -> Snapshot:
    arrays: dict[str, mx.array] = {}
    facts: Facts = {"format": FORMAT, "length": cache.offsets[0], "quantised": cache.quantised}
    for n, store in enumerate(stores):
        facts[f"{n}.signature"] = _name_of(store)
        if isinstance(store, PackedRows):
            facts[f"{n}.forgotten"] = store.layout.forgotten[0]
        for place, array in enumerate(_places(store)):
            if array is not None:
                arrays[f"{n}.{place}"] = array
                facts[f"{n}.{place}"] = _shape_of(array)
    return Snapshot(arrays, facts)


def restore(empty: SessionCache, snapshot: Snapshot) -> SessionCache:
    """The session of a snapshot. `empty`: an unused cache of the same model and scheme; it stays as it is.

    Raises `Mismatch`, naming what differs, for a snapshot of other layers, codecs or format, or one that
    isn't whole.
    """
    facts = snapshot.facts
    if _integer(facts, "format") != FORMAT:
        raise Mismatch(f"a snapshot of format {facts['format']}; this is format {FORMAT}")
    made = empty.extract_row(0)
    if facts.get("quantised") is not made.quantised:
        if facts.get("quantised") is not True:
            raise Mismatch("a snapshot of rows that were not quantised yet")
        made.quantise()
    _refuse_strange_arrays(made, snapshot)
    length = _integer(facts, "length")
    stores: list[Store] = []
    for n, store in enumerate(made.stores):
        if facts.get(f"{n}.signature") != _name_of(store):
            raise Mismatch(f"layers stored as {facts.get(f'{n}.signature')}, not as {_name_of(store)}")
        places = [snapshot.arrays.get(f"{n}.{place}") for place in range(len(_places(store)))]
        if isinstance(store, PackedRows):
            restored = store.sharing()
            restored.restore_state(places, Layout((0,), (length,), (_integer(facts, f"{n}.forgotten"),)))
            stores.append(restored)
        else:
            stores.append(store.restored(places, (length,)))
    return made.holding(stores, (length,))


def _places(store: Store) -> list[mx.array | None]:
    if isinstance(store, StateRows):
        return [array for layer in store.layers for array in layer.cache]
    return list(store.planes)


def _refuse_strange_arrays(made: SessionCache, snapshot: Snapshot) -> None:
    """All arrays that the facts tell of, as they tell of them, and no others."""
    names = {f"{n}.{place}" for n, store in enumerate(made.stores) for place in range(len(_places(store)))}
    told = {name: shape for name, shape in snapshot.facts.items() if name in names}
    there = {name: _shape_of(array) for name, array in snapshot.arrays.items()}
    if told != there:
        wrong = sorted(name for name in told.keys() | there.keys() if told.get(name) != there.get(name))
        raise Mismatch(f"arrays {', '.join(wrong)} are missing, unknown or of another shape or type")


def _shape_of(array: mx.array) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _name_of(store: Store) -> str:
    """The layout in words, which are the same in every process."""
    return repr(store.signature)


def _integer(facts: Mapping[str, int | bool | str], name: str) -> int:
    value = facts.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise Mismatch(f"{name} is {value!r}, not a count")
    return value
