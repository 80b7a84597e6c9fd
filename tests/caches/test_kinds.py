"""Every kind of layer behind a session: what its queries see, what can be trimmed, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from tests.caches.scripted import Scripted, fed, feed
from tests.caches.tokens import visible

from stateroom.caches.blueprint import Kind
from stateroom.caches.errors import CannotTrim, Mismatch, UnknownKind
from stateroom.caches.reach import FULL, Chunk, Reach, Window
from stateroom.caches.session import SessionCache
from stateroom.caches.stored_rows import TRIM_BACK

SIZE = 8


def window() -> RotatingKVCache:
    return RotatingKVCache(max_size=SIZE)


def pinning() -> RotatingKVCache:
    return RotatingKVCache(max_size=SIZE, keep=3)


def chunks() -> ChunkedKVCache:
    return ChunkedKVCache(SIZE)


def state() -> ArraysCache:
    return ArraysCache(size=2)  # its second array is never used


def composite() -> CacheList:
    return CacheList(KVCache(), window(), state())


def shown(reach: Reach, tokens: Sequence[int]) -> list[int]:
    """What the last of a row's tokens sees."""
    return [tokens[at] for at in sorted(visible(reach, len(tokens) - 1))]


def sum_of(session: SessionCache, layer: int, row: int = 0) -> tuple[float, float]:
    total, squares = session.layers[layer][0][row].tolist()
    return total, squares


# ------------------------------------------------------------ windows


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize(("make", "reach"), [(window, Window(SIZE)), (pinning, Window(SIZE, 3))])
def test_wrapped_and_unwrapped_windows_merge(
    make: Callable[[], Any], reach: Reach, order: tuple[int, ...]
) -> None:
    """B07: twenty single decodes, a prefill of 3, a prefill of 20; then all go on past the window."""
    model = Scripted(make)
    tokens = [list(range(100, 120)), list(range(200, 203)), list(range(300, 320))]
    sessions = [fed(model, row, chunk) for row, chunk in zip(tokens, (1, 3, 20), strict=True)]
    group = SessionCache.merge_rows([sessions[i] for i in order])
    for step in range(12):
        n = 1 if step % 3 else 2
        new = [[1000 * row + 10 * step + j for j in range(n)] for row in order]
        feed(model, group, new)
        for i, row in enumerate(order):
            seen = model.seen(0, i)
            for query, token in enumerate(new[i]):
                tokens[row].append(token)
                assert seen[query] == shown(reach, tokens[row])
        alone = group.extract_row(step % 3)
        assert alone.offsets[0] == alone.layers[0].offset == len(tokens[order[step % 3]])
    for i, row in enumerate(order):
        alone = group.extract_row(i)
        feed(model, alone, [[7]])
        assert model.seen(0, 0)[0] == shown(reach, [*tokens[row], 7])


def test_a_window_is_trimmed_and_goes_on() -> None:
    """B32: window 8, decode 20, trim 3, decode 5: as if the three had never been."""
    model = Scripted(window, pinning)
    tokens = list(range(20))
    session = fed(model, tokens, chunk=1)
    session.trim(0, 3)
    tokens = tokens[:17]
    for token in range(50, 55):
        feed(model, session, [[token]])
        tokens.append(token)
        assert model.seen(0, 0)[0] == shown(Window(SIZE), tokens)
        assert model.seen(1, 0)[0] == shown(Window(SIZE, 3), tokens)


