"""Small layers with fewer primitives, and cheaper exponentials, for CPUs: a model's own, swapped in place.

A primitive costs 3 to 5 µs there, however little it computes, and mlx's exponential 12 ns an element, its
power 4 (docs/performance.md). Answers stay those of the model's own layers to float32's rounding.
"""

from __future__ import annotations

import sys
from functools import partial

import mlx.core as mx
from mlx import nn
from mlx_lm.models import activations

from stateroom.caches.read_trial import measured
from stateroom.caches.shared_reads import use_costs
from stateroom.daemon.engine.cpu_linear import use_pieces
from stateroom.daemon.engine.cpu_rope import use_rotations
from stateroom.kernels.decode_attention import LOG2_E

NORM_ROWS_MOST = 2  # with more, what mlx compiles to loops over strides is no faster than its primitives


@mx.compile
def _normed(x: mx.array, weight: mx.array, share: float, eps: float) -> mx.array:
    return x * mx.rsqrt(x.square().sum(axis=-1, keepdims=True) * share + eps) * weight


class FewNorm(nn.RMSNorm):
    """`nn.RMSNorm` of few rows in two primitives instead of eleven."""

    def __call__(self, x: mx.array) -> mx.array:
        weight = self["weight"]
        if x.size > NORM_ROWS_MOST * weight.size or x.dtype != mx.float32:
            return super().__call__(x)  # type: ignore[no-any-return, no-untyped-call]
        return _normed(x, weight, 1 / weight.size, self.eps)


@partial(mx.compile, shapeless=True)
def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return gate * x / (1 + mx.power(2.0, gate * -LOG2_E))


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """mlx-lm's function of this name: silu(gate) x."""
    if gate.dtype != mx.float32 or x.dtype != mx.float32:
        return activations.swiglu(gate, x)  # type: ignore[no-any-return]
    return _swiglu(gate, x)


def use_forms(model: nn.Module) -> None:
    """Gives a model on a CPU the forms of this folder for its float32 layers. No parameter changes."""
    use_costs(measured())
    use_pieces(model)
    use_rotations(model)
    for module in model.modules():
        if type(module) is nn.RMSNorm and module["weight"].dtype == mx.float32:
            module.__class__ = FewNorm
    for name in {kind.__module__ for part in model.modules() for kind in type(part).__mro__}:
        if getattr(sys.modules.get(name), "swiglu", None) is activations.swiglu:
            sys.modules[name].swiglu = swiglu  # type: ignore[attr-defined]
