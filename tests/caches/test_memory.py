"""What caches take, while they live and after; with the garbage collector off: nothing may wait for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache
from tests.caches.content import Layer, feed, noise, packed
from tests.caches.scripted import Scripted, fed
from tests.caches.scripted import feed as feed_session

from stateroom.caches.codecs.dense import Dense
from stateroom.caches.codecs.scheme import Scheme, codecs_for
from stateroom.caches.layout import CAPACITY_STEP, capacity_for
from stateroom.caches.reach import FULL, Reach, Window
from stateroom.caches.rows import PackedRows
from stateroom.caches.session import SessionCache

HEADS, WIDTH = 3, 64
PAGES = 60_000  # bytes by which mlx may round up what it allocates for a few arrays


@pytest.fixture(autouse=True)
def without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    mx.clear_cache()  # what is taken from there may be larger than what was asked for
    yield
    gc.enable()


def bf16(scheme: Scheme) -> Layer:
    codecs = (Dense(), Dense()) if scheme.name == "dense" else codecs_for(scheme, WIDTH, WIDTH, mx.bfloat16)
    return Layer(codecs, HEADS, WIDTH, WIDTH, mx.bfloat16)


def grown(scheme: Scheme, lengths: list[int], reach: Reach = FULL) -> PackedRows:
    layer = bf16(scheme)
    rows = []
    for length in lengths:
        row = packed([layer], 1, reach)
        feed(row, noise(np.random.default_rng(length), [layer], 1, length))
        rows.append(row)
    merged = PackedRows.merge_rows(rows)
    mx.eval(merged.arrays())
    return merged


@pytest.mark.parametrize("lengths", [[1000], [1000, 700, 1], [256], [3, 5]])
@pytest.mark.parametrize(("name", "share"), [("affine4", 0.30), ("affine8", 0.54), ("turbo", 0.40)])
def test_quantised_rows_take_their_share(name: Any, share: float, lengths: list[int]) -> None:
    """affine4 at most 0.30 of bfloat16, in groups too; and what is allocated is what is said."""
    grown(Scheme(name), [1])  # makes what all rows of a scheme share
    taken = []
    for scheme in (Scheme(), Scheme(name)):
        before = mx.get_active_memory()
        rows = grown(scheme, lengths)
        taken.append((rows.bytes_per_token, rows.nbytes_live, rows.nbytes_capacity))
        assert mx.get_active_memory() - before == pytest.approx(rows.nbytes_capacity, abs=PAGES)
        del rows
    assert all(quantised <= share * dense for dense, quantised in zip(*taken, strict=True))


@pytest.mark.parametrize("scheme", [Scheme(), Scheme("affine4"), Scheme("turbo")], ids=lambda s: s.name)
def test_what_a_trim_leaves_is_given_back(scheme: Scheme) -> None:
    """B51: trimmed from 600 tokens to 100; a copy pins nothing of the old rows, and closing returns all."""
    baseline = mx.get_active_memory()
    rows = grown(scheme, [600])
    token = rows.bytes_per_token
    assert (rows.nbytes_live, rows.nbytes_capacity) == (600 * token, capacity_for(601) * token)
    rows.trim(0, 500)
    assert (rows.nbytes_live, rows.nbytes_capacity) == (100 * token, CAPACITY_STEP * token)
    assert mx.get_active_memory() - baseline == pytest.approx(rows.nbytes_capacity, abs=PAGES)
    copies = [rows.extract_row(0), rows.copy()]
    for copy in copies:
        assert copy.nbytes_capacity == 100 * token
    del rows
    assert mx.get_active_memory() - baseline == pytest.approx(200 * token, abs=PAGES)
    del copies, copy
    assert mx.get_active_memory() == baseline


def test_memory_returns_when_sessions_go() -> None:
    """B51: sessions of growing length in turn; each is trimmed, forked, merged and closed."""
    model = Scripted(KVCache, lambda: RotatingKVCache(max_size=300), lambda: ArraysCache(size=2))
    full = Scripted(KVCache, lambda: RotatingKVCache(max_size=300))
    baseline = mx.get_active_memory()
    for length in (1000, 2000, 4000, 8000):
        session = fed(full, range(length), chunk=500)
        token = session.stores[0].bytes_per_token
        session.forget_unseen()
        session.trim(0, 20)
        with pytest.raises(ValueError, match="can't trim"):
            session.trim(0, length // 2)
        fork = session.fork()
        group = SessionCache.merge_rows([session, fork])
        group.filter_rows([1])
        del session
        checkpoint = fork.checkpoint(0)
        feed_session(full, fork, [[1, 2, 3]])
        assert checkpoint is not None
        fork.restore(checkpoint)
        full.noted = []
        # The group of one, the fork, and the window of the checkpoint.
        held = group.nbytes_capacity + fork.nbytes_capacity + checkpoint.nbytes
        assert mx.get_active_memory() - baseline <= held + PAGES
        assert held <= 2 * (capacity_for(length) + 3 * CAPACITY_STEP) * token + 1024 * token
        del group, fork, checkpoint
        state = fed(model, range(50))
        merged = SessionCache.merge_rows([state, state.fork()])
        merged.spec_round_begin()
        feed_session(model, merged, [[1], [2]])
        merged.spec_round_rollback([0, 1])
        mx.eval(merged.arrays())
        model.noted = []
        del state, merged
        assert mx.get_active_memory() == baseline


def test_twenty_thousand_steps_with_joins_and_leaves(tmp_path: Path) -> None:
    """B50: no growth of capacity, of the graph, or of what mlx has allocated.

    Every 25 steps the oldest row leaves and a new one joins; rows and pads go through every kind of surgery.
    """
    layer = Layer((Dense(), Dense()), 1, 2, 3, mx.float32)
    quantised = Layer(codecs_for(Scheme("affine4"), 32, 32, mx.float32), 1, 32, 32, mx.float32)
    lives = 4
    stores: list[PackedRows] = []
    for reach, each in ((FULL, layer), (Window(30), quantised), (Window(30, 2), layer)):
        stores.append(packed([each], 0, reach))
    settled: tuple[int, ...] = ()
    for step in range(20_000 // len(stores)):
        for i, rows in enumerate(stores):
            each = quantised if i == 1 else layer
            if step % 25 == 0:
                new = packed([each], 1, rows.reach)
                feed(new, [mx.ones((1, 1, 3, each.key_width)), mx.ones((1, 1, 3, each.value_width))])
                stores[i] = rows = PackedRows.merge_rows([rows, new])
                if rows.layout.rows > lives:
                    rows.filter_rows(range(1, lives + 1))
            if step % 5 == 0:
                rows.spec_round_begin()
            n = rows.layout.rows
            feed(rows, [mx.ones((n, 1, 1, each.key_width)), mx.ones((n, 1, 1, each.value_width))])
            if step % 5 == 0:
                rows.spec_round_rollback([row % 2 for row in range(n)])
            mx.eval(rows.arrays())
        if step in (1000 + 24, 20_000 // len(stores) // 25 * 25 - 1):
            mx.export_to_dot(str(tmp_path / "graph"), *[a for rows in stores for a in rows.arrays()])
            graph = len((tmp_path / "graph").read_text())
            sizes = (mx.get_active_memory(), graph, *(rows.capacity for rows in stores))
            if settled:
                assert sizes[0] <= settled[0] + PAGES
                assert sizes[1:] == settled[1:]
            settled = sizes
    assert all(rows.capacity == CAPACITY_STEP for rows in stores)
    assert max(stores[0].layout.offset) < 25 * lives + 3


@pytest.mark.parametrize("at_once", [1, 64, 300])
def test_a_session_takes_no_more_than_projected(at_once: int) -> None:
    """Steps and prompts in turn: windows and chunks are flat at any length."""
    model = Scripted(
        KVCache,
        lambda: RotatingKVCache(max_size=200),
        lambda: RotatingKVCache(max_size=100, keep=4),
        lambda: ChunkedKVCache(150),
        lambda: ArraysCache(size=1),
    )
    session = fed(model, range(1))
    far = session.projected_bytes(10**6, at_once) - session.projected_bytes(10**6 - CAPACITY_STEP, at_once)
    assert far == CAPACITY_STEP * session.stores[0].bytes_per_token, "only full attention grows without end"
    for step in range(100 if at_once == 300 else 400):
        feed_session(model, session, [range(1 + 37 * step % at_once)])
        assert session.nbytes_capacity <= session.projected_bytes(session.offsets[0], at_once)
