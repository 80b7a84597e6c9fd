"""One-token steps that replay a trace (`mx.compile`) instead of building the graph anew.

A trace is good for one shape. Planes have a fixed capacity, which changes every 256 tokens, and what changes
from step to step (positions, where a row begins and ends) rides in arrays; so a session replays one trace for
256 steps, and sessions of equal shape share it. In the trace all columns of the capacity are read, under a
mask. A group whose model can't be traced steps plainly, and nothing is half written by the attempt.

Source: `mx.compile(shapeless=True)` can't infer the shapes of slices (0.32.4), and tracing anew for each
length costs more than it saves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from stateroom.caches.blueprint import Store
from stateroom.caches.layers.state import StateRows
from stateroom.caches.masks import Mask, narrowed
from stateroom.caches.reach import Window
from stateroom.caches.rows import PackedRows
from stateroom.caches.session import Model, SessionCache
from stateroom.caches.stored_rows import DENSE

TRACES_MAX = 8  # shapes that are remembered; each holds a graph, no KV


class CannotCompile(ValueError):
    """This session's next step can't be a replayed trace; it is as it was, and can be stepped plainly."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Caches of equal keys share a trace, which takes and gives so many arrays of each."""

    key: Hashable
    inputs: int
    outputs: int


class _TracedRows(PackedRows):
    """Packed rows inside a trace: their columns are arrays, their capacity is what is read."""

    def __init__(
        self, rows: PackedRows, planes: Sequence[mx.array], columns: mx.array, scatter: bool
    ) -> None:
        super().__init__(rows.codecs, rows.layout.rows, rows.reach)
        self.planes = list(planes)
        # [B] each
        self._positions, self._starts, self._ends = columns[0], columns[1], columns[2]
        self._scatter = scatter
        self._masks: dict[int | None, mx.array] = {}

    @property
    def position(self) -> int | mx.array:
        return self._positions

    def write(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        for at, new in ((2 * layer, keys), (2 * layer + 1, values)):
            plane = self.planes[at]
            if plane is None:
                raise CannotCompile("a layer holds nothing yet")
            if self._scatter:
                self.planes[at] = mx.put_along_axis(plane, self._ends[:, None, None, None], new, axis=2)
            else:
                self.planes[at] = mx.slice_update(plane, new, self._ends[:1], (2,))
        return self.live(layer)

    def live(self, layer: int) -> tuple[mx.array, mx.array]:
        keys, values = self.planes[2 * layer], self.planes[2 * layer + 1]
        assert keys is not None
        assert values is not None
        return keys, values

    def mask(self, n: int, window: int | None = None, as_array: bool = False) -> Mask:
        if n != 1:
            raise CannotCompile(f"a decode step has one token a row, not {n}")
        if window not in self._masks:
            reach = narrowed(self.reach, window)
            starts, ends = self._starts[:, None, None, None], self._ends[:, None, None, None]
            column = mx.arange(self.capacity)[None, None, None]
            visible = (starts <= column) & (column <= ends)
            if isinstance(reach, Window):
                near = ends < column + (reach.size - reach.pinned)
                visible = visible & (near | (column < starts + reach.pinned) if reach.pinned else near)
            self._masks[window] = visible
        return self._masks[window]

    def is_ours(self, layer: int, keys: mx.array, values: mx.array) -> bool:
        return False  # keys and values are read as they were given, under the mask


def prepare_decode_step(cache: SessionCache) -> None:
    """Does what an append would do but for the write: room for one more token, at a fixed capacity.

    Raises `CannotCompile`: a session that holds nothing, or that has layers of chunks or quantised ones.
    """
    if not cache.rows or not all(cache.offsets):
        raise CannotCompile("a row that holds nothing has no shape yet")
    if cache.tokens_left_dense == 0:
        raise CannotCompile("the rows are about to be quantised")
    for store in cache.stores:
        if store.right_pad is not None:
            raise CannotCompile("a ragged prefill is open, whose lengths a trace doesn't know")
        if isinstance(store, PackedRows):
            if store.reach.kind == "chunked" or any(codecs != DENSE for codecs in store.codecs):
                raise CannotCompile("only dense full-attention and window layers are traced")
            if store.shares:
                raise CannotCompile("rows that share trunks are read in parts")
            if any(plane is None for plane in store.planes):
                raise CannotCompile("a layer stores nothing")
            store.make_room(1)


def decode_slot(cache: SessionCache) -> Slot:
    """Of a prepared cache."""
    shapes = tuple((array.shape, array.dtype) for array in cache.arrays())
    key = (cache.signature, shapes, tuple(_scatters(store) for store in cache.stores))
    packed = sum(isinstance(store, PackedRows) for store in cache.stores)
    return Slot(key, len(shapes) + packed, len(shapes))


def decode_inputs(cache: SessionCache) -> list[mx.array]:
    """The arrays of a prepared cache that a trace takes: planes and states, then int32 [3, B] of each packed
    store: the position of the next token, and the columns where a row begins and where its token goes."""
    columns = [
        mx.array([store.layout.offset, store.layout.left_pad, store.layout.ends], dtype=mx.int32)
        for store in cache.stores
        if isinstance(store, PackedRows)
    ]
    return [*cache.arrays(), *columns]


def commit_decode_step(cache: SessionCache, outputs: Sequence[mx.array]) -> list[mx.array]:
    """The arrays that a trace gave become the cache's, which holds one more token; what to evaluate then."""
    left = list(outputs)
    for store in cache.stores:
        count = len(store.arrays())
        store.advance(left[:count], 1)
        del left[:count]
    cache.advanced(1)
    return list(outputs)


class CompiledDecode:
    """The decode steps of one model, replayed from traces."""

    def __init__(self, model: Model, traces_max: int = TRACES_MAX) -> None:
        self._model = model
        self._traces_max = traces_max
        self._traces: OrderedDict[Hashable, Callable[..., list[mx.array]] | None] = OrderedDict()

    @property
    def traces(self) -> int:
        """How many shapes are remembered, those that can't be traced among them."""
        return len(self._traces)

    def step(self, cache: SessionCache, tokens: mx.array) -> mx.array:
        """Feeds one token to each row, [B, 1]; logits [B, 1, V], not evaluated. As `SessionCache.forward`.

        Raises `CannotCompile`, and the cache is as it was: step plainly.
        """
        prepare_decode_step(cache)
        slot = decode_slot(cache)
        known = slot.key in self._traces
        trace = self._traces[slot.key] if known else self._traced(cache)
        if trace is None:
            raise CannotCompile("steps of this shape were tried in vain")
        try:
            logits, *arrays = trace(tokens, *decode_inputs(cache))
            if not known:
                mx.eval(logits, arrays)  # a compiler may be missing: found out before anything changed
        except Exception as error:
            if not known:
                self._remember(slot.key, None)
            raise CannotCompile(f"this model's step can't be traced: {error}") from error
        self._remember(slot.key, trace)
        commit_decode_step(cache, arrays)
        return logits

    def _remember(self, key: Hashable, trace: Callable[..., list[mx.array]] | None) -> None:
        self._traces[key] = trace
        self._traces.move_to_end(key)
        while len(self._traces) > self._traces_max:
            self._traces.popitem(last=False)

    def _traced(self, cache: SessionCache) -> Callable[..., list[mx.array]]:
        blueprint, model = cache.blueprint, self._model
        # Of the cache only shapes are kept.
        shapes = [_without_arrays(store) for store in cache.stores]
        counts = [len(store.arrays()) for store in cache.stores]
        scatters = [_scatters(store) for store in cache.stores]

        def step(tokens: mx.array, *arrays: mx.array) -> list[mx.array]:
            stores: list[Any] = []
            at, columns = 0, iter(arrays[sum(counts) :])
            for shape, count, scatter in zip(shapes, counts, scatters, strict=True):
                held = arrays[at : at + count]
                at += count
                if isinstance(shape, PackedRows):
                    stores.append(_TracedRows(shape, held, next(columns), scatter))
                else:
                    stores.append(shape.over(held))
            logits = model(tokens, cache=blueprint.layers(stores))
            return [logits, *(array for store in stores for array in store.arrays())]

        compiled: Callable[..., list[mx.array]] = mx.compile(step)
        return compiled


def _scatters(store: Store) -> bool:
    return isinstance(store, PackedRows) and not store.layout.ends_agree


def _without_arrays(store: Store) -> Store:
    if isinstance(store, PackedRows):
        return PackedRows(store.codecs, store.layout.rows, store.reach)
    return StateRows([len(layer.cache) for layer in store.layers], len(store.offset))
