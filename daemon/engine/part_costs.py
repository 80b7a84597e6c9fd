"""What it costs a step to have rows apart or together, measured with rows of zeros that belong to nobody."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from stateroom.caches.group import Group
from stateroom.caches.layout import Layout, capacity_for
from stateroom.caches.reach import Full
from stateroom.caches.rows import PackedRows
from stateroom.caches.session import Model, SessionCache
from stateroom.daemon.scheduler.packing import Costs

ROWS, TOKENS = 3, 512  # of each trial; a model of 128 kB a token holds 0.5 GB meanwhile
TRIAL_S = 2.0
ROUNDS_MOST = 8
NOISE = 0.03  # of a step: what is faster by less isn't


@dataclass(frozen=True, slots=True)
class Trial:
    """Milliseconds of a step of `ROWS` rows of `TOKENS` tokens, and of merging so many bytes."""

    apart: float
    together: float
    trunk_apart: float  # all tokens in one trunk
    trunk_together: float
    short: float  # apart, of one token
    merge: float
    merged_bytes: int

    def costs(self) -> Costs:
        """Differences within the noise are none."""
        part_ms = (self.apart - self.together) / (ROWS - 1)
        faster = self.apart - self.together > NOISE * self.apart
        column_ms = max(self.apart - self.short, 0.0) / (ROWS * (TOKENS - 1))
        # What reading in two pieces costs is paid by rows over a trunk either way.
        saved_ms = (self.trunk_apart - self.trunk_together) / (ROWS - 1) - part_ms
        return Costs(
            part_ms=part_ms if faster else min(part_ms, 0.0),
            column_ms=column_ms,
            beside_ms=max(column_ms - max(saved_ms, 0.0) / TOKENS, 0.0),
            byte_ms=self.merge / max(self.merged_bytes, 1),
        )


def measured(model: Model, sample: SessionCache, clock_s: Callable[[], float] = time.perf_counter) -> Costs:
    """`sample`: a row that has been fed; it stays as it is. Takes about `TRIAL_S`, and a round at least."""
    rows = [_blank(sample, TOKENS) for _ in range(ROWS)]
    began_s = clock_s()
    merged = SessionCache.merge_rows(rows)
    merge_ms = (clock_s() - began_s) * 1000.0
    parent = rows[0].fork()
    branches = [parent, *(parent.branch(shared_min=1) for _ in rows[1:])]
    over_trunk = SessionCache.merge_rows(branches)
    single = [_blank(sample, 1) for _ in rows]
    groups = [Group(parts) for parts in (rows, [merged], branches, [over_trunk], single)]
    tokens = mx.zeros((ROWS, 1), dtype=mx.uint32)
    least_ms = [math.inf] * len(groups)
    end_s = clock_s() + TRIAL_S
    for _ in range(ROUNDS_MOST):
        for i, group in enumerate(groups):
            began_s = clock_s()
            mx.eval(group.forward(model, tokens), group.arrays())
            least_ms[i] = min(least_ms[i], (clock_s() - began_s) * 1000.0)
        if clock_s() > end_s:
            break
    apart, together, trunk_apart, trunk_together, short = least_ms
    trial = Trial(apart, together, trunk_apart, trunk_together, short, merge_ms, merged.nbytes_live)
    return trial.costs()


def _blank(sample: SessionCache, tokens: int) -> SessionCache:
    """As many tokens of zeros, of the shapes of `sample`."""
    made = sample.holding([store.sharing() for store in sample.stores], (tokens,))
    for store in made.stores:
        if isinstance(store, PackedRows):
            held = tokens if isinstance(store.reach, Full) else min(tokens, store.reach.size)
            planes = [
                p
                if p is None
                else mx.zeros((1, p.shape[1], capacity_for(held + 1), p.shape[3]), dtype=p.dtype)
                for p in store.planes
            ]
            store.restore_state(planes, Layout((0,), (tokens,), (tokens - held,)))
    return made
