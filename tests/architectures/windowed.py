"""Sliding windows among full attention: what differs from the common configuration."""

from __future__ import annotations

from tests.architectures.bases import EXPERTS, WINDOW, WINDOWED, Config

WINDOWED_MODELS: dict[str, Config] = {
    "gemma3_text": {"sliding_window": WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64},
    "gemma4_text": WINDOWED
    | {
        "num_hidden_layers": 5,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
        "num_kv_shared_layers": 2,
        "global_head_dim": 128,
        "vocab_size_per_layer_input": 101,
        "hidden_size_per_layer_input": 12,
        "tie_word_embeddings": True,
    },
    "gpt_oss": WINDOWED | EXPERTS | {"hidden_size": 64, "intermediate_size": 64},
    "olmo3": WINDOWED,
}
