"""B16: an operation on a session that fails, at whichever mlx operation, leaves every row as it was.

Each kind of layer is in the model; what fails first, second, … is found by trying until nothing fails.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache
from tests.caches.content import LAYERS, Twin, raw
from tests.caches.injected import failures
from tests.caches.scripted import Scripted, fed, feed

from stateroom.caches.blueprint import Store
from stateroom.caches.codecs.scheme import Scheme
from stateroom.caches.layers.state import StateRows
from stateroom.caches.reach import FULL, Reach, Window
from stateroom.caches.rows import PackedRows
from stateroom.caches.session import SessionCache

SIZE = 8
Prepared = tuple[SessionCache, Callable[[SessionCache], object]]


def window(keep: int = 0) -> RotatingKVCache:
    return RotatingKVCache(max_size=SIZE, keep=keep)


TRIMMABLE = Scripted(KVCache, window, lambda: CacheList(KVCache(), window(keep=3)))
ALL_KINDS = Scripted(
    KVCache,
    window,
    lambda: ArraysCache(size=2),
    lambda: CacheList(KVCache(), window(keep=3), ArraysCache(size=2)),
)


def bytes_of(store: Store) -> tuple[object, ...]:
    """Everything a store holds, down to what lies outside of its rows."""
    if isinstance(store, StateRows):
        arrays = [layer.cache for layer in store.layers]
        lengths = [None if layer.lengths is None else layer.lengths.tolist() for layer in store.layers]
        held = [[None if a is None else raw(a) for a in cache] for cache in arrays]
        return (store.offset, store.right_pad, store._round is None, held, lengths)
    planes = [None if plane is None else raw(plane) for plane in store.planes]
    return (store.layout, store.right_pad, store._round, planes)


def everything(session: SessionCache) -> tuple[object, ...]:
    return (session.offsets, session.kinds(), [bytes_of(store) for store in session.stores])


def group(model: Scripted, scheme: Scheme | None = None) -> SessionCache:
    rows = [fed(model, range(100 * row, 100 * row + n), scheme=scheme) for row, n in enumerate((5, 60, 2))]
    return SessionCache.merge_rows(rows)


def round_open(model: Scripted) -> SessionCache:
    session = group(model)
    session.spec_round_begin()
    feed(model, session, [[7, 8, 9]] * 3)
    return session


def ragged() -> SessionCache:
    session = group(ALL_KINDS)
    session.prepare_prefill([4, 1, 2], probed=True)
    feed(ALL_KINDS, session, [[7, 8, 9, 0]] * 3)
    return session


def lone_with_checkpoint() -> Prepared:
    session = fed(ALL_KINDS, range(50))
    checkpoint = session.checkpoint(0)
    assert checkpoint is not None
    feed(ALL_KINDS, session, [range(20)])
    return session, lambda s: s.restore(checkpoint)


def dense_until(after: int) -> SessionCache:
    return fed(ALL_KINDS, range(40), scheme=Scheme("affine4", quantise_after=after))


def fewer(session: SessionCache) -> None:
    session.filter_rows([2, 0])


OTHER = fed(ALL_KINDS, range(30, 37))
OPERATIONS: dict[str, Callable[[], Prepared]] = {
    "merge": lambda: (group(ALL_KINDS), lambda s: SessionCache.merge_rows([s, OTHER])),
    "extract": lambda: (group(ALL_KINDS), lambda s: s.extract_row(1)),
    "fork": lambda: (fed(ALL_KINDS, range(50)), lambda s: s.fork()),
    "filter": lambda: (group(ALL_KINDS), fewer),
    "filter in a round": lambda: (round_open(ALL_KINDS), fewer),
    "filter a ragged prefill": lambda: (ragged(), fewer),
    "trim": lambda: (group(TRIMMABLE), lambda s: s.trim(1, 4)),
    "trim a quantised row": lambda: (group(TRIMMABLE, Scheme("affine8")), lambda s: s.trim(0, 4)),
    "checkpoint": lambda: (group(ALL_KINDS), lambda s: s.checkpoint(1)),
    "restore": lone_with_checkpoint,
    "begin a round": lambda: (group(ALL_KINDS), lambda s: s.spec_round_begin()),
    "commit a round": lambda: (round_open(ALL_KINDS), lambda s: s.spec_round_commit()),
    "roll a round back": lambda: (round_open(TRIMMABLE), lambda s: s.spec_round_rollback([0, 1, 3])),
    "roll states back": lambda: (round_open(ALL_KINDS), lambda s: s.spec_round_rollback([0, 3, 0])),
    "open a ragged prefill": lambda: (group(ALL_KINDS), lambda s: s.prepare_prefill([2, 1, 0], probed=True)),
    "finalise": lambda: (ragged(), lambda s: s.finalize_prefill()),
    "quantise": lambda: (dense_until(90), lambda s: s.quantise()),
    "forget": lambda: (group(ALL_KINDS), lambda s: s.forget_unseen()),
    "forward": lambda: (group(ALL_KINDS), lambda s: s.forward(ALL_KINDS, mx.array([[7, 8]] * 3))),
    "forward while ragged": lambda: (ragged(), lambda s: s.forward(ALL_KINDS, mx.array([[7, 8]] * 3))),
    "forward across quantise_after": lambda: (
        dense_until(42),
        lambda s: s.forward(ALL_KINDS, mx.array([list(range(5))])),
    ),
    "forward that forgets": lambda: (
        fed(ALL_KINDS, range(250)),
        lambda s: s.forward(ALL_KINDS, mx.array([list(range(30))])),
    ),
}
NO_OPERATION = {
    "restore",
    "commit a round",
    "begin a round",
    "open a ragged prefill",
}  # of mlx's: nothing can fail


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_fails_half_way_changes_nothing_and_leaves_nothing(name: str) -> None:
    session, operation = OPERATIONS[name]()
    before = everything(session)
    TRIMMABLE.noted = ALL_KINDS.noted = []
    gc.collect()
    at = mx.get_active_memory()

    def unchanged() -> None:
        assert everything(session) == before
        TRIMMABLE.noted = ALL_KINDS.noted = []
        assert mx.get_active_memory() == at, "no array is left behind"

    failed = failures(lambda: operation(session), unchanged)
    assert (failed == 0) == (name in NO_OPERATION)


SURGERY: dict[str, Callable[[Twin], object]] = {
    "merge": lambda twin: PackedRows.merge_rows(
        [twin.packed, Twin.start(LAYERS, 2, twin.packed.reach).packed]
    ),
    "extract": lambda twin: twin.packed.extract_row(2),
    "filter": lambda twin: twin.packed.filter_rows([2, 1]),
    "align": lambda twin: twin.packed.align_rows([3, 70, 1]),
    "trim": lambda twin: twin.packed.trim(0, 2),
    "copy": lambda twin: twin.packed.copy(),
    "forget": lambda twin: twin.packed.forget_unseen(),
    "recode": lambda twin: twin.packed.recoded(twin.packed.codecs),
    "restore": lambda twin: twin.packed.restore_state(list(twin.packed.planes), twin.packed.layout),
    "round": lambda twin: twin.packed.spec_round_rollback([0, 2, 1]),
    "finalise": lambda twin: twin.packed.finalize_prefill(),
}


@pytest.mark.parametrize("reach", [FULL, Window(7), Window(11, 3)], ids=str)
@pytest.mark.parametrize("name", SURGERY)
def test_rows_of_any_codec_stay_as_they_were(name: str, reach: Reach) -> None:
    twin = Twin.start(LAYERS, 3, reach)
    for length in (70, 1, 4):
        twin.append(length)
    twin.packed.trim(1, 4)
    if name == "round":
        twin.packed.spec_round_begin()
        twin.append(3)
    elif name == "finalise":
        twin.packed.prepare_prefill([1, 2, 0])
        twin.append(2)
    held, before = list(twin.packed.planes), bytes_of(twin.packed)

    def unchanged() -> None:
        assert all(now is then for now, then in zip(twin.packed.planes, held, strict=True))
        assert bytes_of(twin.packed) == before

    failed = failures(lambda: SURGERY[name](twin), unchanged)
    assert failed >= (0 if name == "forget" and reach is FULL else 1)
