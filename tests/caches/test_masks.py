"""Masks against the rule written out, query by query and token by token."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.caches.tokens import FREE, Columns, layouts, reaches, visible

from stateroom.caches.layers.attention_layer import AttentionLayer
from stateroom.caches.layout import Layout
from stateroom.caches.masks import Mask, boolean_mask, make_mask, narrowed
from stateroom.caches.reach import FULL, Chunk, Reach, Window
from stateroom.caches.rows import PackedRows

REACHED = reaches().flatmap(lambda reach: st.tuples(st.just(reach), layouts(reach, 1, 4)))


def naive(layout: Layout, n: int, reach: Reach) -> np.ndarray:
    """[B, n, S]: which columns hold tokens that the row's queries see."""
    rows = Columns.of(layout, reach).rows
    seen = np.zeros((layout.rows, n, layout.width + n), bool)
    for row, spelled_out in enumerate(rows):
        columns = [*spelled_out.columns, *range(spelled_out.offset, spelled_out.offset + n)]
        for query in range(n):
            sees = visible(reach, spelled_out.offset + query)
            for column, token in enumerate(columns):
                seen[row, query, column] = token is not FREE and token in sees
    return seen


def spelled(mask: Mask, layout: Layout, n: int, first: int = 0) -> np.ndarray:
    """What a mask means: None and "causal" count from the last column back."""
    stored = layout.width + n - first
    shape = (layout.rows, n, stored)
    if mask is None:
        return np.ones(shape, bool)
    if isinstance(mask, str):
        return np.broadcast_to(np.tri(n, stored, stored - n, dtype=bool), shape)
    assert mask.dtype == mx.bool_, "an additive mask gives NaN where a row sees nothing"
    assert mask.ndim == 4
    return np.broadcast_to(np.array(mask)[:, 0], shape)


@given(REACHED, st.integers(1, 5), st.data())
def test_a_query_sees_what_its_reach_shows_of_its_own_row(
    reached: tuple[Reach, Layout], n: int, data: st.DataObject
) -> None:
    """B06 for n = 1: one token behind a window's worth of others is masked too."""
    reach, layout = reached
    want = naive(layout, n, reach)
    first_seen = int(want.any(axis=(0, 1)).argmax())
    first = data.draw(st.integers(0, 0 if reach.pinned else first_seen), "first")
    assert (spelled(make_mask(layout, n, reach, first), layout, n, first) == want[:, :, first:]).all()
    assert (spelled(boolean_mask(layout, n, reach, first), layout, n, first) == want[:, :, first:]).all()


@given(reaches(), st.integers(1, 3), st.integers(0, 40), st.integers(1, 5), st.data())
def test_level_rows_need_no_array_until_something_is_hidden(
    reach: Reach, rows: int, held: int, n: int, data: st.DataObject
) -> None:
    layout = Layout((0,) * rows, (held,) * rows)
    want = naive(layout, n, reach)
    first = 0 if reach.pinned else data.draw(st.integers(0, int(want.any(axis=(0, 1)).argmax())), "first")
    mask = make_mask(layout, n, reach, first)
    assert (spelled(mask, layout, n, first) == want[:, :, first:]).all()
    all_seen = np.tri(n, held + n - first, held - first, dtype=bool)
    assert isinstance(mask, mx.array) == bool((want[:, :, first:] != all_seen).any())


@pytest.mark.parametrize(
    ("reach", "window", "want"),
    [
        (FULL, None, FULL),
        (FULL, 5, Window(5)),
        (Window(8, 3), 5, Window(5, 3)),
        (Window(8, 3), 2, Window(2, 1)),
        (Window(8, 3), 8, Window(8, 3)),
        (Window(8, 3), 9, Window(8, 3)),
        (Chunk(4), 2, Chunk(4)),
    ],
)
def test_a_model_asks_for_less_than_a_layer_holds(reach: Reach, window: int | None, want: Reach) -> None:
    """B06, B34: what the layer doesn't hold can't be asked for, and pinned tokens stay where they fit."""
    assert narrowed(reach, window) == want


@pytest.mark.parametrize("held", [32_766, 32_767, 32_768, 36_864])
def test_columns_past_sixteen_bits(held: int) -> None:
    """B02: a long row beside one of 100 tokens; each query's first and last column, and how many it sees."""
    layout, n, window = Layout((0, held - 100), (held, 100)), 3, 1024
    for reach, most in ((FULL, held), (Window(window), window - 1)):
        seen = spelled(make_mask(layout, n, reach), layout, n)
        for row, length in enumerate(layout.offset):
            for query in range(n):
                columns = np.flatnonzero(seen[row, query])
                count = min(length + query, most + query if reach is FULL else most) + 1
                assert (columns[0], columns[-1]) == (held + query + 1 - count, held + query)
                assert len(columns) == count


@pytest.mark.parametrize("n", [1, 3])
def test_a_mask_is_leased_for_one_forward(n: int) -> None:
    rows = PackedRows.dense(2, rows=2)
    first, second = AttentionLayer(rows, 0), AttentionLayer(rows, 1)
    rows.begin(n)
    for layer in (first, second):
        layer.update_and_fetch(mx.zeros((2, 1, n, 3)), mx.zeros((2, 1, n, 5)))
    rows.commit()
    rows.trim(1, 1)
    rows.begin(n)
    mask = first.make_mask(n)
    assert isinstance(mask, mx.array)
    assert second.make_mask(n) is mask
    assert first.make_mask(n, window_size=2) is not mask
    assert first.offset is second.offset
    rows.rollback()
    assert first.make_mask(n) is not mask


def test_a_model_may_ask_for_an_array() -> None:
    rows = PackedRows.dense(1)
    rows.begin(4)
    mask = AttentionLayer(rows, 0).make_mask(4, return_array=True)
    assert isinstance(mask, mx.array)
    assert (np.array(mask)[0, 0] == np.tri(4, dtype=bool)).all()
    assert AttentionLayer(rows, 0).make_mask(4) == "causal"
    rows.rollback()


@pytest.mark.parametrize("n", [1, 3])
def test_padded_rows_give_the_same_array_however_it_is_asked_for(n: int) -> None:
    rows = PackedRows.dense(1, rows=2)
    rows.layout = Layout((0, 4), (7, 3))
    rows.begin(n)
    layer = AttentionLayer(rows, 0)
    asked, given = layer.make_mask(n, return_array=True), layer.make_mask(n)
    assert isinstance(asked, mx.array)
    assert isinstance(given, mx.array)
    assert mx.array_equal(asked, given)
    rows.rollback()
