"""Tiny random models with a byte-level tokenizer, in process or as a real mlx-lm directory.

Weights are a function of (seed, name of the weight), the same in process and on disk. They are large
enough that greedy text varies and that arg-max has a margin. The model has more rows (300) than the
tokenizer has tokens, as real models do.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from stateroom.daemon.engine.model import LoadedModel, mlx_lm
from stateroom.daemon.engine.pieces import BYTE_ALPHABET
from stateroom.daemon.engine.template import ChatTemplate
from stateroom.daemon.engine.text import Tokenizer

VOCAB = 300
CONTEXT = 512
WINDOW = 16  # of the models with sliding windows: a short test wraps it
BOS, EOS, USER_OPENS, ENDS = "<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (BOS, EOS, USER_OPENS, ENDS)
MERGES = ("Ġ t", "h e", "Ġt he", "i n", "e r", "Ġ a", "o n", "r e", "Ġ s", "a t")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Config = dict[str, Any]


# ---------------------------------------------------------------- architectures


def _llama(layers: int, width: int) -> Config:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * width + 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


def _gemma(layers: int, width: int) -> Config:
    """Windows, with every second layer full."""
    return _llama(layers, width) | {
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": width // 4,
    }


def _lfm2(layers: int, width: int) -> Config:
    """Short convolutions (state), with every second layer full attention."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": width,
        "block_ff_dim": 2 * width + 8,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "rope_theta": 10000.0,
        "layer_types": ["full_attention" if i % 2 else "conv" for i in range(layers)],
    }


def _falcon_h1(layers: int, width: int) -> Config:
    """Each layer a state-space mixer beside full attention (composite)."""
    return _llama(layers, width) | {
        "mamba_d_ssm": width,
        "mamba_d_head": 8,
        "mamba_n_heads": width // 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "key_multiplier": 1.0,
    }


def _mamba(layers: int, width: int) -> Config:
    """State only."""
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "state_size": 4,
        "num_hidden_layers": layers,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "tie_word_embeddings": False,
    }


ARCHITECTURES: dict[str, Callable[[int, int], Config]] = {
    "llama": _llama,
    "qwen3": _llama,
    "gemma3_text": _gemma,
    "lfm2": _lfm2,
    "falcon_h1": _falcon_h1,
    "mamba": _mamba,
}


def tiny_config(
    architecture: str = "llama",
    *,
    layers: int = 2,
    width: int = 32,
    vocab: int = VOCAB,
    context: int = CONTEXT,
) -> Config:
    """A configuration as in `config.json`. `width` is a multiple of 8."""
    return ARCHITECTURES[architecture](layers, width) | {
        "model_type": architecture,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "eos_token_id": tiny_backend().token_to_id(ENDS),
    }


# ---------------------------------------------------------------- tokenizer


def tiny_backend(*, bos: bool = False) -> Backend:
    """256 bytes, a few merges, four special tokens; with `bos`, one of them before every text."""
    spelled = [character for character, _ in sorted(BYTE_ALPHABET.items(), key=lambda item: item[1])]
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    vocabulary = {token: i for i, token in enumerate([*spelled, *("".join(merge) for merge in merges)])}
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
        )
    return backend


def tiny_tokenizer(*, bos: bool = False) -> Tokenizer:
    backend = tiny_backend()
    template = ChatTemplate(CHAT_TEMPLATE, {"bos_token": BOS, "eos_token": ENDS})

    def render(messages: list[dict[str, str]], generation_prompt: bool) -> list[int]:
        text = template.render(messages, generation_prompt)
        return list(backend.encode(text, add_special_tokens=False).ids)

    return Tokenizer.over(
        backend,
        prefix=[backend.token_to_id(BOS)] if bos else [],
        eos=[backend.token_to_id(ENDS)],
        render=render,
    )


# ---------------------------------------------------------------- models


def _random_weights(model: Any, seed: int) -> None:
    """Matrices with rows of length about 1.5, norms and biases near their neutral value."""

    def fill(path: str, old: mx.array) -> mx.array:
        if not mx.issubdtype(old.dtype, mx.floating):
            return old
        noise = mx.random.normal(old.shape, key=mx.random.key(seed * 1_000_003 + zlib.crc32(path.encode())))
        if path.endswith("A_log"):
            return old
        if path.endswith("bias"):
            return 0.1 * noise
        if old.ndim < 2:
            return old + 0.1 * noise
        if "embed" in path or path.endswith("lm_head.weight"):
            return noise
        return noise * (1.5 / old.shape[-1] ** 0.5)

    model.update(tree_map_with_path(fill, model.parameters()))


