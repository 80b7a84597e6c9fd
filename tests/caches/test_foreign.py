"""mlx-lm's own kinds of layer behind a session, with a scripted model that stores each token's number."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from stateroom.caches import foreign
from stateroom.caches.blueprint import Kind
from stateroom.caches.errors import Broken, CannotTrim, Mismatch, UnknownKind
from stateroom.caches.session import SessionCache

WINDOW = 8


class Scripted:
    """A model whose keys and values are its tokens, and whose states are running sums of them."""

    def __init__(self, *make: Callable[[], Any]) -> None:
        self.make = make
        self.fails_at: int | None = None

    def make_cache(self) -> list[Any]:
        return [make() for make in self.make]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        for i, layer in enumerate(cache):
            if i == self.fails_at:
                raise RuntimeError("injected")
            self.store(layer, inputs.astype(mx.float32))
        return mx.zeros((*inputs.shape, 3))

    def store(self, layer: Any, tokens: mx.array) -> None:
        if isinstance(layer, CacheList):
            for part in layer.caches:
                self.store(part, tokens)
        elif isinstance(layer, ArraysCache):
            total = tokens.sum(axis=1, keepdims=True)
            layer[0] = total if layer[0] is None else layer[0] + total
        else:
            wide = mx.repeat(tokens[:, None, :, None], 64, axis=3)  # wide enough to quantise
            layer.update_and_fetch(wide, wide)


def fed(model: Scripted, tokens: range, chunk: int | None = None) -> SessionCache:
    session = SessionCache.create(model)
    step = chunk or max(len(tokens), 1)
    for start in range(tokens.start, tokens.stop, step):
        feed(model, session, [list(range(start, min(start + step, tokens.stop)))])
    return session


def feed(model: Scripted, session: SessionCache, tokens: list[list[int]]) -> None:
    session.forward(model, mx.array(tokens))
    mx.eval(session.arrays())


def window_of(cache: RotatingKVCache) -> list[int]:
    """The tokens in the window, oldest first."""
    ordered = cache._temporal_order(cache.keys)[0, 0, :, 0].tolist()
    return [int(token) for token in ordered][-cache.size() :]


def rotating() -> RotatingKVCache:
    return RotatingKVCache(max_size=WINDOW)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_wrapped_and_unwrapped_windows_merge(order: tuple[int, ...]) -> None:
    """B07: twenty single decodes, a prefill of 3, a prefill of 20; then all decode past the window."""
    model = Scripted(rotating)
    sessions = [
        fed(model, range(100, 120), chunk=1),
        fed(model, range(200, 203)),
        fed(model, range(300, 320)),
    ]
    tokens = [list(range(100, 120)), list(range(200, 203)), list(range(300, 320))]
    group = SessionCache.merge_rows([sessions[i] for i in order])
    for step in range(12):
        for i, row in enumerate(order):
            alone = group.extract_row(i)
            cache = alone.layers[0]
            assert cache.offset == len(tokens[row]) == alone.offsets[0], "the position of the next token"
            assert window_of(cache) == tokens[row][-WINDOW:]
        feed(model, group, [[1000 * row + step] for row in order])
        for row in order:
            tokens[row].append(1000 * row + step)


def test_groups_that_hold_nothing() -> None:
    """B10: rows leave before their first token, all of them too; others join afterwards."""
    model = Scripted(KVCache, rotating, lambda: ArraysCache(size=1), lambda: CacheList(KVCache(), rotating()))
    group = SessionCache.merge_rows([SessionCache.create(model) for _ in range(3)])
    group.filter_rows([2, 0])
    feed(model, group, [[1, 2], [3, 4]])
    assert group.offsets == (2, 2)
    group.filter_rows([])
    assert (group.rows, group.nbytes_live, group.arrays()) == (0, 0, [])
    with pytest.raises(ValueError, match="rows"):
        group.forward(model, mx.zeros((0, 1), mx.int32))
    joined = SessionCache.merge_rows([group, fed(model, range(5)), fed(model, range(9))])
    feed(model, joined, [[7], [8]])
    assert joined.offsets == (6, 10)
    assert joined.extract_row(1).layers[2][0].tolist() == [[44.0]]


def test_a_group_that_shrinks_to_one_row_is_a_plain_session() -> None:
    model = Scripted(KVCache, rotating, lambda: ArraysCache(size=1))
    group = SessionCache.merge_rows([fed(model, range(5)), fed(model, range(11))])
    group.filter_rows([1])
    assert [type(layer) for layer in group.layers[1:]] == [RotatingKVCache, ArraysCache]
    assert isinstance(group.layers[0].offset, int)
    assert window_of(group.layers[1]) == list(range(3, 11))


def test_every_row_of_a_state_survives() -> None:
    model = Scripted(lambda: ArraysCache(size=2))  # its second entry is never used
    group = SessionCache.merge_rows([fed(model, range(n)) for n in (3, 5, 7)])
    assert [group.extract_row(i).layers[0][0].item() for i in range(3)] == [3.0, 10.0, 21.0]


def test_used_and_unused_states_do_not_share_a_group() -> None:
    """A state that was never used is not, in every model, one of zeros."""
    model = Scripted(lambda: ArraysCache(size=1))
    used, unused = fed(model, range(3)), SessionCache.create(model)
    assert used.signature != unused.signature
    with pytest.raises(Mismatch):
        SessionCache.merge_rows([used, unused])
    both = SessionCache.merge_rows([unused, SessionCache.create(model)])
    feed(model, both, [[1], [2]])
    assert both.signature == used.signature


def test_sessions_of_two_models_do_not_share_a_group() -> None:
    first, second = Scripted(KVCache), Scripted(KVCache)
    with pytest.raises(Mismatch):
        SessionCache.merge_rows([fed(first, range(3)), fed(second, range(3))])


@pytest.mark.parametrize(
    ("make", "kind", "bytes_per_token"),
    [
        (lambda: ChunkedKVCache(WINDOW), Kind("chunked", "dense", 1), 512),
        (lambda: QuantizedKVCache(group_size=32, bits=8), Kind("quantised", "affine8", 1), 160),
        (lambda: RotatingKVCache(max_size=WINDOW, keep=2), Kind("window", "dense", 1), 0),
    ],
)
def test_kinds_that_can_not_batch_run_alone(
    make: Callable[[], Any], kind: Kind, bytes_per_token: int
) -> None:
    """B34: mlx-lm's batched window drops pinned tokens, so such a session is never merged."""
    model = Scripted(make)
    session = fed(model, range(20), chunk=3)
    assert (session.kinds(), session.batchable, session.trimmable) == ([kind], False, False)
    assert session.bytes_per_token == bytes_per_token
    with pytest.raises(Mismatch, match="one row"):
        SessionCache.merge_rows([session, fed(model, range(3))])
    twin = session.fork()
    feed(model, twin, [[77]])
    assert (session.offsets, twin.offsets) == ((20,), (21,))


