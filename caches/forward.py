"""What all layers of one forward share."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import mlx.core as mx

from stateroom.caches.layout import Layout
from stateroom.caches.masks import Mask
from stateroom.caches.planes import Plane
from stateroom.caches.reach import Reach
from stateroom.caches.trunk import Level
from stateroom.kernels.spans import Spans

Fetched = tuple[mx.array, mx.array]  # keys and values


@dataclass(slots=True)
class Forward:
    """From `begin` to `commit` or `rollback`."""

    tokens: int
    layout: Layout  # before the append, after forgetting
    cut: int  # columns forgotten at the front
    first: int  # the first column that is read
    capacity: int
    position: int | mx.array  # of the first new token, for RoPE
    start: mx.array  # the column where all rows write, or [B, 1, n, 1] columns when ends differ
    scatter: bool
    width: int  # columns in use after the append
    before: tuple[list[Plane], Layout]
    masks: dict[tuple[int, Reach, bool], Mask] = field(default_factory=dict)
    overlays: dict[Hashable, mx.array] = field(default_factory=dict)  # masks of the named reads
    spans: dict[Reach | None, Spans] = field(default_factory=dict)
    levels: list[Level] | None = None  # the trunks that rows read, made by the first layer that does
    fetched: dict[int, Fetched] = field(default_factory=dict)  # layer → what its model was given
