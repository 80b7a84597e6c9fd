"""Failures at the n-th mlx operation that the cache library calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

ROOT = Path(__file__).resolve().parent.parent.parent / "caches"
NAMES = sorted(
    name
    for name in set(
        re.findall(r"\bmx\.([a-z_]+)\(", "".join(path.read_text() for path in ROOT.rglob("*.py")))
    )
    if callable(getattr(mx, name)) and not isinstance(getattr(mx, name), type)
)


class Injected(MemoryError):
    pass


@contextmanager
def failing_at(n: int) -> Iterator[None]:
    """Inside, the n-th call, from 0 on, of any function of mlx that the library names raises `Injected`."""
    left = n

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                raise Injected(function.__name__)
            return function(*args, **kwargs)

        return call

    own = {name: getattr(mx, name) for name in NAMES}
    for name, function in own.items():
        setattr(mx, name, failing(function))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(mx, name, function)


def failures(work: Callable[[], object], after_each: Callable[[], object]) -> int:
    """Lets `work` fail at its first operation, at its second, … until it ends; how often it failed.

    What one failure left must be good enough for the next attempt; `after_each` looks at it.
    """
    n = 0
    while True:
        try:
            with failing_at(n):
                work()
            return n
        except Injected:
            pass
        after_each()
        n += 1
