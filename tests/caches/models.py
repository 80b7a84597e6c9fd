"""Tiny random models with every kind of layer, of heads too narrow for any codec but the dense one."""

from __future__ import annotations

from typing import Any

from tests.architectures.bases import VOCAB, WINDOW
from tests.architectures.configs import CONFIGS, untrained, weigh

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "num_hidden_layers": 3,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}

# What differs from _BASE, by mlx-lm's name of the architecture.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "llama_windows": {
        "model_type": "llama",
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "gemma3_text": {
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 10,
    },
    "gpt_oss": {  # attention sinks, windows of a model that asks for masks by window size
        "sliding_window": WINDOW,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "hidden_size": 64,
        "intermediate_size": 64,
    },
    "llama4": {  # chunked attention, which runs alone
        "num_hidden_layers": 4,
        "attention_chunk_size": WINDOW,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 56,
        "num_experts_per_tok": 1,
        "num_local_experts": 2,
        "rope_scaling": None,
        "use_qk_norm": True,
        "attention_bias": False,
    },
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 40,
        "block_ff_dim": 56,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "mamba2": {
        "num_heads": 8,
        "state_size": 6,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 3,
        "n_groups": 2,
        "intermediate_size": 80,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.0, 100.0),
        "time_step_rank": "auto",
    },
    "qwen3_next": {
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "linear_conv_kernel_dim": 3,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [],
        "moe_intermediate_size": 24,
        "partial_rotary_factor": 0.4,
    },
    "falcon_h1": CONFIGS["falcon_h1"],
}


# With heads that can be quantised.
_WIDE = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "partial_rotary_factor": 0.5}
QUANTISABLE: dict[str, dict[str, Any]] = {
    f"{name}_64": {"model_type": name} | ARCHITECTURES[name] | _WIDE
    for name in ("llama", "llama_windows", "gemma3_text", "gpt_oss", "llama4", "qwen3_next")
}

OTHERS: dict[str, dict[str, Any]] = {
    "gpt_bigcode": {
        "n_embd": 40,
        "n_layer": 2,
        "n_inner": 56,
        "n_head": 4,
        "n_positions": 128,
        "layer_norm_epsilon": 1e-5,
    },
}


def tiny(name: str) -> Any:
    """The model, before stateroom's attention is installed in it."""
    config = {"model_type": name} | _BASE | (ARCHITECTURES | QUANTISABLE | OTHERS)[name]
    if config["model_type"] == "llama4":
        config = {"model_type": "llama4", "text_config": config}
    model = untrained(config)
    weigh(model)
    return model
