"""A second stream that is forced on. On any tests, for all products and for reads of any size:

python -m pytest -p tests.second_stream tests/caches tests/kernels tests/engine
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import mlx.core as mx
import pytest

from stateroom.daemon.engine import cpu_streams
from stateroom.daemon.engine.cpu_linear import PieceEmbedding, PieceLinear, Share
from stateroom.kernels import streams


@cache
def stream() -> mx.Stream:
    """Of the thread that runs the tests."""
    return mx.new_stream(mx.Device(mx.cpu))


@contextmanager
def everywhere() -> Iterator[None]:
    """Inside, every product and every read that can be split is."""
    with pytest.MonkeyPatch.context() as patch, cpu_streams.forced(stream(), stream()):
        patch.setattr(streams, "SCORES_LEAST", 1)
        patch.setattr(streams, "PARTS_LEAST", 1)
        for kind in (PieceLinear, PieceEmbedding):
            patch.setattr(kind, "share", Share.HALVES)
        yield


@pytest.fixture(autouse=True)
def second_stream() -> Iterator[None]:
    """Where this module is loaded as a plugin."""
    with everywhere():
        yield
