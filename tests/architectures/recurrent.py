"""Recurrent states, alone or among attention: what differs from the common configuration."""

from __future__ import annotations

from tests.architectures.bases import EXPERTS, GATED_DELTA, LATENT, SPLIT, WINDOW, Config

CONVOLUTION: Config = SPLIT | {
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 128,
    "block_ff_dim": 56,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "full_attention", "conv"],
}
MAMBA: Config = {
    "state_size": 6,
    "conv_kernel": 3,
    "intermediate_size": 80,
    "use_conv_bias": True,
}
KDA: Config = {
    "linear_attn_config": {
        "num_heads": 3,
        "head_dim": 12,
        "short_conv_kernel_size": 3,
        "kda_layers": [1, 3],
        "full_attn_layers": [2],
    }
}
LIGHTNING: Config = SPLIT | EXPERTS | {"layer_group_size": 2, "group_norm_size": 2, "use_qk_norm": True}

RECURRENT_MODELS: dict[str, Config] = {
    "baichuan_m1": SPLIT
    | {
        "sliding_window": WINDOW,
        "sliding_window_layers": [0, 2],
        "conv_window": 2,
        "num_swa_attention_heads": 2,
        "num_swa_key_value_heads": 2,
    },
    "bailing_hybrid": LIGHTNING | LATENT | {"head_dim": 64, "num_hidden_layers": 4},
    "bailing_moe_linear": LIGHTNING | {"num_hidden_layers": 4, "partial_rotary_factor": 0.5},
    "bailing_moe_v3": EXPERTS
    | LATENT
    | {
        "num_hidden_layers": 4,
        "layer_group_size": 2,
        "head_dim": 12,
        "short_conv_kernel_size": 3,
        "moe_shared_expert_intermediate_size": 28,
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
    "falcon_mamba": MAMBA | {"time_step_rank": 5},
    "gear": {
        "layer_types": ["conv_mixer", "full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
        "conv_L_cache": 3,
        "tie_word_embeddings": True,
    },
    "granitemoehybrid": SPLIT
    | EXPERTS
    | {
        "layer_types": ["mamba", "attention", "mamba"],
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.2,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "mamba_n_heads": 4,
        "mamba_d_head": 12,
        "mamba_proj_bias": False,
        "mamba_d_state": 6,
        "mamba_d_conv": 3,
        "mamba_n_groups": 2,
        "mamba_conv_bias": True,
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
    "kimi_k3": {"text_config": EXPERTS | LATENT | KDA},
    "kimi_linear": EXPERTS | LATENT | KDA | {"model_max_length": 512},
    "lfm2": CONVOLUTION,
    "lfm2-vl": {"text_config": CONVOLUTION | {"model_type": "lfm2"}},
    "lfm2_moe": CONVOLUTION | EXPERTS | {"use_expert_bias": True, "num_dense_layers": 1},
    "longcat_flash_ngram": LATENT
    | {
        "ffn_hidden_size": 56,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 24,
        "n_routed_experts": 5,
        "zero_expert_num": 2,
        "num_layers": 3,
        "routed_scaling_factor": 1.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "hidden_size": 48,
        "ngram_vocab_size_ratio": 3,
        "emb_neighbor_num": 3,
        "emb_split_num": 2,
    },
    "mamba": MAMBA | {"time_step_rank": 5},
    "mamba2": MAMBA
    | {
        "num_heads": 8,
        "head_dim": 10,
        "n_groups": 2,
        "time_step_limit": (0.0, 100.0),
        "time_step_rank": "auto",
    },
    "nemotron_h": EXPERTS
    | {
        "hybrid_override_pattern": ["M", "*", "E", "M", "-"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 12,
        "mamba_proj_bias": False,
        "ssm_state_size": 6,
        "conv_kernel": 3,
        "n_groups": 2,
        "use_conv_bias": True,
        "moe_shared_expert_intermediate_size": 28,
    },
    "olmo_hybrid": GATED_DELTA
    | SPLIT
    | {
        "linear_num_key_heads": 4,
        "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "plamo2": {
        "num_hidden_layers": 4,
        "hidden_size_per_head": 64,
        "mamba_d_state": 6,
        "mamba_d_conv": 3,
        "mamba_num_heads": 2,
        "mamba_step": 2,
    },
    "qwen3_5": GATED_DELTA | {"full_attention_interval": 2},
    "qwen3_5_moe": GATED_DELTA | EXPERTS | {"full_attention_interval": 2},
    "qwen3_next": GATED_DELTA | EXPERTS | {"full_attention_interval": 2},
    "recurrent_gemma": SPLIT
    | {
        "conv1d_width": 3,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
        "num_key_value_heads": 1,
    },
    "rwkv7": {
        "hidden_size": 48,
        "head_dim": 12,
        "a_low_rank_dim": 5,
        "v_low_rank_dim": 6,
        "gate_low_rank_dim": 7,
        "decay_low_rank_dim": 9,
    },
}
