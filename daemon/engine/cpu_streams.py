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
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx import nn

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
PRODUCTS_S, READS_S = 1.2, 0.5  # of a trial, and a round at least
ROUNDS_MOST = 8
GAIN = 0.95  # of the time; less is not worth a core, nor running quanta by themselves

BOTH = (False, True)
ROWS, TOKENS = 8, 1_024  # of the larger step of a trial

READS_GAIN = 0.97  # only large reads are split: where it gains little it loses nothing

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
    rows = SessionCache.merge_rows([blank(sample, TOKENS)] * ROWS)
    tokens = mx.zeros((ROWS, 1), dtype=mx.uint32)
    return lambda: mx.eval(rows.forward(model, tokens), rows.arrays())


def compare(
    model: nn.Module,
    steps: Sequence[Step],
    blas: BlasThreads | None,
    *,
    cores: int | None = None,
    clock_s: Callable[[], float] = time.perf_counter,
) -> Settled:
    """`settle` by these steps, whole and evaluated ones, the last of which reads most.

    cores: that the process may use; None, as it is.
    """
    use(None, None)
    second = mx.new_stream(mx.default_device()) if (_cores() if cores is None else cores) > 1 else None
    if second is not None:
        share_out(model, steps[0])
    kinds = [
        (pair, many)
        for pair in BOTH[: 1 if second is None else 2]
        for many in BOTH[: 1 if blas is None else 2]
    ]

    def turn(pair: bool, many: bool) -> None:
        use(second if pair else None, None)
        if blas is not None:
            (blas.many if many else blas.few)()

    took = _least_s([partial(turn, *kind) for kind in kinds], steps, PRODUCTS_S, clock_s)
    of = dict(zip(kinds, took, strict=True))
    one, two = (min((s for kind, s in of.items() if kind[0] is pair), default=math.inf) for pair in BOTH)
    pair = two < GAIN * one
    switched = blas is not None and of[pair, False] < GAIN * of[pair, True]
    turn(pair, not switched)
    products = second if pair else None
    reads = False
    if second is not None:
        whole, split = _least_s(
            [partial(use, products, None), partial(use, products, second)], steps[-1:], READS_S, clock_s
        )
        reads = split < READS_GAIN * whole
    use(products, second if reads else None)
    return Settled(pair, reads, switched)


def _least_s(
    turns: Sequence[Callable[[], None]], steps: Sequence[Step], bound_s: float, clock_s: Callable[[], float]
) -> list[float]:
    """What all steps take after each of these turns: of every step the least of some rounds."""
    least = [[math.inf] * len(steps) for _ in turns]
    end_s = clock_s() + bound_s
    for _ in range(ROUNDS_MOST if len(turns) > 1 else 0):
        for own, turn in zip(least, turns, strict=True):
            turn()
            for i, step in enumerate(steps):
                began_s = clock_s()
                step()
                own[i] = min(own[i], clock_s() - began_s)
        if clock_s() > end_s:
            break
    return [sum(own) for own in least]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1
