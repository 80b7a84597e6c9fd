"""Products in pieces give what plain ones give, for any shape; and nothing else about a layer changes."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx.utils import tree_flatten

from stateroom.daemon.engine.cpu_linear import (
    PIECE_LEAST,
    RESULT_MOST,
    ROWS_MOST,
    WORK_MOST,
    multiply,
    piece,
    use_pieces,
)


@given(st.integers(1, 40), st.integers(1, 60_000), st.integers(1, 5_000))
def test_pieces_divide_and_are_small(rows: int, outputs: int, inputs: int) -> None:
    size = piece(rows, outputs, inputs)
    if size:
        assert outputs % size == 0
        assert PIECE_LEAST <= size < outputs
        assert rows <= ROWS_MOST
        assert rows * size <= RESULT_MOST
        assert rows * size * inputs <= WORK_MOST


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([(1, 1), (1, 3), (2, 1), (7, 1), (8, 1), (3, 5)]),
    st.sampled_from([67, 577, 1_536, 2_310, 4_099, 6_144]),
    st.sampled_from([3, 64, 131, 577]),
)
def test_products_are_those_of_the_oracle(shape: tuple[int, int], outputs: int, inputs: int) -> None:
    random = np.random.default_rng(outputs * inputs)
    x = random.standard_normal((*shape, inputs)).astype(np.float32)
    weight = random.standard_normal((outputs, inputs)).astype(np.float32)
    made = np.array(multiply(mx.array(x), mx.array(weight)))
    wanted = x.astype(np.float64) @ weight.astype(np.float64).T
    assert made.shape == wanted.shape
    assert np.abs(made - wanted).max() <= 2e-6 * inputs**0.5 * np.abs(wanted).max()


def test_the_demo_models_layers_are_cut() -> None:
    assert piece(1, 49_152, 576) == 1_024
    assert piece(8, 1_536, 576) == 128
    assert piece(1, 576, 576) == 0  # small as it is
    assert piece(ROWS_MOST + 1, 49_152, 576) == 0


@pytest.mark.parametrize("bias", [True, False])
def test_layers_keep_their_parameters_and_answers(bias: bool) -> None:
    model = nn.Sequential(
        nn.Embedding(2_310, 67), nn.Linear(67, 4_620, bias=bias), nn.Linear(4_620, 11, bias=False)
    )
    before = tree_flatten(model.parameters())
    tokens = mx.array([[3], [5]])
    wanted, hidden = model(tokens), mx.random.normal((2, 1, 67))
    logits = model.layers[0].as_linear(hidden)
    assert use_pieces(model) == 3
    assert use_pieces(model) == 0
    after = tree_flatten(model.parameters())
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(a is b for (_, a), (_, b) in zip(after, before, strict=True))
    assert mx.allclose(model(tokens), wanted, rtol=1e-4, atol=1e-5)
    assert mx.allclose(model.layers[0].as_linear(hidden), logits, rtol=1e-4, atol=1e-5)


def test_quantised_and_half_precision_layers_stay_as_they_are() -> None:
    half = nn.Linear(64, 4_096)
    half.set_dtype(mx.bfloat16)
    assert use_pieces(half) == 0
    assert use_pieces(nn.QuantizedLinear(64, 4_096)) == 0
