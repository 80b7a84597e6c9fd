"""Recurrent states, alone or among attention: what differs from the common configuration."""

from __future__ import annotations

from tests.architectures.bases import EXPERTS, GATED_DELTA, SPLIT, Config

RECURRENT_MODELS: dict[str, Config] = {
    "lfm2": SPLIT
    | {
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 128,
        "block_ff_dim": 56,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "qwen3_next": GATED_DELTA | EXPERTS | {"full_attention_interval": 2},
    "qwen3_5": GATED_DELTA | {"full_attention_interval": 2},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 10,
        "state_size": 6,
        "conv_kernel": 3,
        "n_groups": 2,
        "intermediate_size": 80,
        "use_conv_bias": True,
        "time_step_limit": (0.0, 100.0),
        "time_step_rank": "auto",
    },
    "jamba": SPLIT
    | EXPERTS
    | {
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 3,
        "mamba_d_state": 6,
        "mamba_expand": 2,
    },
    "falcon_h1": {
        "mamba_d_ssm": 40,
        "mamba_d_head": 10,
        "mamba_n_heads": 4,
        "mamba_d_state": 6,
        "mamba_chunk_size": 16,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "key_multiplier": 1.0,
    },
}
