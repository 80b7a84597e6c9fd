"""Attention through packed rows against float64 over each row alone, whatever lies in its neighbours."""

from __future__ import annotations

import sys

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import base
from mlx_lm.models.cache import QuantizedKVCache
from tests.caches.models import tiny
from tests.kernels.oracle import attend

from stateroom.caches import attention
from stateroom.caches.layers.attention_layer import AttentionLayer
from stateroom.caches.rows import PackedRows
from stateroom.caches.session import SessionCache
from stateroom.kernels import dispatch

SEAM = "scaled_dot_product_attention"
H, HKV, D, DV = 6, 2, 5, 3
SCALE = 0.37


def drawn(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.normal(size=shape).astype(np.float32)


class Attended:
    """One layer of packed rows, and the keys and values of each row as they should be."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.keys = [drawn(self.random, HKV, n, D) for n in lengths]
        self.values = [drawn(self.random, HKV, n, DV) for n in lengths]
        alone = []
        for keys, values in zip(self.keys, self.values, strict=True):
            row = PackedRows.dense(1)
            if keys.shape[1]:
                row.begin(keys.shape[1])
                row.write(0, mx.array(keys[None]), mx.array(values[None]))
                row.commit()
            alone.append(row)
        self.rows = PackedRows.merge_rows(alone)

    def trim(self, row: int, n: int) -> None:
        self.rows.trim(row, n)
        end = self.keys[row].shape[1] - n
        self.keys[row], self.values[row] = self.keys[row][:, :end], self.values[row][:, :end]

    def plant_nan_in_hidden_keys(self) -> None:
        layout, keys = self.rows.layout, self.rows.planes[0]
        assert keys is not None
        poisoned = np.array(keys)
        for row, (pad, end) in enumerate(zip(layout.left_pad, layout.ends, strict=True)):
            poisoned[row, :, :pad] = np.nan
            poisoned[row, :, end:] = np.nan
        self.rows.planes[0] = mx.array(poisoned)

    def step(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Appends n tokens, attends with n queries: [B, H, n, DV] as we read it and as it should be."""
        b = len(self.keys)
        queries, keys, values = (
            drawn(self.random, b, H, n, D),
            drawn(self.random, b, HKV, n, D),
            drawn(self.random, b, HKV, n, DV),
        )
        layer = AttentionLayer(self.rows, 0)
        self.rows.begin(n)
        mask = layer.make_mask(n)
        k, v = layer.update_and_fetch(mx.array(keys), mx.array(values))
        got = np.array(layer.attend(mx.array(queries), k, v, SCALE, mask))
        self.rows.commit()
        want = []
        for row in range(b):
            self.keys[row] = np.concatenate([self.keys[row], keys[row]], 1)
            self.values[row] = np.concatenate([self.values[row], values[row]], 1)
            want.append(attend(queries[row], self.keys[row], self.values[row], SCALE))
        return got, np.stack(want)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=2),
    st.lists(st.sampled_from([1, 1, 2, 7]), min_size=1, max_size=4),
    st.sampled_from(["folded", "fused"]),
    st.integers(0, 2**31),
)
def test_rows_attend_as_if_alone(
    lengths: list[int], trims: list[tuple[int, int]], steps: list[int], form: dispatch.Form, seed: int
) -> None:
    """B03, B14: ragged, trimmed inside the group, NaN in every key that is not theirs."""
    group = Attended(lengths, seed)
    for row, n in trims:
        row %= len(lengths)
        group.trim(row, min(n, group.keys[row].shape[1]))
    with dispatch.forced(form):
        for n in steps:
            if len(lengths) > 1 and group.rows.planes[0] is not None:
                group.plant_nan_in_hidden_keys()
            got, want = group.step(n)
            np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("form", ["folded", "fused"])
