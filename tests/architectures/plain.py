"""Full attention in every layer: what differs from the common configuration."""

from __future__ import annotations

from tests.architectures.bases import EXPERTS, LATENT, SPLIT, Config

PLAIN_MODELS: dict[str, Config] = {
    "llama": {},
    "qwen3": {},
    "qwen2": SPLIT,
    "phi3": SPLIT,
    "mistral": {},
    "gpt2": {"n_ctx": 128, "n_embd": 128, "n_head": 4, "n_layer": 3, "n_positions": 128},
    "deepseek_v3": LATENT | EXPERTS | {"rope_scaling": None},
    "minimax": EXPERTS | {"rotary_dim": 32},
    "gpt_bigcode": {"n_embd": 128, "n_layer": 3, "n_inner": 56, "n_head": 4, "n_positions": 128},
}
