"""Tiny random models of mlx-lm's architectures, in float32.

`NAMES` lists them by mlx-lm's `model_type`, `make` builds one in some milliseconds. Weights are a function
of their name and shape alone, and large enough that the logits of different tokens lie well apart. The
routers of mixtures of experts are random too: their choices are clear by far more than float32 rounds.
"""

from __future__ import annotations

import zlib
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map_with_path
from mlx_lm import utils
from tests.architectures.bases import PLAIN, VOCAB, WINDOW, Config
from tests.architectures.plain import PLAIN_MODELS
from tests.architectures.recurrent import RECURRENT_MODELS
from tests.architectures.windowed import WINDOWED_MODELS

from stateroom.caches.attention import install

__all__ = ["CONFIGS", "NAMES", "NOT_BUILT", "VOCAB", "WINDOW", "WRONG_IN_MLX_LM", "config", "make"]

CONFIGS: dict[str, Config] = PLAIN_MODELS | WINDOWED_MODELS | RECURRENT_MODELS
NAMES: list[str] = sorted(CONFIGS)

# What isn't built here, with the reason.
NOT_BUILT: dict[str, str] = {
    "bitnet": "its kernels exist for Metal only",
    "muse_spark": "its kernels exist for Metal only",
    "olmo": "its module needs the package ai2-olmo",
    "prism_hadamard_qwen35": "its weights come packed, with a manifest",
}

# Models that mlx-lm itself gets wrong, so that there is no right answer to hold them to.
WRONG_IN_MLX_LM: dict[str, str] = {
    "phi3small": "adds its boolean mask to the scores, so that a chunk sees the tokens behind it",
}


def config(name: str) -> Config:
    """The configuration as a model's `config.json` would have it."""
    changes = dict(CONFIGS[name])
    wrapped = changes.pop("text_config", None)
    if wrapped is None:
        return PLAIN | {"model_type": name} | changes
    return {"model_type": name, "vocab_size": VOCAB} | changes | {"text_config": PLAIN | wrapped}


def make(name: str) -> Any:
    """The model in evaluation mode, with stateroom's attention installed as the engine does."""
    model = untrained(config(name))
    if name == "phi3small":  # it hides 14 tokens of the real vocabulary, which would be written out of bounds
        model._dummy_tokenizer_ids = mx.array([], dtype=mx.int32)
    weigh(model)
    install(model)
    return model


def untrained(settings: Config) -> Any:
    """What mlx-lm makes of a configuration."""
    model_class, arguments = utils._get_classes(settings)
    return model_class(arguments.from_dict(settings))


def weigh(model: Any) -> None:
    """Random weights with which predictions hang on all that a token sees; evaluation mode."""
    model.update(tree_map_with_path(_weight, model.parameters()))
    model.eval()
    mx.eval(model.parameters())


def _weight(path: str, old: mx.array) -> mx.array:
    """Matrices with rows of length about 1.5; norms, biases and decays near the value a model starts with."""
    if not mx.issubdtype(old.dtype, mx.floating):
        return old
    noise = mx.random.normal(old.shape, key=mx.random.key(zlib.crc32(path.encode())))
    if path.endswith("dt_bias"):  # states that last: their decay is slow
        return 0.1 * noise - 3.0
    if old.ndim < 2:
        return old if path.endswith("A_log") else old + 0.1 * noise
    if "embed" in path or "wte" in path:
        return noise
    inputs = old.shape[1] if "conv" in path else old.shape[-1]
    scaled: mx.array = noise * (1.5 / inputs**0.5)
    return scaled