def test_a_poisoned_row_stays_alone(form: dispatch.Form) -> None:
    """X6: a row full of NaN, while it decodes, after it was trimmed, and after it left."""
    group = Attended([4, 9, 6], 3)
    for plane in range(2):
        held = group.rows.planes[plane]
        assert held is not None
        poisoned = np.array(held)
        poisoned[2, :, 3:9] = np.nan
        group.rows.planes[plane] = mx.array(poisoned)
    with dispatch.forced(form):
        got, want = group.step(1)
        assert np.isnan(got[2]).all()
        np.testing.assert_allclose(got[:2], want[:2], atol=1e-5)
        group.trim(2, 7)  # all of it: the row starts again in the columns where NaN was
        for _ in range(9):
            got, want = group.step(1)
            np.testing.assert_allclose(got, want, atol=1e-5)
    group.rows.filter_rows([0, 1])
    assert all(plane is not None and np.isfinite(np.array(plane)).all() for plane in group.rows.planes)


@pytest.mark.parametrize("length", [32_700, 32_767, 32_768, 32_769, 36_864])
@pytest.mark.parametrize("n", [1, 64])
def test_masks_past_sixteen_bits_of_columns(length: int, n: int) -> None:
    """B02: a long row packed with one of 100 tokens reads as it does alone."""
    random = np.random.default_rng(length)
    alone = []
    for tokens in (length, 100):
        row = PackedRows.dense(1)
        row.begin(tokens)
        row.write(0, mx.array(drawn(random, 1, 1, tokens, 3)), mx.array(drawn(random, 1, 1, tokens, 3)))
        row.commit()
        alone.append(row)
    packed = PackedRows.merge_rows(alone)
    new = [mx.array(drawn(random, 2, 1, n, 3)) for _ in range(2)]
    queries = mx.array(drawn(random, 2, 2, n, 3))

    def read(rows: PackedRows, which: slice) -> np.ndarray:
        layer = AttentionLayer(rows, 0)
        rows.begin(n)
        mask = layer.make_mask(n)
        keys, values = layer.update_and_fetch(new[0][which], new[1][which])
        attended = np.array(layer.attend(queries[which], keys, values, 1.0, mask))
        rows.commit()
        return attended

    got = read(packed, slice(0, 2))
    for i, row in enumerate(alone):
        np.testing.assert_allclose(got[i], read(row, slice(i, i + 1))[0], atol=2e-6)


def test_install_replaces_the_name_once_and_serves_our_layers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gpt_oss")
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, SEAM, attention.original)
    assert attention.install(model) == attention.install(model) == ["mlx_lm.models.gpt_oss"]
    assert getattr(module, SEAM) is attention.scaled_dot_product_attention
    assert base.scaled_dot_product_attention is attention.original
    q, k, v = (mx.random.normal((1, heads, 5, 8)) for heads in (4, 2, 2))
    cache = QuantizedKVCache(group_size=32, bits=8)
    reads = [(None, None), (None, mx.zeros(4)), (AttentionLayer(PackedRows.dense(1), 0), mx.ones(4))]
    for theirs, sinks in reads:
        got = attention.scaled_dot_product_attention(q, k, v, theirs, 0.5, "causal", sinks=sinks)
        want = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.5, mask="causal", sinks=sinks)
        assert mx.array_equal(got, want)
    wide = mx.random.normal((1, 2, 5, 64))
    stored = cache.update_and_fetch(wide, wide)
    queries = mx.random.normal((1, 4, 5, 64))
    # mlx-lm's function scales the queries it is given in place.
    got = attention.scaled_dot_product_attention(queries + 0, *stored, cache, 0.5, None)
    want = base.quantized_scaled_dot_product_attention(queries, *stored, 0.5, None, group_size=32)
    assert mx.array_equal(got, want)


def test_a_model_that_does_not_pass_the_seam_reads_the_same() -> None:
    """The plain read: update_and_fetch, then mlx's attention on what it returned."""
    model = tiny("llama")
    module = sys.modules[type(model).__module__]
    tokens = [mx.array([[3, 1, 4, 1, 5]]), mx.array([[9]])]

    def logits() -> np.ndarray:
        session = SessionCache.create(model)
        return np.concatenate([np.array(session.forward(model, some)[0]) for some in tokens])

    attention.install(model)
    through = logits()
    setattr(module, SEAM, attention.original)
    np.testing.assert_allclose(logits(), through, atol=2e-6 * np.abs(through).max())
    attention.install(model)
