"""The seam between mlx-lm's models and our reads.

About a hundred of mlx-lm's models take attention through the name `scaled_dot_product_attention`, imported
from `models.base` into their own module. `install` replaces that name in the modules of a loaded model.
The replacement serves our layers and hands everything else to mlx-lm. A model that doesn't pass through the
name works as well: it calls mlx with the keys and values that `update_and_fetch` returned.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from stateroom.caches.layers.attention_layer import AttentionLayer
from stateroom.caches.layers.group_layer import GroupLayer

NAME = "scaled_dot_product_attention"
original = base.scaled_dot_product_attention


def scaled_dot_product_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's function of this name: queries [B, H, N, D], keys and values [B, Hkv, S, D] → [B, H, N, D]."""
    if isinstance(cache, AttentionLayer | GroupLayer):
        return cache.attend(queries, keys, values, scale, mask, sinks)
    attended: mx.array = original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    return attended


def install(model: Any) -> list[str]:
    """Puts our reads into the modules that `model` is made of; again is harmless.

    Returns the names of the modules that take attention through the seam.
    """
    names = sorted({kind.__module__ for part in model.modules() for kind in type(part).__mro__})
    through = []
    for name in names:
        module = sys.modules.get(name)
        if module is base or getattr(module, NAME, None) not in (original, scaled_dot_product_attention):
            continue
        setattr(module, NAME, scaled_dot_product_attention)
        through.append(name)
    return through
