"""A model that was loaded from a GGUF file, as a directory in the form of mlx-lm, with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from stateroom.daemon.engine import gguf, vocabulary
from stateroom.daemon.engine.model import LoadedModel


def write_folder(loaded: LoadedModel, source: Path, folder: Path) -> None:
    """Writes the weights as they were loaded, the configuration and the tokenizer.

    Args:
        source: the GGUF file that the model was loaded from, or the directory with it.
    """
    file = gguf.read(source if source.is_file() else next(source.glob("*.gguf")))
    if gguf.rope_factors(file) is not None:
        raise ValueError("mlx-lm's configuration has no place for the rotary factors of this file")
    folder.mkdir(parents=True)
    eos = sorted(loaded.eos)
    config = loaded.config | {"eos_token_id": eos}
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(loaded.model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokens = [str(token) for token in file.metadata["tokenizer.ggml.tokens"]]
    pre = vocabulary._supported_cut(file)
    vocabulary._backend(file, pre, tokens).save(str(folder / "tokenizer.json"))
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokens[file.metadata["tokenizer.ggml.eos_token_id"]],
        "chat_template": file.metadata.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
