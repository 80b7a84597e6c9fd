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
from stateroom.kernels.packed_attention import folded as folded_packed
from stateroom.kernels.packed_attention import fused as fused_packed
from stateroom.kernels.packed_attention.folded import Products
from stateroom.kernels.planes import Plane
from stateroom.kernels.spans import Spans

# Products of mlx, for CPUs; the same with its quantised product; one kernel on the GPU; and for tests that
# kernel, where it is of our own, on the host.
Form = Literal["folded", "quantised", "fused", "host"]

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
    queries: mx.array,
    keys: Plane,
    values: Plane,
    spans: Spans,
    scale: float,
    window: int | None = None,
    clean: bool = False,
) -> Attended:
    """A row's last N tokens against packed rows, without a mask; shapes as in `packed_attention.reference`.

    Planes are passed whole, spare capacity too. `clean`: what values hold outside the spans is finite (a row
    whose spare columns are zeros, say), so that products need not silence it: half the time of a dense read
    of ragged rows on a CPU, a tenth of a quantised one, nothing where rows are level.
    Raises ValueError for spans that are not the planes'.
    """
    form = decode_form()
    if form in ("folded", "quantised") or not fused_packed.supported(queries, keys, values):
        return window_attention(queries, keys, values, spans, scale, window, clean)
    _check(queries, keys, spans)
    run = gpu_run if form == "fused" else host_run
    return fused_packed.packed_attention(
        run, queries, keys, values, spans, scale, window, block=_decode_block()
    )


def window_attention(
    queries: mx.array,
    keys: Plane,
    values: Plane,
    spans: Spans,
    scale: float,
    window: int | None = None,
    clean: bool = False,
) -> Attended:
    """The same in products, one a KV head for all its query heads and tokens; level rows need no mask."""
    _check(queries, keys, spans)
    products = _products(decode_form())
    return folded_packed.packed_attention(products, queries, keys, values, spans, scale, window, clean)


def span_attention(
    queries: mx.array, keys: Plane, values: Plane, spans: Spans, scale: float, clean: bool = False
) -> Attended:
    """Each of N queries [B, H, N, D] of a row against all of [start, end), whatever their own order.

    They are read as N times as many heads of one token each: either way a KV head's queries lie side by side.
    An empty span gives zeros and lse -inf.
    """
    rows, heads, count, width = queries.shape
    as_heads = queries.reshape(rows, heads * count, 1, width)
    output, lse = packed_attention(as_heads, keys, values, spans, scale, clean=clean)
    return Attended(output.reshape(rows, heads, count, -1), lse.reshape(rows, heads, count))


def masked_attention(
    queries: mx.array, keys: Plane, values: Plane, mask: mx.array, scale: float, clean: bool = False
) -> Attended:
    """Each query against the columns where `mask`, bool [B or 1, 1, N, S], is true; in products everywhere.

    Keys where the mask is false, and values where it is false for all queries of a row, may hold anything;
    with `clean` such values must be finite. Raises ValueError for a mask that is not boolean or does not fit.
    """
    rows, _, count, _ = queries.shape
    fits = mask.ndim == 4 and mask.shape[0] in (1, rows) and mask.shape[1:] == (1, count, keys.shape[2])
    if mask.dtype != mx.bool_ or not fits:
        wanted = f"{count} queries in {rows} rows of {keys.shape[2]} columns"
        raise ValueError(f"a mask {mask.shape} of {mask.dtype} for {wanted}")
    return folded_packed.masked_attention(_products(decode_form()), queries, keys, values, mask, scale, clean)


def join_segments(outputs: mx.array, lse: mx.array) -> Attended:
    """outputs [B, H, N, segments, Dv] and lse [B, H, N, segments] of disjoint keys, joined; in float32."""
    form = decode_form()
    if form in ("folded", "quantised"):
        return join_reference.join_segments(outputs, lse)
    return fused_join.join_segments(gpu_run if form == "fused" else host_run, outputs, lse.astype(mx.float32))


def _check(queries: mx.array, keys: Plane, spans: Spans) -> None:
    """A kernel would read past the planes."""
    if len(spans.starts) != queries.shape[0] or max(spans.ends) > keys.shape[2]:
        raise ValueError(f"{spans} in {queries.shape[0]} rows of {keys.shape[2]} columns")


def _products(form: Form) -> Products:
    return "folded" if form in ("folded", "host") else "quantised"


@lru_cache(maxsize=1)
def _decode_block() -> int:
    return decode_block(str(mx.device_info().get("device_name", "")))


def decode_block(device_name: str) -> int:
    """Tokens that a thread group reads. Chips of the M1 kind want more and smaller groups."""
    return 128 if device_name.startswith("Apple M1") else 512