def test_a_window_is_not_trimmed_to_what_it_has_forgotten() -> None:
    """B32: to before the window, once that is overwritten; what is left of a refusal is everything."""
    model = Scripted(window)
    session = fed(model, range(100))
    session.forget_unseen()
    floor = session.trim_floor(0)
    assert floor == 100 - TRIM_BACK
    with pytest.raises(CannotTrim, match=f"shortest length within reach is {floor}"):
        session.trim(0, TRIM_BACK + 1)
    assert session.offsets == (100,)
    session.trim(0, TRIM_BACK)
    feed(model, session, [[7]])
    assert model.seen(0, 0)[0] == [*range(floor + 1 - SIZE, floor), 7]
    session.trim(0, floor + 1)  # to nothing, which misses nothing
    feed(model, session, [[8]])
    assert model.seen(0, 0)[0] == [8]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_window_is_trimmed_into_its_pinned_tokens(rows: int) -> None:
    """B34: they stay in sight of everyone, and what is left of them after a trim goes on."""
    model = Scripted(lambda: RotatingKVCache(max_size=SIZE, keep=4))
    session = SessionCache.merge_rows([fed(model, range(100 * row, 100 * row + 40)) for row in range(rows)])
    session.forget_unseen()
    feed(model, session, [[7]] * rows)
    assert model.seen(0, rows - 1)[0] == shown(
        Window(SIZE, 4), [*range(100 * rows - 100, 100 * rows - 60), 7]
    )
    assert not session.can_trim(0, 41 - 6)  # behind the pinned tokens and before what is held
    session.trim(0, 41 - 3)
    tokens = [0, 1, 2]
    for token in range(60, 75):
        feed(model, session, [[token]] * rows)
        tokens.append(token)
        assert model.seen(0, 0)[0] == shown(Window(SIZE, 4), tokens)
    assert session.offsets == (18, 56)[:rows]


@pytest.mark.parametrize("keep", [SIZE, SIZE + 1])
def test_a_window_without_room_is_refused(keep: int) -> None:
    """B34: at creation, by name and before a token is fed."""
    with pytest.raises(ValueError, match=f"window of {SIZE} can't pin its first {keep}"):
        SessionCache.create(Scripted(lambda: RotatingKVCache(max_size=SIZE, keep=keep)))


def test_a_row_of_a_group_is_trimmed_alone() -> None:
    """The others' windows have moved on; the short row's own tokens are all there."""
    model = Scripted(KVCache, window, lambda: CacheList(KVCache(), pinning()))
    group = SessionCache.merge_rows([fed(model, range(60)), fed(model, range(70, 74))])
    group.forget_unseen()
    feed(model, group, [[60], [74]])
    assert (group.trim_floor(0), group.trim_floor(1)) == (60 - TRIM_BACK, 0)
    group.trim(1, 2)
    feed(model, group, [[61], [75]])
    reaches: list[Reach] = [FULL, Window(SIZE), FULL, Window(SIZE, 3)]
    for layer, reach in enumerate(reaches):
        assert model.seen(layer, 0)[0] == shown(reach, range(62))
        assert model.seen(layer, 1)[0] == shown(reach, [70, 71, 72, 75])


# ------------------------------------------------------------ states


def test_every_row_of_a_state_survives() -> None:
    model = Scripted(state)
    group = SessionCache.merge_rows([fed(model, range(n)) for n in (3, 5, 7)])
    assert [sum_of(group.extract_row(i), 0) for i in range(3)] == [(3, 5), (10, 30), (21, 91)]
    group.filter_rows([2, 0])
    feed(model, group, [[1], [2]])
    assert [sum_of(group, 0, i) for i in range(2)] == [(22, 92), (5, 9)]


def test_used_and_unused_states_do_not_share_a_group() -> None:
    """A state that was never used is not, in every model, one of zeros."""
    model = Scripted(state)
    used, unused = fed(model, range(3)), SessionCache.create(model)
    assert used.signature != unused.signature
    with pytest.raises(Mismatch):
        SessionCache.merge_rows([used, unused])
    both = SessionCache.merge_rows([unused, SessionCache.create(model)])
    feed(model, both, [[1], [2]])
    assert both.signature == used.signature


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("make", [state, composite])
def test_all_layers_trim_or_none(make: Callable[[], Any], rows: int) -> None:
    """B29: a state can't be trimmed, so the full layer and the window must not be either."""
    model = Scripted(KVCache, window, make)
    session = SessionCache.merge_rows([fed(model, range(20)) for _ in range(rows)])
    assert not session.can_trim(0, 3)
    assert session.can_trim(0, 0)
    with pytest.raises(CannotTrim, match="shortest length within reach is 20"):
        session.trim(0, 3)
    assert session.offsets == (20,) * rows
    feed(model, session, [[7]] * rows)
    assert model.seen(0, 0)[0] == [*range(20), 7]
    assert model.seen(1, 0)[0] == [*range(13, 20), 7]


