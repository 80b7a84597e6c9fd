"""Attention by the plainest loop, in float64."""

from __future__ import annotations

import numpy as np


def attend(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    """One row: queries [H, N, D] of the last N positions, keys [Hkv, S, D], values [Hkv, S, Dv]."""
    heads, count, _ = queries.shape
    kv_heads, stored, _ = keys.shape
    out = np.zeros((heads, count, values.shape[-1]), np.float64)
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        for query in range(count):
            seen = stored - count + query + 1
            scores = np.array(
                [
                    scale
                    * np.dot(queries[head, query].astype(np.float64), keys[kv_head, k].astype(np.float64))
                    for k in range(seen)
                ]
            )
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[head, query] = weights @ values[kv_head, :seen].astype(np.float64)
    return out
