"""A second stream of a CPU for reads, beside the one that everything runs on.

mlx's streams on a CPU are threads, and belong to the thread that made them: whoever runs the model makes one
and lends it here, where it pays. Only what is read goes there; planes are written by the first stream alone.
mlx waits where one stream needs what another makes, which costs 10 to 15 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import mlx.core as mx

SCORES_LEAST = 1 << 16  # of a read; halves of a smaller one cost what they save
PARTS_LEAST = 1 << 14  # of several reads that part by themselves
TOKENS_MOST = 8  # a row; a prompt's products have the second core already

Made = TypeVar("Made")

_second: mx.Stream | None = None


def second() -> mx.Stream | None:
    """The stream that reads may use now."""
    return _second


def use_second(stream: mx.Stream | None) -> None:
    """From now on reads are split with this stream; None: they are not."""
    global _second
    _second = stream


@contextmanager
def using(stream: mx.Stream | None) -> Iterator[None]:
    """Inside, reads are split with this stream, or not."""
    before = _second
    use_second(stream)
    try:
        yield
    finally:
        use_second(before)


def splits(scores: int, tokens: int) -> bool:
    """Whether a read of so many scores, of so many tokens a row, is worth two streams."""
    return _second is not None and scores >= SCORES_LEAST and tokens <= TOKENS_MOST


def parts(scores: int, tokens: int) -> bool:
    """The same of several reads, some of which can go to the second stream whole."""
    return _second is not None and scores >= PARTS_LEAST and tokens <= TOKENS_MOST


def side_by_side(one: Callable[[], Made], other: Callable[[], Made]) -> tuple[Made, Made]:
    """What both make, the other on the second stream if there is one. Inside them nothing is split again."""
    stream = _second
    if stream is None:
        return one(), other()
    with using(None):
        with mx.stream(stream):
            made = other()
        return one(), made


def even_half(sizes: Sequence[int], even: float) -> list[int] | None:
    """Which of these come to about half of all, from the largest on.

    None where one half is less than `even` of the other.
    """
    half: list[int] = []
    held = other = 0
    for at in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if held <= other:
            half.append(at)
            held += sizes[at]
        else:
            other += sizes[at]
    return half if min(held, other) >= even * max(held, other) else None
