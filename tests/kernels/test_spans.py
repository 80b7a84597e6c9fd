"""Spans against the plainest reading of them: a loop over rows, queries and columns."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateroom.kernels.spans import Spans

pytestmark = pytest.mark.usefixtures("computed_on_the_cpu")
STORED = 19
spans_drawn = st.lists(
    st.tuples(st.integers(0, STORED), st.integers(0, STORED)).map(lambda pair: (min(pair), max(pair))),
    min_size=1,
    max_size=4,
)


def seen_by_loop(spans: list[tuple[int, int]], count: int, window: int | None) -> np.ndarray:
    seen = np.zeros((len(spans), count, STORED), bool)
    for row, (start, end) in enumerate(spans):
        for query in range(count):
            last = end - count + query
            for column in range(STORED):
                near = window is None or column > last - window
                seen[row, query, column] = start <= column <= last and near
    return seen


@settings(max_examples=100, deadline=None)
@given(
    spans=spans_drawn | spans_drawn.map(lambda spans: spans[:1] * 3),
    count=st.integers(1, 5),
    window=st.none() | st.integers(1, 21),
    cut=st.tuples(st.integers(0, STORED), st.integers(0, STORED)),
)
def test_against_a_loop(
    spans: list[tuple[int, int]], count: int, window: int | None, cut: tuple[int, int]
) -> None:
    made = Spans.of(*zip(*spans, strict=True))
    want = seen_by_loop(spans, count, window)
    np.testing.assert_array_equal(np.array(made.seen(count, STORED, window)), want)
    first, stop = min(cut), max(cut)
    np.testing.assert_array_equal(np.array(made.seen(count, stop, window, first)), want[..., first:stop])
    live = np.array([[start <= column < end for column in range(first, stop)] for start, end in spans])
    np.testing.assert_array_equal(np.array(made.live(stop, first)), live.reshape(len(spans), stop - first))
    assert made.length_max(count, window) >= want.any(1).sum(-1).max()

    first, stop = made.reach(count, window)
    outside = np.ones(STORED, bool)
    outside[first:stop] = False
    assert not want[..., outside].any()
    if made.level(count, window):
        causal = np.tri(count, stop - first, stop - first - count, dtype=bool)
        np.testing.assert_array_equal(
            want[..., first:stop], np.broadcast_to(causal, want[..., first:stop].shape)
        )


def test_rows_that_are_level_are_known_to_be() -> None:
    """Else every decode step of a lone session would make a mask."""
    assert Spans.of([3], [17]).level(1, None)
    assert Spans.of([3], [17]).level(4, None)
    assert Spans.of([3, 3], [17, 17]).level(1, 5)
    assert Spans.of([3, 3], [17, 17]).level(4, 14)
    assert not Spans.of([3, 3], [17, 17]).level(4, 13)
    assert not Spans.of([3, 2], [17, 17]).level(1, None)
    assert not Spans.of([3, 3], [17, 16]).level(1, None)
    assert not Spans.of([3], [3]).level(1, None)


def test_masks_are_made_once() -> None:
    spans = Spans.of([3, 4], [17, 17])
    assert spans.seen(4, 17, None, 3) is spans.seen(4, 17, None, 3)
    assert spans.live(17, 3) is spans.live(17, 3)
    assert isinstance(spans.table, mx.array)
    assert spans.table is spans.table
