"""Full attention in every layer: what differs from the common configuration."""

from __future__ import annotations

from tests.architectures.bases import EXPERTS, LATENT, SCALED_QUERIES, SPLIT, VOCAB, Config

GPT: Config = {"n_embd": 128, "n_head": 2, "n_layer": 3, "n_inner": 56, "n_positions": 128, "n_ctx": 128}
MULTIPLIERS: Config = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.125,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
}

PLAIN_MODELS: dict[str, Config] = {
    "Klear": SPLIT | EXPERTS | {"attention_bias": True},
    "apertus": SPLIT | {"post_norm": False, "qk_norm": True},
    "bailing_moe": SPLIT | EXPERTS | {"topk_group": 1, "use_qk_norm": True},
    "cohere": SPLIT | {"logit_scale": 1.0, "use_qk_norm": True},
    "dbrx": {
        "d_model": 128,
        "n_layers": 3,
        "n_heads": 2,
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 56, "moe_num_experts": 5, "moe_top_k": 2},
    },
    "deepseek": SPLIT | EXPERTS,
    "dots1": EXPERTS | {"scoring_func": "noaux_tc"},
    "ernie4_5": {},
    "ernie4_5_moe": EXPERTS | {"moe_num_experts": 5, "moe_k": 2, "moe_num_shared_experts": 1},
    "exaone": SPLIT | {"num_layers": 3},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 64},
    "glm": {},
    "glm4": {},
    "glm4_moe": EXPERTS | {"rope_scaling": None, "use_qk_norm": True},
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": SPLIT | {"rotary_emb_base": 10000, "rotary_pct": 0.5, "num_key_value_heads": 2},
    "gptj": GPT | {"rotary_dim": 16},
    "granite": SPLIT | MULTIPLIERS,
    "granitemoe": SPLIT | EXPERTS | MULTIPLIERS,
    "helium": SPLIT,
    "hunyuan": SPLIT
    | EXPERTS
    | {
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "num_hidden_layers": 4,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "hunyuan_v1_dense": {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}},
    "internlm2": SPLIT,
    "internlm3": SPLIT,
    "lille-130m": GPT | {"block_size": 128, "n_kv_heads": 1},
    "llama": {},
    "llama4_text": EXPERTS | {"intermediate_size_mlp": 56, "no_rope_layers": [1, 1, 0], "use_qk_norm": True},
    "mimo": SPLIT,
    "minicpm": SPLIT | {"dim_model_base": 128, "scale_depth": 1.4, "scale_emb": 1.0},
    "minimax": EXPERTS | {"rotary_dim": 32},
    "mistral": {},
    "mistral3": {"text_config": {"model_type": "mistral"}},
    "mixtral": SPLIT | EXPERTS,
    "nanochat": SPLIT,
    "nemotron": {"hidden_act": "relu2"},
    "olmo2": {},
    "olmoe": EXPERTS,
    "openelm": {
        "num_transformer_layers": 3,
        "model_dim": 40,
        "ffn_dim_divisor": 8,
        "num_query_heads": [4, 4, 6],
        "num_kv_heads": [2, 2, 3],
        "ffn_multipliers": [1.0, 1.5, 2.0],
    },
    "phi": SPLIT,
    "phi3": SPLIT,
    "phi3small": SPLIT
    | {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 56,
        "gegelu_limit": 20.0,
        "mup_embedding_multiplier": 1.0,
        "mup_width_multiplier": 1.0,
    },
    "phimoe": SPLIT | EXPERTS,
    "phixtral": {"num_vocab": VOCAB, "model_dim": 128, "num_heads": 2, "num_layers": 3, "rotary_dim": 16},
    "pixtral": {"text_config": {"model_type": "llama"}},
    "plamo": SPLIT | {"n_shared_head": 2},
    "qwen": SPLIT | {"kv_channels": 64, "num_key_value_heads": 2, "intermediate_size": 112},
    "qwen2": SPLIT,
    "qwen2_moe": SPLIT | EXPERTS,
    "qwen2_vl": {"text_config": SPLIT | {"model_type": "qwen2"}},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen3_vl": {"text_config": {"model_type": "qwen3"}},
    "qwen3_vl_moe": {"text_config": EXPERTS | {"model_type": "qwen3_moe"}},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "solar_open": EXPERTS,
    "stablelm": SPLIT | {"use_qkv_bias": True},
    "starcoder2": SPLIT | {"norm_epsilon": 1e-5},
    "talkie": {},
    "telechat3": {},
    # One cache for each pass through each layer.
    "nanbeige": {"num_loops": 2},
    # The last layers read the keys and values of the last one that has its own.
    "afm7": {
        "hidden_dim": 128,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "hidden_dim_scale_factor": 0.5,
    },
    # The second layer has no attention.
    "nemotron-nas": SPLIT
    | {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 1}, "ffn": {"no_op": True}},
        ]
    },
    # Latent attention.
    "deepseek_v2": LATENT
    | EXPERTS
    | {"rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 64}, "topk_method": "greedy"},
    "deepseek_v3": LATENT | EXPERTS,
    "glm4_moe_lite": LATENT | EXPERTS,
    "kimi_k25": {"text_config": LATENT | EXPERTS},
    "kimi_vl": {"text_config": LATENT | EXPERTS},
    "minicpm3": SPLIT
    | LATENT
    | {
        "dim_model_base": 40,
        "scale_depth": 1.4,
        "scale_emb": 1.0,
        "rope_scaling": {"short_factor": [1.0] * 32, "long_factor": [1.5] * 32},
    },
    "mistral4": LATENT | EXPERTS | SCALED_QUERIES | {"head_dim": None},
    "youtu_llm": LATENT,
    # Latent attention twice a layer, or beside the keys of an index of which tokens to read.
    "longcat_flash": LATENT
    | {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "ffn_hidden_size": 56,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 24,
        "n_routed_experts": 5,
        "zero_expert_num": 2,
        "num_layers": 3,
        "routed_scaling_factor": 1.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "deepseek_v32": LATENT | EXPERTS | {"index_head_dim": 64, "index_n_heads": 3, "index_topk": 8},
    "glm_moe_dsa": LATENT
    | EXPERTS
    | {
        "index_head_dim": 64,
        "index_n_heads": 3,
        "index_topk": 8,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "minimax_m3_vl": {
        "text_config": EXPERTS
        | {
            "dense_intermediate_size": 56,
            "moe_layer_freq": [0, 1, 1],
            "layer_types": ["full_attention", "sparse_attention", "sparse_attention"],
            "index_n_heads": 2,
            "index_head_dim": 64,
            "index_block_size": 4,
            "index_topk_blocks": 3,
        }
    },
}