class Renamed(KVCache):
    """A subclass may mean anything."""


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (Renamed, ["Renamed"]),
        (ConcatenateKVCache, ["ConcatenateKVCache"]),
        (lambda: CacheList(KVCache(), Renamed(), ConcatenateKVCache()), ["ConcatenateKVCache", "Renamed"]),
    ],
)
def test_what_is_not_understood_is_refused_by_name(make: Callable[[], Any], names: list[str]) -> None:
    with pytest.raises(UnknownKind) as refused:
        SessionCache.create(Scripted(KVCache, make))
    assert refused.value.names == names


@pytest.mark.parametrize("rows", [1, 2])
def test_all_layers_trim_or_none(rows: int) -> None:
    """B29, B32: the window has wrapped, so the full layer must not be trimmed either."""
    model = Scripted(KVCache, rotating)
    sessions = [fed(model, range(20)) for _ in range(rows)]
    session = SessionCache.merge_rows(sessions)
    assert not session.can_trim(0, 3)
    with pytest.raises(CannotTrim, match="20"):
        session.trim(0, 3)
    assert session.offsets == (20,) * rows
    assert all(session.extract_row(i).layers[1].offset == 20 for i in range(rows))


@pytest.mark.parametrize("n", [-1, 6])
def test_no_more_is_trimmed_than_a_row_holds(n: int) -> None:
    """X3, over all layers."""
    session = fed(Scripted(KVCache, rotating), range(5))
    assert not session.can_trim(0, n)
    with pytest.raises(CannotTrim):
        session.trim(0, n)


def test_a_row_of_a_group_trims_while_its_window_has_not_wrapped() -> None:
    """The group's shared cursor is past the window; the short row's own tokens are all there."""
    model = Scripted(KVCache, rotating, lambda: CacheList(KVCache(), rotating()))
    group = SessionCache.merge_rows([fed(model, range(20)), fed(model, range(50, 54))])
    feed(model, group, [[20], [54]])
    assert (group.trim_floor(0), group.trim_floor(1)) == (21, 0)
    group.trim(1, 2)
    feed(model, group, [[21], [60]])
    assert group.offsets == (22, 4)
    assert window_of(group.extract_row(0).layers[1]) == list(range(14, 22))
    assert window_of(group.extract_row(1).layers[1]) == [50, 51, 52, 60]
    assert window_of(group.extract_row(1).layers[2][1]) == [50, 51, 52, 60]