# ------------------------------------------------------------ chunks


def test_a_chunk_sees_itself() -> None:
    model = Scripted(chunks)
    session, tokens = SessionCache.create(model), list[int]()
    for n in (3, 1, 1, 7, 1, 2, 20, 1, 300, 1, 1):
        new = list(range(len(tokens), len(tokens) + n))
        feed(model, session, [new])
        seen = model.seen(0, 0)
        for query, token in enumerate(new):
            tokens.append(token)
            assert seen[query] == shown(Chunk(SIZE), tokens)
        layer = session.layers[0]
        assert layer.start_position == len(tokens) // SIZE * SIZE, "the next token's chunk"
        assert layer.maybe_trim_front() is None


def test_a_chunked_layer_trims_within_its_chunk() -> None:
    """The next token reads from the start of its chunk, which must still be there."""
    model = Scripted(chunks)
    session = fed(model, range(105))
    session.forget_unseen()
    floor = session.trim_floor(0)
    assert floor == (105 - TRIM_BACK) // SIZE * SIZE
    with pytest.raises(CannotTrim):
        session.trim(0, 105 - floor + 1)
    session.trim(0, 105 - floor - 3)
    feed(model, session, [[7]])
    assert model.seen(0, 0)[0] == [floor, floor + 1, floor + 2, 7]


# ------------------------------------------------------------ groups


def test_groups_that_hold_nothing() -> None:
    """B10: rows leave before their first token, all of them too; others join afterwards."""
    model = Scripted(KVCache, window, pinning, state, composite)
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
    assert sum_of(joined.extract_row(1), 3) == (44, 268)


def test_a_group_that_shrinks_to_one_row_is_a_plain_session() -> None:
    model = Scripted(KVCache, window, state)
    group = SessionCache.merge_rows([fed(model, range(5)), fed(model, range(11))])
    group.filter_rows([1])
    feed(model, group, [[11]])
    assert [mask for mask, _, _ in model.noted] == [None, None], "a lone row needs no mask, nor an array"
    assert group.layers[0].offset == group.layers[1].offset == 12
    assert model.seen(0, 0)[0] == list(range(12))
    assert model.seen(1, 0)[0] == list(range(4, 12))


def test_sessions_of_two_models_do_not_share_a_group() -> None:
    first, second = Scripted(KVCache), Scripted(KVCache)
    with pytest.raises(Mismatch):
        SessionCache.merge_rows([fed(first, range(3)), fed(second, range(3))])


def test_chunks_run_alone() -> None:
    model = Scripted(chunks)
    session = fed(model, range(20), chunk=3)
    with pytest.raises(Mismatch, match="one row"):
        SessionCache.merge_rows([session, fed(model, range(3))])
    twin = session.fork()
    feed(model, twin, [[77]])
    assert (session.offsets, twin.offsets) == ((20,), (21,))


def test_a_row_trimmed_to_nothing_still_merges() -> None:
    model = Scripted(KVCache, window, pinning)
    session = fed(model, range(5))
    session.trim(0, 5)
    group = SessionCache.merge_rows([session, fed(model, range(3))])
    feed(model, group, [[7], [8]])
    assert [model.seen(layer, 0)[0] for layer in range(3)] == [[7]] * 3
    assert [model.seen(layer, 1)[0] for layer in range(3)] == [[0, 1, 2, 8]] * 3


def test_a_fork_never_aliases() -> None:
    """B30: what one writes, no other sees, whoever came from whom."""
    model = Scripted(KVCache, window, pinning, state)
    session = fed(model, range(5))
    twins = [session.fork(), session.extract_row(0), SessionCache.merge_rows([session, session.fork()])]
    feed(model, session, [[100]])
    for n, twin in enumerate(twins):
        feed(model, twin, [[200 + n]] * twin.rows)
    merged = SessionCache.merge_rows([session, twins[0]])
    feed(model, merged, [[1], [2]])
    for own, lone in zip((100, 200, 201), (session, *twins[:2]), strict=True):
        assert sum_of(lone, 3) == (10 + own, 30 + own**2)
        feed(model, lone, [[9]])
        assert [model.seen(layer, 0)[0] for layer in range(3)] == [[0, 1, 2, 3, 4, own, 9]] * 3


