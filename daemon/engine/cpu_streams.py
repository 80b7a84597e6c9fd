"""A second stream of a CPU for decode steps, where a trial on the loaded model shows that it pays.

The products of a decode step run on one core (`cpu_linear.py`), and so do its reads. Layers that are given
the same activations (q, k and v; gate and up) are shared out between two streams as they are; a layer that is
alone is multiplied by halves. Reads are split in `stateroom.kernels`.

What a second stream gains depends on what else the machine does, and on the model: the trial compares whole
steps, with few threads of BLAS and with many, and leaves everything as it was unless something is faster.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, product
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx import nn

from stateroom.caches.read_trial import second_pays
from stateroom.caches.session import Model, SessionCache
from stateroom.daemon.engine import cpu_linear
from stateroom.daemon.engine.blas_threads import BlasThreads
from stateroom.daemon.engine.cpu_linear import Share
from stateroom.daemon.engine.part_costs import blank
from stateroom.kernels import streams

if TYPE_CHECKING:
    from stateroom.daemon.engine.engine import Engine

WEIGHTS_LEAST = 1 << 18  # of a layer that is multiplied by halves: a megabyte, some 50 µs
EVEN = 0.5  # of the longer half at least: what can be shared out whole
TRIAL_S = 1.5
ROUNDS_MOST = 8
GAIN = 0.95  # of the time; less is not worth a core, nor running quanta by themselves

BOTH = (False, True)
ROWS, TOKENS = 4, 64  # of the larger step of a trial

Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Settled:
    """What a trial found."""

    products: bool  # of decode steps go to two streams
    reads: bool
    switched: bool  # BLAS's threads, between decode and prefill


def share_out(model: nn.Module, step: Step) -> None:
    """Gives the layers that `step` multiplies by their shares of two streams. It runs once."""
    with cpu_linear.recorded() as calls:
        step()
    for _, siblings in groupby(calls, key=lambda call: id(call[1])):
        layers = [layer for layer, _ in siblings]
        sizes = [layer["weight"].size for layer in layers]
        for layer, share in zip(layers, shares(sizes), strict=True):
            layer.share = share


def shares(sizes: Sequence[int]) -> list[Share]:
    """Of layers of so many weights that are given the same."""
    first = streams.even_half(sizes, EVEN)
    if first is not None:
        return [Share.FIRST if at in first else Share.SECOND for at in range(len(sizes))]
    return [Share.HALVES if size >= WEIGHTS_LEAST else Share.FIRST for size in sizes]


def use(products: mx.Stream | None, reads: mx.Stream | None) -> None:
    """From now on."""
    cpu_linear.use_second(products)
    streams.use_second(reads)


@contextmanager
def forced(products: mx.Stream | None, reads: mx.Stream | None) -> Iterator[None]:
    """Inside, whatever was settled. For tests."""
    before = cpu_linear.second(), streams.second()
    use(products, reads)
    try:
        yield
    finally:
        use(*before)


def settle(engine: Engine, report: Callable[[BaseException], str]) -> Settled:
    """Finds out what pays for an engine on a CPU, and leaves streams and BLAS's threads so.

    It takes some two seconds, or a step of each kind where that is longer.
    """
    steps = [engine.trial_step()]
    try:
        if engine.schemes.groupable:
            steps.append(_step_of_rows(engine.loaded.model, engine.schemes.dense.samples[0]))
        return compare(engine.loaded.model, steps, engine.blas)
    except Exception as error:  # such as no memory: as it is without a second stream
        report(error)
        use(None, None)
        if engine.blas is not None:
            engine.blas.few()
        return Settled(False, False, engine.blas is not None)


def _step_of_rows(model: Model, sample: SessionCache) -> Step:
    rows = SessionCache.merge_rows([blank(sample, TOKENS) for _ in range(ROWS)])
    tokens = mx.zeros((ROWS, 1), dtype=mx.uint32)
    return lambda: mx.eval(rows.forward(model, tokens), rows.arrays())


def compare(
    model: nn.Module,
    steps: Sequence[Step],
    blas: BlasThreads | None,
    *,
    cores: int | None = None,
    reads_pay: Callable[[mx.Stream], bool] = second_pays,
    clock_s: Callable[[], float] = time.perf_counter,
) -> Settled:
    """`settle` by these steps, whole and evaluated ones. `cores` that the process may use: None, as it is."""
    use(None, None)
    cores = _cores() if cores is None else cores
    second = mx.new_stream(mx.default_device()) if cores > 1 else None
    if second is not None:
        share_out(model, steps[0])
    took = _timed(steps, second, blas, clock_s)
    one, two = (min(took[pair, many] for many in BOTH) for pair in BOTH)
    pair = two < GAIN * one
    switched = blas is not None and took[pair, False] < GAIN * took[pair, True]
    if blas is not None:
        (blas.few if switched else blas.many)()
    reads = second is not None and reads_pay(second)
    use(second if pair else None, second if reads else None)
    return Settled(pair, reads, switched)


def _timed(
    steps: Sequence[Step], second: mx.Stream | None, blas: BlasThreads | None, clock_s: Callable[[], float]
) -> dict[tuple[bool, bool], float]:
    """Seconds of all steps, the least of each: by products on two streams or one, BLAS's threads many or few.

    Infinite is what there isn't.
    """
    least = {kind: [math.inf] * len(steps) for kind in product(BOTH, BOTH)}
    kinds = [
        (pair, many) for pair, many in least if not (pair and second is None) and not (many and blas is None)
    ]
    end_s = clock_s() + TRIAL_S
    for _ in range(ROUNDS_MOST if len(kinds) > 1 else 0):
        for pair, many in kinds:
            cpu_linear.use_second(second if pair else None)
            if blas is not None:
                (blas.many if many else blas.few)()
            for i, step in enumerate(steps):
                began_s = clock_s()
                step()
                least[pair, many][i] = min(least[pair, many][i], clock_s() - began_s)
        if clock_s() > end_s:
            break
    return {kind: sum(own) for kind, own in least.items()}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1
