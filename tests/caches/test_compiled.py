"""Steps replayed from traces: the logits of plain steps, few traces, and nothing half done when one fails."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tests.caches.models import tiny
from tests.tiny import make_tiny_model

from stateroom.caches.attention import install
from stateroom.caches.codecs.scheme import Scheme
from stateroom.caches.compiled import (
    CannotCompile,
    CompiledDecode,
    commit_decode_step,
    decode_inputs,
    decode_slot,
    prepare_decode_step,
)
from stateroom.caches.layout import CAPACITY_STEP
from stateroom.caches.session import SessionCache

TRACED = ["llama", "qwen3", "gemma3_text", "gpt_oss", "lfm2", "mamba2", "falcon_h1", "qwen3_next"]
BOUND = 1e-5  # of the largest logit


@cache
def model_of(architecture: str) -> Any:
    model = tiny(architecture)
    install(model)
    return model


def fed(model: Any, tokens: list[int]) -> SessionCache:
    session = SessionCache.create(model)
    session.forward(model, mx.array([tokens]))
    mx.eval(session.arrays())
    return session


def assert_same(got: mx.array, want: mx.array) -> None:
    assert np.isfinite(np.array(got)).all()
    assert np.abs(np.array(got) - np.array(want)).max() <= BOUND * np.abs(np.array(want)).max()


def step_both(
    compiled: CompiledDecode, model: Any, traced: SessionCache, plain: SessionCache, n: int
) -> None:
    tokens = mx.array([[(5 * n + row) % 90] for row in range(traced.rows)])
    got, want = compiled.step(traced, tokens), plain.forward(model, tokens)
    mx.eval(got, want, traced.arrays(), plain.arrays())
    assert_same(got, want)


@pytest.mark.parametrize("architecture", TRACED)
@pytest.mark.parametrize("lengths", [(7,), (7, 3, 12)])
def test_a_traced_step_is_a_step(architecture: str, lengths: tuple[int, ...]) -> None:
    """Past the window of eight too, and mixed with plain forwards of several tokens."""
    model = model_of(architecture)
    sessions = [fed(model, [(11 * row + k) % 90 for k in range(n)]) for row, n in enumerate(lengths)]
    # A lone session is its own group of one.
    traced, plain = (SessionCache.merge_rows([s.fork() for s in sessions]) for _ in range(2))
    compiled = CompiledDecode(model)
    for n in range(14):
        step_both(compiled, model, traced, plain, n)
    assert compiled.traces == 1
    more = mx.array([[1, 2, 3]] * len(lengths))
    assert_same(traced.forward(model, more), plain.forward(model, more))
    step_both(compiled, model, traced, plain, 50)
    assert traced.offsets == plain.offsets


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_a_trace_lasts_as_long_as_the_capacity(architecture: str) -> None:
    model = model_of(architecture)
    traced, plain = (fed(model, [k % 90 for k in range(CAPACITY_STEP - 9)]) for _ in range(2))
    compiled = CompiledDecode(model)
    for n in range(20):
        step_both(compiled, model, traced, plain, n)
    assert compiled.traces <= 2


def test_sessions_of_equal_shape_share_a_trace() -> None:
    model = model_of("llama")
    compiled = CompiledDecode(model)
    for length in (3, 40, 41):
        step_both(compiled, model, *(fed(model, [1] * length) for _ in range(2)), length)
    assert compiled.traces == 1


def test_traces_are_bounded() -> None:
    model = model_of("llama")
    compiled = CompiledDecode(model, traces_max=2)
    for rows in (1, 2, 3, 4):
        sessions = [fed(model, [row + 1] * 3) for row in range(rows)]
        compiled.step(SessionCache.merge_rows(sessions), mx.array([[1]] * rows))
    assert compiled.traces == 2


def test_what_a_trim_left_behind_is_never_read() -> None:
    """The whole capacity is read, so bytes behind a lone row's end must be silent: they may be NaN."""
    model = model_of("llama")
    traced, plain = (fed(model, list(range(1, 30))) for _ in range(2))
    rows = traced.stores[0]
    rows.planes[:] = [mx.where(mx.arange(p.shape[2])[:, None] < 20, p, mx.nan) for p in rows.planes]
    traced.trim(0, 9)
    plain.trim(0, 9)
    step_both(CompiledDecode(model), model, traced, plain, 1)


def test_the_pieces_of_a_step() -> None:
    model = model_of("llama")
    session = fed(model, [1, 2, 3])
    prepare_decode_step(session)
    slot, inputs = decode_slot(session), decode_inputs(session)
    assert (len(inputs), len(session.arrays())) == (slot.inputs, slot.outputs)
    assert inputs[-1].tolist() == [[3], [0], [3]], "positions, starts, ends"
    other = fed(model, [4] * 9)
    prepare_decode_step(other)
    assert decode_slot(other).key == slot.key
    taken = commit_decode_step(session, session.arrays())
    assert len(taken) == slot.outputs
    assert session.offsets == (4,)


def test_what_can_not_be_traced_says_so_and_stays_as_it_was() -> None:
    with pytest.raises(CannotCompile):
        CompiledDecode(model_of("llama")).step(SessionCache.create(model_of("llama")), mx.array([[1]]))
    with pytest.raises(CannotCompile):
        CompiledDecode(model_of("llama4")).step(fed(model_of("llama4"), [1, 2]), mx.array([[1]]))
    wide = make_tiny_model("llama", width=256).model
    quantised = SessionCache.create(wide, Scheme("affine8"))
    quantised.forward(wide, mx.array([[1, 2, 3]]))
    with pytest.raises(CannotCompile):
        CompiledDecode(wide).step(quantised, mx.array([[1]]))
    assert quantised.offsets == (3,)


class Stubborn:
    """A model that wants to see its tokens, which a trace can't show."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        assert inputs.tolist() is not None
        logits: mx.array = self.model(inputs, cache=cache)
        return logits


def test_a_model_that_can_not_be_traced_steps_plainly() -> None:
    model = model_of("llama")
    session, plain = fed(model, [1, 2, 3]), fed(model, [1, 2, 3])
    compiled = CompiledDecode(Stubborn(model))
    for _ in range(2):
        with pytest.raises(CannotCompile):
            compiled.step(session, mx.array([[4]]))
    assert session.offsets == (3,)
    assert_same(session.forward(model, mx.array([[4]])), plain.forward(model, mx.array([[4]])))
