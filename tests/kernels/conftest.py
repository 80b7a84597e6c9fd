"""Where a definition is checked, mlx computes on the CPU: GPUs round products of float32 as they like."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest


@pytest.fixture
def computed_on_the_cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.Device(mx.cpu))
    try:
        yield
    finally:
        mx.set_default_device(before)
