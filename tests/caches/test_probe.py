"""A model that can't be trusted with several rows is found out."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import pytest
from tests.caches.models import ARCHITECTURES, tiny

from stateroom.caches.attention import NAME, original
from stateroom.caches.probe import rows_agree


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
