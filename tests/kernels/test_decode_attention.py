"""The decode read against float64, in both forms."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from tests.kernels.oracle import attend

from stateroom.kernels import dispatch
from stateroom.kernels.decode_attention import attention_in_parts
from stateroom.kernels.dispatch import Form

FORMS: list[Form] = ["folded", "fused"]
# B, H, Hkv, S, D, Dv: one product or blocks of keys (whole or with a rest), softmax or powers of two.
SHAPES = [
    (1, 6, 2, 13, 5, 3),
    (3, 7, 7, 29, 8, 8),
    (2, 9, 3, 1, 64, 64),
    (5, 4, 1, 307, 11, 7),
    (1, 3, 1, 512, 6, 5),
    (1, 2, 2, 1_281, 3, 2),
    (2, 6, 1, 701, 7, 5),
]
TOLERANCE = {mx.float32: 2e-6, mx.float16: 3e-3, mx.bfloat16: 2e-2}


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("b", "h", "hkv", "s", "d", "dv"), SHAPES)
def test_against_float64(
    b: int, h: int, hkv: int, s: int, d: int, dv: int, dtype: mx.Dtype, form: Form
) -> None:
    q, k, v = (
        mx.array(drawn(i, b, n, t, w)).astype(dtype)
        for i, (n, t, w) in enumerate([(h, 1, d), (hkv, s, d), (hkv, s, dv)])
    )
    with dispatch.forced(form):
        got = dispatch.decode_attention(q, k, v, 0.3)
    assert got.dtype == dtype
    assert got.shape == (b, h, 1, dv)
    exact = [np.array(a.astype(mx.float32)) for a in (q, k, v)]
    for row in range(b):
        want = attend(exact[0][row], exact[1][row], exact[2][row], 0.3)
        np.testing.assert_allclose(np.array(got[row].astype(mx.float32)), want, atol=TOLERANCE[dtype] * 3)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (5, 1)])
@pytest.mark.parametrize("lengths", [(7,), (71, 13), (301, 1, 29), (2_111, 37)])
def test_parts_are_read_as_one_array(heads: int, kv_heads: int, lengths: tuple[int, ...]) -> None:
    """All but the last are one row's, which every row sees; of the last each sees what its mask shows."""
    b, d, dv, last = 3, 11, 5, lengths[-1]
    q, own = drawn(1, b, heads, 1, d), (drawn(2, b, kv_heads, last, d), drawn(3, b, kv_heads, last, dv))
    held = [(drawn(4 + n, 1, kv_heads, n, d), drawn(5 + n, 1, kv_heads, n, dv)) for n in lengths[:-1]]
    seen = np.ones((b, 1, 1, last), bool)
    seen[1, ..., : last // 2] = False
    parts = [*held, own]
    got = attention_in_parts(
        mx.array(q), [mx.array(k) for k, _ in parts], [mx.array(v) for _, v in parts], 0.3, mx.array(seen)
    )
    assert got.shape == (b, heads, 1, dv)
    for row in range(b):
        first = last // 2 if row == 1 else 0
        keys, values = (
            np.concatenate([*(part[i][0] for part in held), own[i][row, :, first:]], axis=1) for i in range(2)
        )
        want = attend(q[row], keys, values, 0.3)
        np.testing.assert_allclose(np.array(got[row]), want, atol=TOLERANCE[mx.float32] * 3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("junk", [np.nan, np.inf, 1e30])
def test_hidden_columns_do_not_matter(form: Form, junk: float) -> None:
    """Hidden keys may hold anything; rows see [start, end) of their own."""
    b, h, hkv, s, d = 3, 6, 2, 17, 5
    q, k, v = drawn(1, b, h, 1, d), drawn(2, b, hkv, s, d), drawn(3, b, hkv, s, d)
    spans = [(0, 17), (5, 12), (16, 17)]
    seen = np.zeros((b, 1, 1, s), bool)
    for row, (start, end) in enumerate(spans):
        seen[row, ..., start:end] = True
    hidden = ~seen.transpose(0, 1, 3, 2)
    dirty_k = np.where(hidden, junk, k).astype(np.float32)
    dirty_v = np.where(hidden, 0.0, v).astype(np.float32)
    with dispatch.forced(form):
        got = np.array(dispatch.decode_attention(*map(mx.array, (q, dirty_k, dirty_v)), 0.4, mx.array(seen)))
    for row, (start, end) in enumerate(spans):
        want = attend(q[row], k[row, :, start:end], v[row, :, start:end], 0.4)
        np.testing.assert_allclose(got[row], want, atol=5e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_sees_nothing_is_finite(form: Form) -> None:
    """B03."""
    q, k, v = (mx.array(drawn(i, 2, 4, n, 7)) for i, n in enumerate([1, 9, 9]))
    seen = mx.array([[[[True] * 9]], [[[False] * 9]]])
    with dispatch.forced(form):
        got = np.array(dispatch.decode_attention(q, k, v, 0.5, seen))
    assert np.isfinite(got).all()


def test_forced_ends_with_its_block() -> None:
    usual = dispatch.decode_form()
    other: Form = "fused" if usual == "folded" else "folded"

    def fails() -> None:
        with dispatch.forced(other):
            assert dispatch.decode_form() == other
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert dispatch.decode_form() == usual
