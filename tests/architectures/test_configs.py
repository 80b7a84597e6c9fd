"""The tiny models can break the law: their predictions differ by token and hang on what came before."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tests.architectures.configs import NAMES, VOCAB
from tests.architectures.law import RELATIVE, Logits, distance, model_of, random_tokens

SOON_FORGOTTEN = ("deepseek_v41", "recurrent_gemma", "rwkv7")  # short windows, fast decays


@pytest.mark.parametrize("name", NAMES)
def test_predictions_are_spread_and_hang_on_earlier_tokens(name: str) -> None:
    model = model_of(name)
    tokens = random_tokens(np.random.default_rng(0), 28)

    def logits(tokens: list[int]) -> Logits:
        return np.array(model(mx.array([tokens]), cache=make_prompt_cache(model))[0])

    want = logits(tokens)
    assert want.shape == (28, VOCAB)
    assert len(set(want.argmax(-1))) >= 8
    for at in (20, 26) if name in SOON_FORGOTTEN else (1, 20, 26):
        other = [*tokens[:at], (tokens[at] + 1) % VOCAB, *tokens[at + 1 :]]
        assert distance(logits(other)[-1:], want[-1:]) > 10 * RELATIVE
