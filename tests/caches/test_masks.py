"""Masks against the rule written out, query by query."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateroom.caches.layers import FullLayer
from stateroom.caches.layout import Layout
from stateroom.caches.masks import Mask, make_mask
from stateroom.caches.rows import PackedRows

ROWS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=4)
WINDOWS = st.one_of(st.none(), st.integers(1, 20))


def naive(layout: Layout, n: int, window: int | None) -> np.ndarray:
    """[B, n, S]: a token sees itself and those before it in its row, the last `window` of them."""
    seen = np.zeros((layout.rows, n, layout.width + n), bool)
    for row in range(layout.rows):
        pad, held = layout.left_pad[row], layout.offset[row]
        for query in range(n):
            for position in range(held + query + 1):
                if window is None or position > held + query - window:
                    seen[row, query, pad + position] = True
    return seen


def spelled(mask: Mask, layout: Layout, n: int) -> np.ndarray:
    """What a mask means: None and "causal" count from the last column back."""
    shape = (layout.rows, n, layout.width + n)
    if mask is None:
        return np.ones(shape, bool)
    if isinstance(mask, str):
        return np.broadcast_to(np.tri(n, layout.width + n, layout.width, dtype=bool), shape)
    assert mask.dtype == mx.bool_, "an additive mask gives NaN where a row sees nothing"
    assert mask.ndim == 4
    return np.broadcast_to(np.array(mask)[:, 0], shape)


@given(ROWS, st.integers(1, 5), WINDOWS)
def test_a_query_sees_its_own_row_and_window(
    pairs: list[tuple[int, int]], n: int, window: int | None
) -> None:
    """B06 for n = 1: one token behind a window's worth of others is masked too."""
    layout = Layout(tuple(p for p, _ in pairs), tuple(o for _, o in pairs))
    assert (spelled(make_mask(layout, n, window), layout, n) == naive(layout, n, window)).all()


@given(st.integers(1, 3), st.integers(0, 40), st.integers(1, 5), WINDOWS)
def test_level_rows_need_no_array(rows: int, held: int, n: int, window: int | None) -> None:
    layout = Layout((0,) * rows, (held,) * rows)
    mask = make_mask(layout, n, window)
    assert (spelled(mask, layout, n) == naive(layout, n, window)).all()
    if window is None or held + n <= window:
        assert mask == ("causal" if n > 1 else None)


@pytest.mark.parametrize("n", [1, 3])
def test_a_mask_is_leased_for_one_forward(n: int) -> None:
    rows = PackedRows(2, rows=2)
    first, second = FullLayer(rows, 0), FullLayer(rows, 1)
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
    rows = PackedRows(1)
    rows.begin(4)
    mask = FullLayer(rows, 0).make_mask(4, return_array=True)
    assert isinstance(mask, mx.array)
    assert (np.array(mask)[0, 0] == np.tri(4, dtype=bool)).all()
    assert FullLayer(rows, 0).make_mask(4) == "causal"
    rows.rollback()


@pytest.mark.parametrize("n", [1, 3])
def test_padded_rows_give_the_same_array_however_it_is_asked_for(n: int) -> None:
    rows = PackedRows(1, rows=2)
    rows.layout = Layout((0, 4), (7, 3))
    rows.begin(n)
    layer = FullLayer(rows, 0)
    asked, given = layer.make_mask(n, return_array=True), layer.make_mask(n)
    assert isinstance(asked, mx.array)
    assert isinstance(given, mx.array)
    assert mx.array_equal(asked, given)
    rows.rollback()
