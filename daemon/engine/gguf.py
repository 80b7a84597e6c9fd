"""Models in GGUF files: llama-family configuration and weights in the form of mlx-lm.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. mlx reads the file; of quantised
tensors it makes `weight` (packed 32-bit words), `scales` and `biases`, in groups of 32.
The rows of query and key weights are permuted in these files so that rotary pairs are neighbours,
which mlx-lm calls `rope_traditional`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from stateroom.daemon.engine.problem import ModelError

GROUP = 32  # values that share a scale, in every quantised form of GGUF that mlx reads
CONTEXT_DEFAULT = 4096  # tokens, for a model that doesn't say

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1's stretching of the rotary wavelengths, one factor a pair


@dataclass(frozen=True)
class GGUF:
    """An open file.

    Attributes:
        metadata: plain Python values by key; arrays of numbers stay mlx arrays.
        tensors: lazy, by the file's names.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, mx.array]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))


def read(path: Path) -> GGUF:
    """Opens a file; the weights are read when they are first used.

    Raises:
        ModelError: it isn't a GGUF file, or mlx can't read it.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file.", permanent=True)
    try:
        loaded: Any = mx.load(str(path), format="gguf", return_metadata=True)
    except Exception as error:
        raise ModelError(f"{path} can't be read as GGUF: {error}", permanent=True) from error
    tensors, metadata = loaded
    return GGUF(path, {key: _plain(value) for key, value in metadata.items()}, dict(tensors))


def _plain(value: Any) -> Any:
    if isinstance(value, mx.array):
        return value.item() if value.ndim == 0 else value
    return value


def config(file: GGUF) -> dict[str, Any]:
    """The model's configuration as mlx-lm's llama takes it.

    Raises:
        ModelError: another architecture, or something in this one that mlx-lm's llama can't do.
    """
    if file.architecture != "llama":
        raise ModelError(
            f"{file.path} holds a model of architecture {file.architecture!r}; of GGUF files only 'llama' is "
            "supported. Use the model's mlx-lm form instead.",
            permanent=True,
        )
    heads = _need(file, "attention.head_count")
    width = _need(file, "embedding_length")
    head_dim = _get(file, "attention.key_length", width // heads)
    made = {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": _need(file, "block_count"),
        "intermediate_size": _need(file, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _get(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _need(file, "attention.layer_norm_rms_epsilon"),
        "vocab_size": _rows(file, "token_embd"),
        "max_position_embeddings": _get(file, "context_length", CONTEXT_DEFAULT),
        "rope_theta": _get(file, "rope.freq_base", 10000.0),
        "rope_traditional": True,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    _refuse_the_unknown(file, head_dim)
    if (scaling := _rope_scaling(file)) is not None:
        made["rope_scaling"] = scaling
    return made


def _need(file: GGUF, key: str) -> Any:
    value = file.metadata.get(f"{file.architecture}.{key}")
    if value is None:
        raise ModelError(f"{file.path} lacks the entry {file.architecture}.{key}.", permanent=True)
    if isinstance(value, mx.array):
        raise ModelError(
            f"{file.path}: {file.architecture}.{key} differs from layer to layer, which is not supported.",
            permanent=True,
        )
    return value


def _get(file: GGUF, key: str, default: Any) -> Any:
    return _need(file, key) if f"{file.architecture}.{key}" in file.metadata else default


def _rows(file: GGUF, tensor: str) -> int:
    if f"{tensor}.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor {tensor}.weight.", permanent=True)
    return int(file.tensors[f"{tensor}.weight"].shape[0])


def _refuse_the_unknown(file: GGUF, head_dim: int) -> None:
    wrong = None
    if file.metadata.get("split.count", 1) > 1:
        wrong = "its weights in several files"
    elif _get(file, "expert_count", 0):
        wrong = "a mixture of experts"
    elif _get(file, "rope.dimension_count", head_dim) != head_dim:
        wrong = "rotary embedding of a part of each head"
    elif _get(file, "attention.value_length", head_dim) != head_dim:
        wrong = "values of another width than keys"
    elif _get(file, "attention.sliding_window", 0):
        wrong = "a sliding window"
    if wrong:
        raise ModelError(f"{file.path} has {wrong}, which is not supported in GGUF files.", permanent=True)


def _rope_scaling(file: GGUF) -> dict[str, Any] | None:
    kind = _get(file, "rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"type": "linear", "factor": float(_need(file, "rope.scaling.factor"))}
    raise ModelError(f"{file.path} uses rotary scaling {kind!r}, which is not supported.", permanent=True)


# ---------------------------------------------------------------- weights


def weights(file: GGUF, *, dense: bool) -> dict[str, mx.array]:
    """The weights by mlx-lm's names, lazy.

    Args:
        dense: all in float32; else as stored, with norms in the type of the embedding, since a model
            computes in the widest type that it meets.

    Raises:
        ModelError: the file has a tensor that a llama has no place for.
    """
    made: dict[str, mx.array] = {}
    embedding = file.tensors.get("token_embd.scales", file.tensors["token_embd.weight"])
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        stem, _, kind = name.rpartition(".")
        target = f"{_module(file, stem)}.{kind}"
        if not dense:
            made[target] = tensor.astype(embedding.dtype) if tensor.ndim == 1 else tensor
        elif kind not in ("scales", "biases"):
            made[target] = _dense(file, stem, kind)
    return made


def rope_factors(file: GGUF) -> mx.array | None:
    """Factors on the rotary wavelengths, [D / 2], or None."""
    return file.tensors.get(_ROPE_FACTORS)


def bits(packed: mx.array, scales: mx.array) -> int:
    """Bits a value of a packed tensor with these scales (groups of `GROUP`)."""
    return packed.shape[-1] * 32 // (scales.shape[-1] * GROUP)


def _module(file: GGUF, stem: str) -> str:
    if stem in _NAMES:
        return _NAMES[stem]
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}"
    raise ModelError(f"{file.path} has a tensor {stem!r} that no llama model has.", permanent=True)


def _dense(file: GGUF, stem: str, kind: str) -> mx.array:
    tensor = file.tensors[f"{stem}.{kind}"]
    scales = file.tensors.get(f"{stem}.scales")
    if kind != "weight" or scales is None:
        return tensor.astype(mx.float32)
    return mx.dequantize(
        tensor,
        scales.astype(mx.float32),
        file.tensors[f"{stem}.biases"].astype(mx.float32),
        group_size=GROUP,
        bits=bits(tensor, scales),
    )


def wavelengths(config: dict[str, Any], factors: mx.array) -> mx.array:
    """Rotary wavelengths over 2π with the file's factors, [D / 2] float32, as `mx.fast.rope` takes them."""
    pairs = mx.arange(0, config["head_dim"], 2, dtype=mx.float32)
    return mx.exp(pairs * (math.log(config["rope_theta"]) / config["head_dim"])) * factors.astype(mx.float32)
