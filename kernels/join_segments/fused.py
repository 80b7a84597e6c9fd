"""The join as one kernel: a SIMD group reads a query's segments once and leaves the answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from stateroom.kernels.join_segments.reference import Attended
from stateroom.kernels.source import SIMD_WIDTH, TYPE_MACROS, Kernel, Launch, small_input

Run = Callable[[Launch], list[mx.array]]

KERNEL = Kernel(
    "join_segments",
    ("outputs", "lse", "sizes"),
    ("joined", "joined_lse"),
    (Path(__file__).parent / "body.h").read_text(),
)


def join_segments(run: Run, outputs: mx.array, lse: mx.array, dtype: mx.Dtype = mx.float32) -> Attended:
    """As the reference, the output in `dtype`; lse must be float32."""
    *lead, segments, width = outputs.shape
    launch = Launch(
        KERNEL.with_constants(WIDTH=width, OUT=TYPE_MACROS[dtype]),
        (outputs, lse, small_input([segments])),
        groups=(math.prod(lead), 1, 1),
        threads=SIMD_WIDTH,
        shapes=((*lead, width), tuple(lead)),
        dtypes=(dtype, mx.float32),
    )
    return Attended(*run(launch))
