"""Sliding windows or chunks among full attention: what differs from the common configuration."""

from __future__ import annotations

from tests.architectures.bases import EXPERTS, SCALED_QUERIES, SPLIT, VOCAB, WINDOW, WINDOWED, Config

PATTERN: Config = {"sliding_window": WINDOW, "sliding_window_pattern": 2}
ROPES: Config = {
    "rope_parameters": {
        "full_attention": {"rope_theta": 20000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }
}
GEMMA3: Config = PATTERN | {"query_pre_attn_scalar": 64}
# The last two layers read the keys and values of the last layer of their kind that has its own.
GEMMA4: Config = {
    "num_hidden_layers": 5,
    "sliding_window": WINDOW,
    "layer_types": [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
    "num_kv_shared_layers": 2,
    "global_head_dim": 128,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 12,
    "tie_word_embeddings": True,
}

WINDOWED_MODELS: dict[str, Config] = {
    "afmoe": WINDOWED | EXPERTS | {"num_dense_layers": 1},
    "cohere2": SPLIT | PATTERN | {"head_dim": 64, "logit_scale": 1.0},
    # Its own cache class: windows, and latents of closed groups of tokens.
    "deepseek_v41": {
        "sliding_window": WINDOW,
        "num_hidden_layers": 3,
        "head_dim": 32,
        "q_lora_rank": 28,
        "qk_rope_head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 12,
        "moe_intermediate_size": 24,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "compress_ratios": [1, 4, 4],
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 8,
    },
    "exaone4": {"sliding_window": WINDOW, "sliding_window_pattern": "LG", "rope_scaling": None},
    "exaone_moe": WINDOWED | EXPERTS | {"is_moe_layer": [False, True, True]},
    "gemma3": {"text_config": GEMMA3 | {"model_type": "gemma3_text"}},
    "gemma3_text": GEMMA3,
    "gemma3n": {
        "text_config": GEMMA4
        | {
            "model_type": "gemma3n_text",
            "final_logit_softcapping": 30.0,
            "rope_local_base_freq": 10000.0,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0],
            "altup_num_inputs": 3,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 6,
        }
    },
    "gemma4": {"text_config": GEMMA4 | {"model_type": "gemma4_text"}},
    "gemma4_text": GEMMA4,
    "gpt_oss": WINDOWED | EXPERTS | {"hidden_size": 64, "intermediate_size": 64},
    # Each layer twice: in full, then a gated mix of that read and a window's.
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": WINDOW},
    "laguna": WINDOWED | EXPERTS | ROPES | {"num_attention_heads_per_layer": [4, 6, 2]},
    # Chunks: a token sees those of its own chunk.
    "llama4": {
        "text_config": EXPERTS
        | {
            "model_type": "llama4_text",
            "num_hidden_layers": 5,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 56,
            "rope_scaling": None,
            "use_qk_norm": True,
            "num_experts_per_tok": 1,
        }
    },
    "mellum": WINDOWED | EXPERTS | ROPES,
    "mimo_v2_flash": EXPERTS
    | {
        "hybrid_layer_pattern": [1, 0, 1],
        "moe_layer_freq": [0, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 20000.0,
        "swa_num_attention_heads": 6,
        "swa_num_key_value_heads": 3,
        "v_head_dim": 64,
        "swa_head_dim": 128,
        "swa_v_head_dim": 64,
    },
    "ministral3": WINDOWED | SCALED_QUERIES,
    "muse_glimmer": WINDOWED | {"output_multiplier": 1.0},
    "olmo3": WINDOWED,
    "plamo3": PATTERN,
    "spark2_5": WINDOWED | ROPES,
    "step3p5": WINDOWED
    | {
        "num_attention_groups": 2,
        "moe_num_experts": 5,
        "moe_top_k": 2,
        "moe_intermediate_size": 24,
        "share_expert_dim": 28,
        "moe_layers_enum": "1,2",
        "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 3},
    },
}
