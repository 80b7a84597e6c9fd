"""What the check of the kernels reads: shapes of every kind, and random planes for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from stateroom.kernels import dispatch
from stateroom.kernels.join_segments.reference import Attended
from stateroom.kernels.planes import Plane, arrays, like, quantised
from stateroom.kernels.spans import Spans

Packing = tuple[int, int] | None  # (bits, group), or dense


@dataclass(frozen=True)
class Case:
    """One read: heads on kv_heads, the last `count` tokens of rows that live in `spans` of `capacity`."""

    heads: int
    kv_heads: int
    width: int
    dtype: mx.Dtype
    packing: Packing
    spans: Spans
    capacity: int
    count: int = 1
    window: int | None = None

    def __str__(self) -> str:
        scheme = "dense" if self.packing is None else "{} bits/{}".format(*self.packing)
        kind = str(self.dtype).rsplit(".", maxsplit=1)[-1]
        shape = (
            f"{len(self.spans.starts)} x {max(self.spans.ends)} tokens, {self.heads}/{self.kv_heads} heads"
        )
        window = "" if self.window is None else f", window {self.window}"
        return f"{shape} of {self.width}, {kind}, {scheme}, queries {self.count}{window}"


def right_cases() -> Iterator[Case]:
    ragged = Spans.of([0, 7, 600, 3, 40], [701, 7, 601, 640, 43])
    packings: list[Packing] = [None, (8, 64), (4, 64), (4, 32)]
    for (heads, kv_heads, width), packing, count in itertools.product(
        [(10, 2, 64), (9, 3, 128), (4, 2, 256)], packings, [1, 4]
    ):
        yield Case(heads, kv_heads, width, mx.bfloat16, packing, ragged, 709, count)
    for dtype, window in itertools.product([mx.float32, mx.float16], [None, 131]):
        yield Case(14, 2, 128, dtype, None, ragged, 709, 3, window)
        yield Case(7, 1, 128, dtype, (4, 128), ragged, 709, 1, window)


def set_cases() -> Iterator[tuple[Case, bool]]:
    """What has a read of its own in `kv4_set`, and what it leaves to the others; with a mask or without."""
    alone, padded = Spans.of([0], [701]), Spans.of([0, 7], [701, 640])
    for spans, count in itertools.product([alone, padded], [1, 5]):
        case = Case(8, 4, 256, mx.bfloat16, (4, 64), spans, 709, count)
        yield case, False
        yield case, True


def speed_cases(tokens: int, dtype: mx.Dtype) -> Iterator[Case]:
    packings: list[Packing] = [None, (8, 64), (4, 64)]
    for (heads, kv_heads, width), packing, rows, count in itertools.product(
        [(9, 3, 64), (32, 8, 128), (8, 4, 256)], packings, [1, 8], [1, 4]
    ):
        length = tokens // rows
        yield Case(
            heads, kv_heads, width, dtype, packing, Spans.of([0] * rows, [length] * rows), length, count
        )


@dataclass(frozen=True)
class Drawn:
    queries: mx.array
    keys: Plane
    values: Plane


def drawn(case: Case, junk: bool) -> Drawn:
    """Random numbers; with `junk`, NaN in whatever no query may see."""
    rows = len(case.spans.starts)
    live = case.spans.live(case.capacity)[:, None, :, None]

    def plane() -> Plane:
        dense = (mx.random.normal((rows, case.kv_heads, case.capacity, case.width)) + 0.75).astype(case.dtype)
        made = dense if case.packing is None else quantised(dense, case.packing[1], case.packing[0])
        if not junk:
            return made
        return like(
            made,
            [
                part if part.dtype == mx.uint32 else mx.where(live, part, mx.array(mx.nan, part.dtype))
                for part in arrays(made)
            ],
        )

    queries = mx.random.normal((rows, case.heads, case.count, case.width)).astype(case.dtype)
    made = Drawn(queries, plane(), plane())
    mx.eval(queries, *arrays(made.keys), *arrays(made.values))
    return made


def read(case: Case, made: Drawn) -> Attended:
    return dispatch.packed_attention(
        made.queries, made.keys, made.values, case.spans, case.width**-0.5, case.window
    )
