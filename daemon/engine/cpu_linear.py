"""Linear layers in the shape that OpenBLAS multiplies fastest when there are few rows.

OpenBLAS multiplies a small product directly and packs both operands of a larger one first; for a few rows
packing the weights costs more than the product. A product is small while rows × outputs is at most
about 1,200 and rows × outputs × inputs at most a million (interface/gemm.c, small matrix kernels). So the
weights are viewed as pieces of that size, with nothing copied, and multiplied as a batch. Measured on two
cores: a decode step of the 135M model takes 76 ms instead of 125, of four rows 108 instead of 127.

Such pieces run on one core. With a second stream (`cpu_streams.py`) some layers are multiplied there, others
by halves on both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache

import mlx.core as mx
from mlx import nn

ROWS_MOST = 8  # above, packing pays for itself
RESULT_MOST = 1_152  # rows × outputs of a piece
WORK_MOST = 1_000_000  # rows × outputs × inputs of a piece
PIECE_LEAST = 32  # outputs; smaller pieces cost more in calls than they save


class Share(Enum):
    """Where a layer's products are made when there is a second stream."""

    FIRST = "on the first stream"
    SECOND = "on the second stream"
    HALVES = "half of the outputs on either"


_second: mx.Stream | None = None
_calls: list[tuple[nn.Module, mx.array]] | None = None


def second() -> mx.Stream | None:
    """The stream that products may use now."""
    return _second


def use_second(stream: mx.Stream | None) -> None:
    """From now on products of few rows go by their layers' shares; None: they are not shared out."""
    global _second
    _second = stream


@contextmanager
def recorded() -> Iterator[list[tuple[nn.Module, mx.array]]]:
    """The layers that multiply meanwhile, and what each was given."""
    global _calls
    _calls = []
    try:
        yield _calls
    finally:
        _calls = None


@cache
def piece(rows: int, outputs: int, inputs: int) -> int:
    """The most outputs of a piece that divides all of them; 0 where pieces don't pay."""
    if rows > ROWS_MOST:
        return 0
    most = min(RESULT_MOST // rows, WORK_MOST // (rows * inputs), outputs)
    best = next((size for size in range(most, PIECE_LEAST - 1, -1) if outputs % size == 0), 0)
    return 0 if best == outputs else best


def multiply(x: mx.array, weight: mx.array, share: Share = Share.FIRST) -> mx.array:
    """x weightᵀ: [..., I] and [O, I] → [..., O]."""
    rows = x.size // weight.shape[1]
    if _second is None or share is Share.FIRST or rows > ROWS_MOST:
        return _product(x, weight, rows, None)
    if share is Share.HALVES:
        return _product(x, weight, rows, _second)
    with mx.stream(_second):
        return _product(x, weight, rows, None)


def _product(x: mx.array, weight: mx.array, rows: int, second: mx.Stream | None) -> mx.array:
    """`second`: the stream for half of it."""
    outputs, inputs = weight.shape
    size = piece(rows, outputs, inputs)
    if not size:
        right = weight.T
        return x @ right if second is None else _halves(x, right, -1, second)
    # [1, rows, I] @ [pieces, I, size] → [pieces, rows, size]
    left, right = x.reshape(1, rows, inputs), weight.reshape(-1, size, inputs).swapaxes(-1, -2)
    parts = left @ right if second is None else _halves(left, right, 0, second)
    return parts.swapaxes(0, 1).reshape(*x.shape[:-1], outputs)


def _halves(left: mx.array, right: mx.array, axis: int, second: mx.Stream) -> mx.array:
    """left @ right, half of the last axis or of the first one of `right` on either stream."""
    cut = right.shape[axis] // 2
    one, other = (right[:cut], right[cut:]) if axis == 0 else (right[:, :cut], right[:, cut:])
    with mx.stream(second):
        made = left @ other
    return mx.concatenate([left @ one, made], axis=axis)


class PieceLinear(nn.Linear):
    """`nn.Linear`, multiplied in pieces when there are few rows."""

    share = Share.FIRST

    def __call__(self, x: mx.array) -> mx.array:
        if _calls is not None:
            _calls.append((self, x))
        y = multiply(x, self["weight"], self.share)
        return y + self["bias"] if "bias" in self else y


class PieceEmbedding(nn.Embedding):
    """`nn.Embedding`, whose use as an output layer is multiplied in pieces."""

    share = Share.FIRST

    def as_linear(self, x: mx.array) -> mx.array:
        if _calls is not None:
            _calls.append((self, x))
        return multiply(x, self["weight"], self.share)


def use_pieces(model: nn.Module) -> int:
    """Makes a model's plain float32 layers multiply in pieces; gives how many. No parameter changes."""
    swapped = 0
    for module in model.modules():
        for plain, pieces in ((nn.Linear, PieceLinear), (nn.Embedding, PieceEmbedding)):
            if type(module) is plain and module["weight"].dtype == mx.float32:
                module.__class__ = pieces
                swapped += 1
    return swapped