# ------------------------------------------------------------ what it is


class Renamed(KVCache):  # type: ignore[misc]
    """A subclass may mean anything."""


class Turning(RotatingKVCache):  # type: ignore[misc]
    """So may this one."""


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (Renamed, ["Renamed"]),
        (lambda: Turning(max_size=SIZE), ["Turning"]),
        (ConcatenateKVCache, ["ConcatenateKVCache"]),
        (lambda: QuantizedKVCache(group_size=32, bits=8), ["QuantizedKVCache"]),
        (lambda: CacheList(KVCache(), Renamed(), ConcatenateKVCache()), ["ConcatenateKVCache", "Renamed"]),
    ],
)
def test_what_is_not_understood_is_refused_by_name(make: Callable[[], Any], names: list[str]) -> None:
    with pytest.raises(UnknownKind) as refused:
        SessionCache.create(Scripted(KVCache, make))
    assert refused.value.names == names


@pytest.mark.parametrize(
    ("make", "kind", "batchable", "trimmable", "speculative", "bytes_per_token"),
    [
        (KVCache, "full", True, True, True, 512),
        (window, "window", True, False, True, 512),
        (pinning, "window", True, False, True, 512),
        (chunks, "chunked", False, False, True, 512),
        (state, "state", True, False, False, 0),
        (composite, "composite", True, False, False, 1024),
    ],
)
def test_a_session_says_what_it_can_do(
    make: Callable[[], Any],
    kind: str,
    batchable: bool,
    trimmable: bool,
    speculative: bool,
    bytes_per_token: int,
) -> None:
    session = SessionCache.create(Scripted(make))
    assert (session.bytes_per_token, session.nbytes_live, session.nbytes_capacity) == (0, 0, 0)
    session = fed(Scripted(make), range(7), chunk=3)
    assert session.kinds() == [Kind(kind, "dense", 1)]
    said = (session.batchable, session.trimmable, session.checkpointed, session.speculative)
    assert said == (batchable, trimmable, not trimmable, speculative)
    assert session.bytes_per_token == bytes_per_token


def test_sizes_come_from_shapes() -> None:
    """Asking for the size of what is not computed yet computes nothing."""
    model = Scripted(KVCache, window, state)
    session = SessionCache.create(model)
    session.forward(model, mx.random.randint(0, 9, (1, 6)))
    before = mx.get_active_memory()
    assert session.bytes_per_token == 2 * 2 * 64 * 4
    assert session.state_bytes == 2 * 4
    assert session.nbytes_live == 6 * 512 + 6 * 512 + 8
    assert session.nbytes_capacity == 256 * 512 + 256 * 512 + 8
    assert mx.get_active_memory() == before


@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("rows", [1, 2])
def test_a_failed_forward_leaves_every_kind_as_it_was(layer: int, rows: int) -> None:
    """B16, B20: after any layer, a part of a composite included."""
    model = Scripted(KVCache, window, pinning, composite)
    session = SessionCache.merge_rows([fed(model, range(40 * row, 40 * row + 30)) for row in range(rows)])
    model.fails_at = layer
    with pytest.raises(RuntimeError, match="injected"):
        feed(model, session, [[9, 9]] * rows)
    model.fails_at = None
    assert session.offsets == (30,) * rows
    feed(model, session, [[7]] * rows)
    tokens = [*range(40 * rows - 40, 40 * rows - 10), 7]
    reaches: list[Reach] = [FULL, Window(SIZE), Window(SIZE, 3), FULL, Window(SIZE)]
    for at, reach in enumerate(reaches):
        assert model.seen(at, rows - 1)[0] == shown(reach, tokens)
    parts = session.layers[3].caches
    assert parts[2][0][rows - 1].tolist() == [sum(tokens), sum(token**2 for token in tokens)]
