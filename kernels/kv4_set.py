"""The reads of 4-bit keys and values in groups of 64, heads of 256: which of them serves which call.

One unpadded row whose KV heads serve an even number of query heads has reads of its own; everything else
takes the general read. Each is a read of `kernels.dispatch`, to the bit.
"""

from __future__ import annotations

from enum import Enum

import mlx.core as mx

from stateroom.kernels import dispatch
from stateroom.kernels.join_segments.reference import Attended
from stateroom.kernels.planes import Affine, Plane
from stateroom.kernels.spans import Spans

BITS, GROUP, WIDTH = 4, 64, 256


class Read(Enum):
    DECODE = "decode"  # one token: a kernel that reads each packed row once for all heads of its KV head
    WINDOW = "window"  # the last N tokens, causal: one quantised product a KV head, no mask
    MASKED_WINDOW = "masked window"  # quantised product, mask, softmax, quantised product
    MULTI_ROW = "multi-row"  # the general reads


def chosen(queries: mx.array, keys: Plane, values: Plane, spans: Spans, mask: mx.array | None = None) -> Read:
    """The read of queries [B, H, N, D] against keys and values [B, Hkv, S, D]."""
    rows, heads, count, _ = queries.shape
    alone = rows == 1 and spans.starts[0] == 0
    paired = heads // keys.shape[1] % 2 == 0
    if not (alone and paired and _is_of_the_set(keys) and _is_of_the_set(values)):
        return Read.MULTI_ROW
    if mask is not None:
        return Read.MASKED_WINDOW
    return Read.DECODE if count == 1 else Read.WINDOW


def attend(
    queries: mx.array,
    keys: Plane,
    values: Plane,
    spans: Spans,
    scale: float,
    mask: mx.array | None = None,
    clean: bool = False,
) -> Attended:
    """Each of a row's last N tokens against its span up to itself, or against the columns that `mask` shows.

    Shapes, `clean` and errors as in `dispatch.packed_attention` and `dispatch.masked_attention`.
    """
    if mask is not None:
        return dispatch.masked_attention(queries, keys, values, mask, scale, clean)
    if chosen(queries, keys, values, spans) is Read.WINDOW:
        return dispatch.window_attention(queries, keys, values, spans, scale, clean=clean)
    return dispatch.packed_attention(queries, keys, values, spans, scale, clean=clean)


def _is_of_the_set(plane: Plane) -> bool:
    return isinstance(plane, Affine) and (plane.bits, plane.group, plane.width) == (BITS, GROUP, WIDTH)
