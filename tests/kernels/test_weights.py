"""Weights of a softmax, few and many, against float64; what is hidden by a lowest score weighs nothing."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateroom.kernels.packed_attention.folded import LOWEST
from stateroom.kernels.weights import COLUMNS, LEAST, MANY, powers, weighed

pytestmark = pytest.mark.usefixtures("computed_on_the_cpu")
RELATIVE = 3e-7


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.01, 1.0, 30.0, 126.0]))
def test_powers_are_those_of_the_oracle(seed: int, spread: float) -> None:
    x = -np.random.default_rng(seed).uniform(0, spread, (3, 101)).astype(np.float32)
    x[0, :4] = [0.0, -0.5, -1.0, 0.5]
    wanted = 2.0 ** x.astype(np.float64)
    assert (np.abs(np.array(powers(mx.array(x))) - wanted) <= RELATIVE * wanted).all()


def test_far_powers_vanish_and_never_wrap() -> None:
    x = np.concatenate([np.linspace(-131, -125, 4_001), [LEAST, -1e4, LOWEST, -np.inf]]).astype(np.float32)
    made = np.array(powers(mx.array(x)))
    assert (made[x <= LEAST] == 0).all()
    assert (made >= 0).all()
    assert (np.abs(made - 2.0 ** x.astype(np.float64)) <= 2.0**-126).all()


@pytest.mark.parametrize("stored", [1, COLUMNS - 1, COLUMNS, MANY // 7 + 3, MANY // 5 // COLUMNS * COLUMNS])
def test_weights_sums_and_maxima(stored: int) -> None:
    random = np.random.default_rng(stored)
    scores = random.normal(size=(2, 5, stored)).astype(np.float32) * 9
    scores[1, 3, : stored // 2] = LOWEST
    scores[0, 2] = LOWEST  # sees nothing: its weights are of no use, and finite
    weights, total, most = (np.array(made) for made in weighed(mx.array(scores)))
    assert (most == scores.max(-1, keepdims=True)).all()
    wanted = 2.0 ** (scores.astype(np.float64) - most)
    assert np.abs(weights - wanted).max() <= RELATIVE
    assert (weights[1, 3, : stored // 2] == 0).all()
    assert (np.abs(total - wanted.sum(-1, keepdims=True)) <= 1e-6 * total).all()
    assert np.isfinite(weights).all()


def test_lengths_that_change_at_every_step_add_no_traces() -> None:
    """A trace for each would be kept for ever: what `shapeless` is relied on for."""
    traced: list[tuple[int, ...]] = []

    def spied(x: mx.array) -> mx.array:
        traced.append(x.shape)
        return x * 2.0 + 1.0

    compiled = mx.compile(spied, shapeless=True)
    for stored in range(3, 23):
        mx.eval(compiled(mx.zeros((2, stored))))
    assert len(traced) == 1
