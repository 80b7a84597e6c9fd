"""Attention over packed rows as one kernel, split along tokens, its parts joined by a second.

Each packed key and value row is read once for up to QUERIES_MAX queries of its KV head (fewer where heads are
wide: the running sums live in registers), by a thread group that owns `block` tokens of one row.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from stateroom.kernels.join_segments.fused import Run, join_segments
from stateroom.kernels.join_segments.reference import Attended
from stateroom.kernels.planes import Affine, Plane, arrays
from stateroom.kernels.source import SIMD_WIDTH, Kernel, Launch, small_input
from stateroom.kernels.spans import Spans

WIDTHS = (64, 128, 256)
SIMDS = 8  # SIMD groups of a thread group: their sums take 8 KiB of shared memory at width 256
QUERIES_MAX = 16
REGISTERS_MAX = 64  # floats of a lane for queries, and again for sums
FOLDED_MAX = 64  # with more queries a KV head, products of matrices are the better read
NO_WINDOW = 1 << 30

HERE = Path(__file__).parent
BODY = (HERE / "fields.h").read_text() + (HERE / "body.h").read_text()


def supported(queries: mx.array, keys: Plane, values: Plane) -> bool:
    folded = queries.shape[1] // keys.shape[1] * queries.shape[2]
    return keys.shape[-1] in WIDTHS and values.shape[-1] in WIDTHS and folded <= FOLDED_MAX


def packed_attention(
    run: Run,
    queries: mx.array,
    keys: Plane,
    values: Plane,
    spans: Spans,
    scale: float,
    window: int | None = None,
    block: int = 512,
) -> Attended:
    """As the reference, for head widths 64, 128 and 256."""
    rows, heads, count, _ = queries.shape
    width = values.shape[-1]
    launch = blocks_launch(queries, keys, values, spans, scale, window, block)
    outputs, lse = run(launch)
    blocks = launch.groups[0]
    outputs = outputs.reshape(rows, heads, count, blocks, width)
    lse = lse.reshape(rows, heads, count, blocks)
    if blocks == 1:
        return Attended(outputs[..., 0, :].astype(queries.dtype), lse[..., 0])
    return join_segments(run, outputs, lse, queries.dtype)


def blocks_launch(
    queries: mx.array,
    keys: Plane,
    values: Plane,
    spans: Spans,
    scale: float,
    window: int | None,
    block: int,
) -> Launch:
    """Outputs [B, H x N, blocks, Dv] and lse [B, H x N, blocks], float32, of each block alone."""
    rows, heads, count, width = queries.shape
    _, kv_heads, capacity, value_width = values.shape
    folded = heads // kv_heads * count
    chunks = -(-folded // _queries_max(max(width, value_width)))
    blocks = max(1, -(-spans.length_max(count, window) // block))
    kernel = _kernel(isinstance(keys, Affine), isinstance(values, Affine)).with_constants(
        KEY_FIELDS=width // SIMD_WIDTH,
        VALUE_FIELDS=value_width // SIMD_WIDTH,
        **_packing("KEY", keys),
        **_packing("VALUE", values),
        FOLDED=folded,
        LENGTH=count,
        QUERIES=-(-folded // chunks),
        CHUNKS=chunks,
        SIMDS=SIMDS,
        SCALE=float(scale),
    )
    sizes = small_input([capacity, kv_heads, blocks, block, NO_WINDOW if window is None else window])
    return Launch(
        kernel,
        (queries, *arrays(keys), *arrays(values), spans.table, sizes),
        groups=(blocks, kv_heads * chunks, rows),
        threads=SIMDS * SIMD_WIDTH,
        shapes=((rows, heads * count, blocks, value_width), (rows, heads * count, blocks)),
        dtypes=(mx.float32, mx.float32),
    )


def _queries_max(width: int) -> int:
    return min(QUERIES_MAX, REGISTERS_MAX * SIMD_WIDTH // width)


def _kernel(affine_keys: bool, affine_values: bool) -> Kernel:
    keys = ("keys", *(("key_scales", "key_biases") if affine_keys else ()))
    values = ("values", *(("value_scales", "value_biases") if affine_values else ()))
    return Kernel("packed_attention", ("queries", *keys, *values, "spans", "sizes"), ("outputs", "lse"), BODY)


def _packing(name: str, plane: Plane) -> dict[str, int]:
    bits, group = (plane.bits, plane.group) if isinstance(plane, Affine) else (0, 0)
    return {f"{name}_BITS": bits, f"{name}_GROUP": group}