def _module(config: Config, seed: int) -> Any:
    model_class, arguments = mlx_lm.utils._get_classes(config)
    model = model_class(arguments.from_dict(config))
    _random_weights(model, seed)
    model.eval()
    mx.eval(model.parameters())
    return model


def make_tiny_model(
    architecture: str = "llama",
    *,
    layers: int = 2,
    width: int = 32,
    vocab: int = VOCAB,
    context: int = CONTEXT,
    seed: int = 0,
    bos: bool = False,
) -> LoadedModel:
    """A model in this process (and for this thread), as `model.load` gives one."""
    config = tiny_config(architecture, layers=layers, width=width, vocab=vocab, context=context)
    tokenizer = tiny_tokenizer(bos=bos)
    return LoadedModel(
        id=f"tiny-{architecture}",
        model=_module(config, seed),
        tokenizer=tokenizer,
        config=config,
        context=context,
        vocab=vocab,
        eos=tokenizer.eos,
        facts={"device": "cpu", "dtype": "float32", "architecture": architecture},
    )


def write_tiny_model(
    folder: Path,
    architecture: str = "llama",
    *,
    layers: int = 2,
    width: int = 32,
    vocab: int = VOCAB,
    context: int = CONTEXT,
    seed: int = 0,
    bos: bool = False,
    change: Callable[[Any], None] | None = None,
    **more_config: Any,
) -> Path:
    """The same model as a directory that `stateroom serve --model` loads.

    Args:
        change: applied to the module before it is written (say, a quantisation).
        more_config: entries for `config.json`, such as `quantization`.
    """
    config = tiny_config(architecture, layers=layers, width=width, vocab=vocab, context=context)
    model = _module(config, seed)
    if change is not None:
        change(model)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | more_config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    tiny_backend(bos=bos).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": BOS,
                "eos_token": ENDS,
                "chat_template": CHAT_TEMPLATE,
                "clean_up_tokenization_spaces": False,
            }
        )
    )
    return folder


# ---------------------------------------------------------------- GGUF

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """mlx-lm's name of a llama weight as GGUF files have it."""
    stem, _, kind = name.rpartition(".")
    if stem in _GGUF_NAMES:
        return f"{_GGUF_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[rest]}.{kind}"


def gguf_rows(name: str, weight: mx.array, config: Config) -> mx.array:
    """The rows of query and key weights in the order of GGUF: the two of a rotary pair side by side."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return weight
    split = weight.reshape(config[heads], 2, config["head_dim"] // 2, -1)
    return split.swapaxes(1, 2).reshape(weight.shape)


def tiny_gguf_metadata(config: Config, pre: str = "smollm") -> dict[str, Any]:
    backend = tiny_backend()
    tokens = [backend.id_to_token(i) or f"[PAD{i}]" for i in range(config["vocab_size"])]
    kinds = [3 if token in SPECIAL else 5 if token.startswith("[PAD") else 1 for token in tokens]
    numbers = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.context_length": config["max_position_embeddings"],
        "tokenizer.ggml.bos_token_id": backend.token_to_id(BOS),
        "tokenizer.ggml.eos_token_id": backend.token_to_id(ENDS),
    }
    return {
        "general.architecture": "llama",
        "llama.rope.freq_base": mx.array(config["rope_theta"], dtype=mx.float32),
        "llama.attention.layer_norm_rms_epsilon": mx.array(config["rms_norm_eps"], dtype=mx.float32),
        **{key: mx.array(value, dtype=mx.uint32) for key, value in numbers.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": mx.array(kinds, dtype=mx.int32),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_tiny_gguf(
    path: Path,
    *,
    layers: int = 2,
    width: int = 32,
    seed: int = 0,
    pre: str = "smollm",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, mx.array] | None = None,
) -> Path:
    """The tiny llama as a GGUF file, with more or other `metadata` and `tensors` (None: without that one)."""
    config = tiny_config("llama", layers=layers, width=width)
    weights = dict(tree_flatten(_module(config, seed).parameters()))
    arrays = {gguf_name(name): gguf_rows(name, weight, config) for name, weight in weights.items()}
    entries = tiny_gguf_metadata(config, pre) | (metadata or {})
    mx.save_gguf(
        str(path),
        {name: array for name, array in (arrays | (tensors or {})).items() if array is not None},
        {key: value for key, value in entries.items() if value is not None},
    )
    return path
