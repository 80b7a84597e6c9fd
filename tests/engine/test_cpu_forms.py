"""A model in the forms for CPUs answers as it did, and none of its parameters is another."""

from __future__ import annotations

import mlx.core as mx
import mlx_lm.models.llama
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import activations
from tests.tiny import make_tiny_model

from stateroom.caches.attention import install
from stateroom.caches.session import SessionCache
from stateroom.daemon.engine import cpu_forms
from stateroom.daemon.engine.cpu_forms import FewNorm, swiglu, use_forms


@pytest.fixture(autouse=True)
def plain_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms are put into mlx-lm's modules: each test begins and ends without them."""
    for name in ("llama", "qwen3", "gemma3_text", "lfm2", "falcon_h1", "mamba"):
        module = __import__(f"mlx_lm.models.{name}", fromlist=[name])
        if hasattr(module, "swiglu"):
            monkeypatch.setattr(module, "swiglu", activations.swiglu)


@pytest.mark.parametrize("rows", [1, 3, 7])
@pytest.mark.parametrize("width", [67, 576])
def test_norms_are_those_of_the_oracle(rows: int, width: int) -> None:
    random = np.random.default_rng(width)
    x = random.standard_normal((rows, 1, width)).astype(np.float32) * 3
    norm = nn.RMSNorm(width, eps=1e-3)
    norm.weight = mx.array(random.standard_normal(width).astype(np.float32))
    norm.__class__ = FewNorm
    exact = x.astype(np.float64)
    wanted = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-3) * np.array(norm.weight)
    assert np.abs(np.array(norm(mx.array(x))) - wanted).max() <= 1e-6 * np.abs(wanted).max()


def test_halves_are_normed_by_mlx() -> None:
    norm = nn.RMSNorm(67)
    x = mx.random.normal((1, 1, 67), key=mx.random.key(1)).astype(mx.bfloat16)
    wanted = norm(x)
    norm.__class__ = FewNorm
    assert mx.array_equal(norm(x), wanted)


def test_swiglu_is_that_of_the_oracle_at_any_size_of_gate() -> None:
    random = np.random.default_rng(3)
    gate = np.concatenate([random.standard_normal(997) * 4, [0.0, -87.0, -104.0, -1e4, 87.0, 1e4]])
    gate, x = gate.astype(np.float32), random.standard_normal(1_003).astype(np.float32)
    made = np.array(swiglu(mx.array(gate), mx.array(x)))
    with np.errstate(over="ignore"):
        wanted = gate.astype(np.float64) * x / (1 + np.exp(-gate.astype(np.float64)))
    # An exponent's own rounding grows with it; what it belongs to is by so much smaller than the gate.
    assert (np.abs(made - wanted) <= 1e-6 * np.abs(wanted) + 1e-6 * np.abs(x)).all()
    halves = mx.array(gate[:7]).astype(mx.float16), mx.array(x[:7]).astype(mx.float16)
    assert mx.array_equal(swiglu(*halves), activations.swiglu(*halves))


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "lfm2", "falcon_h1", "mamba"])
def test_models_answer_as_they_did(architecture: str) -> None:
    model = make_tiny_model(architecture).model
    before = tree_flatten(model.parameters())
    prompts = [mx.array([list(range(3, 3 + n))], dtype=mx.uint32) for n in (29, 5)]

    def answers() -> list[mx.array]:
        """A prompt, steps behind it, and two rows of different lengths."""
        install(model)
        rows = [SessionCache.create(model) for _ in prompts]
        made = [row.forward(model, prompt) for row, prompt in zip(rows, prompts, strict=True)]
        made += [rows[0].forward(model, mx.array([[at]])) for at in (7, 8)]
        group = SessionCache.merge_rows(rows)
        made += [group.forward(model, mx.array([[at], [at + 1]])) for at in (9, 10)]
        mx.eval(made)
        return made

    wanted = answers()
    use_forms(model)
    got = answers()
    for ours, plain in zip(got, wanted, strict=True):
        assert float(mx.abs(ours - plain).max()) <= 2e-5 * float(mx.abs(plain).max())
    after = tree_flatten(model.parameters())
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(a is b for (_, a), (_, b) in zip(after, before, strict=True))


def test_a_llama_has_all_the_forms() -> None:
    model = make_tiny_model("llama").model
    use_forms(model)
    kinds = {type(module).__name__ for module in model.modules()}
    assert {"FewNorm", "TurningRoPE", "PieceLinear"} <= kinds
    assert not {"RMSNorm", "RoPE", "Linear"} & kinds
    assert mlx_lm.models.llama.swiglu is cpu_forms.swiglu
