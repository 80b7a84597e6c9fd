"""What the layers of a model are, read once from the caches that the model itself makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from stateroom.caches.codecs.scheme import Scheme, codecs_for
from stateroom.caches.errors import UnknownKind
from stateroom.caches.layers.attention_layer import AttentionLayer
from stateroom.caches.layers.state import StateRows
from stateroom.caches.reach import FULL, Chunk, Reach, Window
from stateroom.caches.rows import PackedRows
from stateroom.caches.stored_rows import DENSE, LayerCodecs

Store = PackedRows | StateRows


@dataclass(frozen=True, slots=True)
class Kind:
    """How many layers of a model are of one kind, and how they store keys and values."""

    kind: str
    scheme: str
    layers: int


@dataclass(frozen=True, slots=True)
class Attention:
    """A layer of keys and values: its place among the layers of its reach."""

    reach: Reach
    index: int


@dataclass(frozen=True, slots=True)
class StateArrays:
    """A layer of recurrent state: its place among those."""

    index: int


@dataclass(frozen=True, slots=True)
class Composite:
    """A layer of several caches."""

    parts: tuple[Slot, ...]


Slot = Attention | StateArrays | Composite
Geometry = dict[Reach, list[tuple[int, int, mx.Dtype] | None]]  # key and value width and dtype, per layer


@dataclass(frozen=True, slots=True, eq=False)
class Blueprint:
    """The layers of one model, and how sessions of one KV scheme store them."""

    make: Callable[[], list[Any]]  # the model's own caches, unused; keeps the model alive
    model: Hashable
    slots: tuple[Slot, ...]  # per layer
    attention: dict[Reach, tuple[LayerCodecs, ...]]  # codecs per layer of that reach
    states: tuple[int, ...]  # arrays per layer of state
    scheme: Scheme = field(default_factory=Scheme)

    @classmethod
    def of(cls, model: Any) -> Blueprint:
        """Dense KV. Raises `UnknownKind` when a layer's cache is of a class that isn't understood."""

        def make() -> list[Any]:
            caches: list[Any] = make_prompt_cache(model)
            return caches

        blank = make()
        names = sorted({name for cache in blank for name in _unknown(cache)})
        if names:
            raise UnknownKind(names)
        counts: Counter[Reach] = Counter()
        states: list[int] = []
        slots = tuple(_slot(cache, counts, states) for cache in blank)
        attention = {reach: (DENSE,) * layers for reach, layers in counts.items()}
        return cls(make, id(model), slots, attention, tuple(states))

    def with_scheme(self, scheme: Scheme, geometry: Geometry) -> Blueprint:
        """The same layers stored by another scheme, whose codecs are chosen per layer.

        Raises `CannotQuantise` when some layer's heads don't fit it. `geometry`: `SessionCache.geometry` of a
        session that has been fed; layers without one store nothing.
        """
        attention = {
            reach: tuple(DENSE if widths is None else codecs_for(scheme, *widths) for widths in layers)
            for reach, layers in geometry.items()
        }
        return replace(self, attention=attention, scheme=scheme)

    # ------------------------------------------------------------ what it is

    @property
    def kinds(self) -> tuple[Kind, ...]:
        counts = Counter(self._kinds(self.slots))
        return tuple(Kind(kind, scheme, n) for (kind, scheme), n in sorted(counts.items()))

    def _kinds(self, slots: Sequence[Slot]) -> Iterator[tuple[str, str]]:
        for slot in slots:
            if isinstance(slot, Attention):
                yield slot.reach.kind, self._stores(slot)
            elif isinstance(slot, StateArrays):
                yield "state", "dense"
            else:
                stored = {self._stores(part) for part in slot.parts if isinstance(part, Attention)}
                yield "composite", "+".join(sorted(stored)) or "dense"

    def _stores(self, slot: Attention) -> str:
        return "dense" if self.attention[slot.reach][slot.index] == DENSE else self.scheme.name

    @property
    def batchable(self) -> bool:
        """Rows may share a group; a model with chunks makes masks that know nothing of padding."""
        return not any(isinstance(reach, Chunk) for reach in self.attention)

    @property
    def trimmable(self) -> bool:
        """Any row can be trimmed by any amount at any time: there are only full-attention layers."""
        return not self.states and all(reach is FULL for reach in self.attention)

    @property
    def signature(self) -> Hashable:
        """Equal for sessions that may share a group, as far as it is known before they are fed."""
        codecs = tuple(self.attention.items())
        return (self.model, codecs, self.scheme.quantise_after)

    # ------------------------------------------------------------ making caches

    def stores(self) -> list[Store]:
        """One empty row of every kind of layer."""
        made: list[Store] = [PackedRows(codecs, 1, reach) for reach, codecs in self.attention.items()]
        if self.states or not made:
            made.append(StateRows(self.states))
        return made

    def layers(self, stores: Sequence[Store]) -> list[Any]:
        """The list that the model takes as its cache: views of the stores."""
        packed = {store.reach: store for store in stores if isinstance(store, PackedRows)}
        states = next((store for store in stores if isinstance(store, StateRows)), None)
        return [_view(slot, packed, states) for slot in self.slots]


def _view(slot: Slot, packed: dict[Reach, PackedRows], states: StateRows | None) -> Any:
    # Not inside `layers`: a closure that calls itself is a cycle, and would keep old rows until it is found.
    if isinstance(slot, Attention):
        return AttentionLayer(packed[slot.reach], slot.index)
    if isinstance(slot, StateArrays):
        assert states is not None
        return states.layers[slot.index]
    return CacheList(*(_view(part, packed, states) for part in slot.parts))


def _reach(cache: Any) -> Reach | None:
    if type(cache) is KVCache:
        return FULL
    if type(cache) is RotatingKVCache:
        return Window(cache.max_size, cache.keep)
    return Chunk(cache.chunk_size) if type(cache) is ChunkedKVCache else None


def _slot(cache: Any, counts: Counter[Reach], states: list[int]) -> Slot:
    if type(cache) is CacheList:
        return Composite(tuple(_slot(part, counts, states) for part in cache.caches))
    reach = _reach(cache)
    if reach is None:
        states.append(len(cache.cache))
        return StateArrays(len(states) - 1)
    counts[reach] += 1
    return Attention(reach, counts[reach] - 1)


def _unknown(cache: Any) -> list[str]:
    """The names of the classes in `cache` that aren't understood."""
    if type(cache) is CacheList:
        return [name for part in cache.caches for name in _unknown(part)]
    return [] if _reach(cache) is not None or type(cache) is ArraysCache else [type(cache).__name__]
