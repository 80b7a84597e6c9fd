"""What the tiny configurations have in common. mlx-lm's `from_dict` drops the entries a model doesn't know.

Dimensions differ from each other where the models allow it. Head widths are 64 where the model has them
apart from its own width, so that every scheme of quantisation can store them.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

VOCAB = 101
WINDOW = 8

PLAIN: Config = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "num_hidden_layers": 3,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "tie_word_embeddings": False,
}

# 2 heads of 64 on one, for models whose head width is their width divided by their heads.
SPLIT: Config = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None}

WINDOWED: Config = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

EXPERTS: Config = {
    "num_experts": 5,
    "num_local_experts": 5,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
    "shared_intermediate_size": 28,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}

# Multi-head latent attention: what is stored is the latent (64) and the rotary part (64) of one head.
LATENT: Config = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 96,
}

GATED_DELTA: Config = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
}

# Queries grow from the 16th token on.
SCALED_QUERIES: Config = {
    "rope_parameters": {
        "rope_theta": 10000.0,
        "rope_type": "default",
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16,
    }
}
