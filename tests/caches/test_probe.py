"""A model that can't be trusted with several rows is found out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from tests.architectures.configs import make
from tests.caches.models import ARCHITECTURES, tiny
from tests.tiny import make_tiny_model

from stateroom.caches.attention import NAME, original
from stateroom.caches.codecs.affine import Affine
from stateroom.caches.codecs.codec import Codec
from stateroom.caches.codecs.dense import Dense
from stateroom.caches.codecs.turbo import Turbo
from stateroom.caches.probe import pieces_agree, prompts_agree, rows_agree, slices_decode


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_supported_models_agree(architecture: str) -> None:
    """B15, run once per family; llama4's chunked layers run alone."""
    assert rows_agree(tiny(architecture)) == (architecture != "llama4")


def test_a_model_that_ignores_padding_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """B15."""

    def deaf(
        queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any
    ) -> mx.array:
        return original(queries, keys, values, cache, scale, mask if isinstance(mask, str) else None)

    model = tiny("llama")
    monkeypatch.setattr(sys.modules[type(model).__module__], NAME, deaf)
    assert not rows_agree(model)


def test_a_model_that_wants_one_position_does_not() -> None:
    """gpt_bigcode counts positions with numpy from a single offset."""
    assert not rows_agree(tiny("gpt_bigcode"))


def test_a_model_of_one_position_for_all_rows_does_not() -> None:
    """B14: the group's cursor taken for the position of every row."""
    model = tiny("llama")

    def shifted(inputs: mx.array, cache: list[Any]) -> mx.array:
        for layer in cache:
            layer.rows._forward.position = max(layer.rows.layout.offset)
        logits: mx.array = model(inputs, cache=cache)
        return logits

    shifted.layers = model.layers  # type: ignore[attr-defined]
    assert not rows_agree(shifted)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prompts_padded_at_their_right_agree(architecture: str) -> None:
    assert prompts_agree(tiny(architecture)) == (architecture != "llama4")


def test_a_model_that_takes_padding_for_tokens_is_found_out() -> None:
    """mlx-lm's mamba never looks at the lengths of its rows."""
    model = make_tiny_model("mamba").model
    assert rows_agree(model)
    assert not prompts_agree(model)


def test_attention_by_blocks_of_columns_runs_alone() -> None:
    """B14: padding moves a row's tokens to other blocks, which only long rows would show."""
    assert not rows_agree(make("minimax_m3_vl"))


@pytest.mark.parametrize(
    "codec", [Dense(), Affine(4, 32, mx.float32), Affine(8, 64, mx.bfloat16), Turbo(3, 64, mx.float32)]
)
def test_slices_of_planes_decode(codec: Codec) -> None:
    """B36: tried before a scheme is served."""
    assert slices_decode(codec, 64)


class Fickle(Affine):
    """As on a build of mlx that decodes a slice and its copy differently."""

    def decode(self, planes: Sequence[mx.array]) -> mx.array:
        decoded.append(super().decode(planes))
        return decoded[-1] * len(decoded)


decoded: list[mx.array] = []


def test_planes_whose_slices_decode_to_something_else_are_found_out() -> None:
    assert not slices_decode(Fickle(8, 32, mx.float32), 64)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_supported_models_take_prompts_in_pieces(architecture: str) -> None:
    assert pieces_agree(tiny(architecture))


def test_a_model_whose_pieces_differ_is_found_out() -> None:
    """mlx-lm's phi3small adds its boolean mask to the scores: a piece sees what comes after it."""
    assert not pieces_agree(make("phi3small"))
