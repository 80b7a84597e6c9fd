"""Which form of a kernel runs. One place decides; tests force either."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import mlx.core as mx

from stateroom.kernels.decode_attention import decode_attention as folded

Form = Literal["folded", "fused"]

_forced: Form | None = None


@contextmanager
def forced(form: Form) -> Iterator[None]:
    """Inside, every decode read takes this form. For tests; not for several threads at once."""
    global _forced
    before, _forced = _forced, form
    try:
        yield
    finally:
        _forced = before


def decode_form() -> Form:
    """On a CPU mlx's fused read is a slower composition of the same products; on a GPU it is one kernel."""
    if _forced is not None:
        return _forced
    return "folded" if mx.default_device().type == mx.DeviceType.cpu else "fused"


def decode_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None = None
) -> mx.array:
    """One query per row against its keys and values; shapes as in `kernels.decode_attention`."""
    if decode_form() == "folded":
        return folded(queries, keys, values, scale, mask)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
