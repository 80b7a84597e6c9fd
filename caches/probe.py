"""Whether a model can be trusted with several rows, found out by trying.

A model may take positions or masks from its caches in a way that holds for one row only; nothing in its
caches tells. Two short sequences show it: of very different lengths, so that padding would be most of what
the shorter one reads.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from stateroom.caches.session import SessionCache

PROMPTS = (tuple(range(1, 25)), (5, 2))
NEXT = (3, 7)
# Of the largest logit. Rounding of half precision and 4-bit products stays below; reading 22 columns of
# padding doesn't.
TOLERANCE = 0.1


def rows_agree(model: Any) -> bool:
    """Two rows of different lengths answer in a group as they do alone. Runs four short forwards."""
    alone = [SessionCache.create(model) for _ in PROMPTS]
    if not alone[0].batchable:
        return False
    for session, prompt in zip(alone, PROMPTS, strict=True):
        session.forward(model, mx.array([prompt]))
        mx.eval(session.arrays())
    group = SessionCache.merge_rows(alone)
    try:
        packed = group.forward(model, mx.array(NEXT)[:, None])[:, -1].astype(mx.float32)
        mx.eval(packed)
    except (TypeError, ValueError, IndexError):  # such as an array of positions where it wants a number
        return False
    for row, (session, token) in enumerate(zip(alone, NEXT, strict=True)):
        want = session.forward(model, mx.array([[token]]))[0, -1].astype(mx.float32)
        if not mx.abs(packed[row] - want).max() <= TOLERANCE * mx.abs(want).max():
            return False
    return True
