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


def attend_span(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, window: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """One row's tokens and nothing else: queries [H, N, D] of its last N positions (fewer may be stored),
    keys [Hkv, S, D], values [Hkv, S, Dv] → output [H, N, Dv] and log-sum-exp [H, N]."""
    count, stored = queries.shape[1], keys.shape[1]
    seen = np.zeros((count, stored), bool)
    for query in range(count):
        end = max(0, stored - count + query + 1)
        seen[query, 0 if window is None else max(0, end - window) : end] = True
    return attend_seen(queries, keys, values, seen, scale)


def attend_seen(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, seen: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """One row, of whose columns query n sees those of `seen` [N, S]; shapes as above."""
    heads, count, _ = queries.shape
    repeats = heads // keys.shape[0]
    out = np.zeros((heads, count, values.shape[-1]), np.float64)
    lse = np.full((heads, count), -np.inf)
    for head in range(heads):
        for query in range(count):
            if not seen[query].any():
                continue
            seen_keys, seen_values = (
                x[head // repeats, seen[query]].astype(np.float64) for x in (keys, values)
            )
            scores = np.array(
                [scale * np.dot(queries[head, query].astype(np.float64), key) for key in seen_keys]
            )
            weights = np.exp(scores - scores.max())
            lse[head, query] = scores.max() + np.log(weights.sum())
            out[head, query] = (weights / weights.sum()) @ seen_values
    return out, lse


def unpacked(words: np.ndarray, scales: np.ndarray, biases: np.ndarray, group: int, bits: int) -> np.ndarray:
    """What affine planes stand for, in float64, from their bits: words [..., D x bits / 32]."""
    per_word = 32 // bits
    width = words.shape[-1] * per_word
    out = np.empty((*words.shape[:-1], width), np.float64)
    for field in range(width):
        level = words[..., field // per_word] >> np.uint32(bits * (field % per_word)) & np.uint32(2**bits - 1)
        at = field // group
        out[..., field] = scales[..., at].astype(np.float64) * level + biases[..., at].astype(np.float64)
    return out
