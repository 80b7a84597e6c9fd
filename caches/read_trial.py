"""Measures what `read_costs.py` computes with, on this machine: some dozen reads, a tenth of a second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache

import mlx.core as mx

from stateroom.caches import reads, shared_reads
from stateroom.caches.read_costs import ALWAYS, NEVER, ReadCosts
from stateroom.caches.rows import PackedRows

HEADS, KV_HEADS, WIDTH = 8, 2, 64
FEW, MANY = (2, 64), (8, 1_024)  # rows, tokens
ROUNDS = 12


@cache
def measured() -> ReadCosts:
    """Once a process; `shared_reads.use_costs` takes it."""
    before = shared_reads.costs()
    try:
        rows, tokens = MANY
        return ReadCosts.of(_lost_us(*FEW), _lost_us(rows, tokens), rows, tokens * KV_HEADS * WIDTH * 2 * 4)
    finally:
        shared_reads.use_costs(before)


def _lost_us(rows: int, tokens: int) -> float:
    """By how much a pass of its own takes longer than plain reads; less than 0 where it is shorter."""
    one = PackedRows.dense(1)
    _append(one, tokens)
    group = PackedRows.merge_rows([one.branch() for _ in range(rows)])
    _append(group, 1)
    queries = mx.ones((rows, HEADS, 1, WIDTH))
    group.begin(1)
    held = group.write(0, *_new(rows, 1))

    def read() -> None:
        mx.eval(reads.attend(group, 0, queries, *held, 0.1, group.mask(1)))

    best = [math.inf, math.inf]
    for _ in range(ROUNDS):
        for i, costs in enumerate((NEVER, ALWAYS)):
            shared_reads.use_costs(costs)
            best[i] = min(best[i], _us(read))
    return best[0] - best[1]


def _append(rows: PackedRows, tokens: int) -> None:
    rows.begin(tokens)
    rows.write(0, *_new(rows.layout.rows, tokens))
    rows.commit()
    mx.eval(rows.planes)


def _new(rows: int, tokens: int) -> tuple[mx.array, mx.array]:
    new = mx.ones((rows, KV_HEADS, tokens, WIDTH))
    return new, new


def _us(work: Callable[[], None]) -> float:
    begin = time.process_time()  # of the CPU: what else the machine does is not in it
    work()
    return (time.process_time() - begin) * 1e6
