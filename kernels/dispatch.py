"""Which form of a kernel runs. One place decides; tests force either."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Literal

import mlx.core as mx

from stateroom.kernels.build import gpu_run
from stateroom.kernels.decode_attention import decode_attention as folded
from stateroom.kernels.host import host_run
from stateroom.kernels.join_segments import fused as fused_join
from stateroom.kernels.join_segments import reference as join_reference
from stateroom.kernels.join_segments.reference import Attended
from stateroom.kernels.packed_attention import fused as fused_packed
from stateroom.kernels.packed_attention import reference as packed_reference
from stateroom.kernels.planes import Plane
from stateroom.kernels.spans import Spans

# Products of mlx; one kernel on the GPU; and for tests that kernel, where it is of our own, on the host.
Form = Literal["folded", "fused", "host"]

_forced: Form | None = None


@contextmanager
def forced(form: Form) -> Iterator[None]:
    """Inside, every read takes this form. For tests; not for several threads at once."""
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
    if decode_form() != "fused":
        return folded(queries, keys, values, scale, mask)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def packed_attention(
    queries: mx.array, keys: Plane, values: Plane, spans: Spans, scale: float, window: int | None = None
) -> Attended:
    """A row's last N tokens against packed rows, without a mask; shapes as in `packed_attention.reference`.

    Planes are passed whole, spare capacity too: a slice would be copied first.
    """
    given = (queries, keys, values, spans, scale, window)
    form = decode_form()
    if form == "folded" or not fused_packed.supported(queries, keys, values):
        return packed_reference.packed_attention(*given)
    run = gpu_run if form == "fused" else host_run
    return fused_packed.packed_attention(run, *given, block=_decode_block())


def join_segments(outputs: mx.array, lse: mx.array) -> Attended:
    """outputs [B, H, N, segments, Dv] and lse [B, H, N, segments] of disjoint keys, joined; in float32."""
    form = decode_form()
    if form == "folded":
        return join_reference.join_segments(outputs, lse)
    return fused_join.join_segments(gpu_run if form == "fused" else host_run, outputs, lse.astype(mx.float32))


@lru_cache(maxsize=1)
def _decode_block() -> int:
    return decode_block(str(mx.device_info().get("device_name", "")))


def decode_block(device_name: str) -> int:
    """Tokens that a thread group reads. Chips of the M1 kind want more and smaller groups."""
    return 128 if device_name.startswith("Apple M1") else 512