def test_a_row_trimmed_to_nothing_still_merges() -> None:
    model = Scripted(KVCache, rotating)
    session = fed(model, range(5))
    session.trim(0, 5)
    group = SessionCache.merge_rows([session, fed(model, range(3))])
    feed(model, group, [[7], [8]])
    assert window_of(group.extract_row(0).layers[1]) == [7]


def test_a_chunked_layer_trims_within_its_chunk() -> None:
    """The next token reads from the start of its chunk, which must still be there."""
    session = fed(Scripted(lambda: ChunkedKVCache(WINDOW)), range(17))
    session.layers[0].maybe_trim_front()  # as the model does before each forward
    assert session.trim_floor(0) == 16
    assert not session.can_trim(0, 2)
    session.trim(0, 1)
    assert session.layers[0].offset == 16


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_failed_forward(layer: int) -> None:
    """B16, B20: full-attention layers are put back; with others, the session says that it is broken."""
    plain, mixed = Scripted(KVCache, KVCache, KVCache), Scripted(KVCache, rotating, KVCache)
    for model in (plain, mixed):
        session = fed(model, range(5))
        model.fails_at = layer
        with pytest.raises(RuntimeError, match="injected"):
            feed(model, session, [[9, 9]])
        model.fails_at = None
        assert session.offsets == (5,)
        assert session.broken == (model is mixed)
        if model is plain:
            feed(model, session, [[5]])
            keys = session.layers[0].keys[0, 0, :6, 0].tolist()
            assert keys == list(range(6))
        else:
            works: list[Callable[[], object]] = [
                lambda s=session: s.forward(mixed, mx.array([[1]])),
                lambda s=session: s.trim(0, 1),
                lambda s=session: s.extract_row(0),
                lambda s=session: s.filter_rows([]),
                lambda s=session: SessionCache.merge_rows([s]),
            ]
            for work in works:
                with pytest.raises(Broken):
                    work()


def test_a_fork_of_a_window_never_aliases() -> None:
    """B30: mlx-lm writes into the array object it holds."""
    model = Scripted(rotating, lambda: ArraysCache(size=1))
    session = fed(model, range(5))
    twins = [session.fork(), session.extract_row(0)]
    feed(model, session, [[100]])
    for token, twin in enumerate(twins):
        feed(model, twin, [[200 + token]])
    assert window_of(session.layers[0])[-1] == 100
    assert [window_of(twin.layers[0])[-1] for twin in twins] == [200, 201]
    assert session.layers[1][0].item() == 110
    merged = SessionCache.merge_rows([session, twins[0]])
    feed(model, merged, [[1], [2]])
    assert window_of(session.layers[0])[-1] == 100


def test_small_arrays_do_not_grow_the_graph(tmp_path: Any) -> None:
    """B50: mlx-lm counts positions in arrays that only `arrays()` evaluates."""
    model = Scripted(rotating, lambda: CacheList(KVCache(), ArraysCache(size=1)))
    group = SessionCache.merge_rows([fed(model, range(3)), fed(model, range(5))])

    def nodes() -> int:
        group.forward(model, mx.array([[1], [2]]))
        held = [array for layer in group.layers for array in foreign.arrays(layer.state)]
        mx.export_to_dot(str(tmp_path / "graph"), *held)
        mx.eval(group.arrays())
        return len((tmp_path / "graph").read_text())

    for _ in range(2 * WINDOW):
        nodes()
    early = nodes()
    late = [nodes() for _ in range(200)][-1]
    assert late < 2 * early


def test_sizes_come_from_shapes() -> None:
    """Asking for the size of what is not computed yet computes nothing."""
    model = Scripted(KVCache, rotating, lambda: ArraysCache(size=1))
    session = SessionCache.create(model)
    assert (session.bytes_per_token, session.nbytes_live, session.nbytes_capacity) == (0.0, 0, 0)
    session.forward(model, mx.random.randint(0, 9, (1, 6)))
    before = mx.get_active_memory()
    assert session.bytes_per_token == 2 * 2 * 64 * 4
    assert session.nbytes_live == 6 * 512 + 6 * 512 + 4
    assert session.nbytes_capacity == 256 * 512 + 6 * 512 + 4
    assert mx.get_active_memory() == before
    feed(model, session, [list(range(WINDOW))])
    assert session.bytes_per_token == 512, "a full window takes no more"
