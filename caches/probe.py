"""Whether a model can be trusted with several rows, found out by trying.

A model may take positions or masks from its caches in a way that holds for one row only; nothing in its
caches tells. Two short sequences show it: of very different lengths, so that padding would be most of what
the shorter one reads. What only long ones would show is listed by name.
"""

from __future__ import annotations

import math
from typing import Any, cast

import mlx.core as mx

from stateroom.caches.codecs.codec import Codec
from stateroom.caches.group import Group
from stateroom.caches.session import SessionCache

PROMPTS = (tuple(range(1, 25)), (5, 2))
NEXT = (3, 7)
# Of the largest logit. Rounding of half precision and 4-bit products stays below; reading 22 columns of
# padding doesn't.
TOLERANCE = 0.1
ROUNDINGS, PADDING_MIN = 4.0, 0.01  # what right padding may come to: few roundings, or nothing to speak of
STEPS = 2  # tokens that are compared
# Modules of mlx-lm that choose blocks of columns to attend to: padding moves a row's tokens to other blocks.
BY_BLOCKS = frozenset({"minimax_m3_vl"})


def pieces_agree(model: Any) -> bool:
    """A prompt fed whole gives what it gives in pieces. Else nothing that a cache does can be right."""
    whole, pieces = SessionCache.create(model), SessionCache.create(model)
    prompt = mx.array([PROMPTS[0]])
    want = whole.forward(model, prompt).astype(mx.float32)
    cuts = ((0, 9), (9, 10), (10, len(PROMPTS[0])))
    got = mx.concatenate([pieces.forward(model, prompt[:, start:end]) for start, end in cuts], axis=1)
    # At every place: what sees the tokens behind it may well agree at the last.
    return _apart(got.astype(mx.float32), want) <= TOLERANCE


def rows_agree(model: Any) -> bool:
    """Two rows of different lengths answer in a group as they do alone. Runs four short forwards."""
    alone = _alone(model)
    if alone is None:
        return False
    off = _off(model, SessionCache.merge_rows(alone), alone)
    return off is not None and off <= TOLERANCE


def groups_agree(model: Any) -> bool:
    """Two sessions answer in one pass as they do alone, each stored apart; in a step and in a piece."""
    alone = [SessionCache.create(model) for _ in PROMPTS]
    for session, prompt in zip(alone, PROMPTS, strict=True):
        session.forward(model, mx.array([prompt]))
        mx.eval(session.arrays())
    group = Group([session.fork() for session in alone])
    for tokens in ([[token] for token in NEXT], [PROMPTS[0][:3], PROMPTS[0][3:6]]):
        try:
            together = group.forward(model, mx.array(tokens)).astype(mx.float32)
            mx.eval(together)
        except (TypeError, ValueError, IndexError):  # of positions, as in `_off`
            return False
        for got, session, fed in zip(together, alone, tokens, strict=True):
            want = session.forward(model, mx.array([fed]))[0].astype(mx.float32)
            if not group.apart or _apart(got, want) > PADDING_MIN:
                return False
    return True


def prompts_agree(model: Any) -> bool:
    """And so do two that were prefilled together, the shorter one padded at its right."""
    alone = _alone(model)
    if alone is None:
        return False
    lengths = [len(prompt) for prompt in PROMPTS]
    padded = [[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in PROMPTS]
    group = SessionCache.merge_rows([SessionCache.create(model) for _ in PROMPTS])
    try:
        group.prepare_prefill(lengths, probed=True)
        group.forward(model, mx.array(padded))
        group.finalize_prefill()
    except (TypeError, ValueError, IndexError):
        return False
    # What another order of the same sums comes to, in this model's precision, is forgiven.
    rounding = _off(model, SessionCache.merge_rows(alone), [session.fork() for session in alone])
    off = _off(model, group, alone)
    if off is None or rounding is None:
        return False
    return off <= min(max(ROUNDINGS * rounding, PADDING_MIN), TOLERANCE)


def _alone(model: Any) -> list[SessionCache] | None:
    """A session for each prompt; None when rows of this model never share a group."""
    sessions = [SessionCache.create(model) for _ in PROMPTS]
    if not sessions[0].batchable or type(model).__module__.rsplit(".", 1)[-1] in BY_BLOCKS:
        return None
    for session, prompt in zip(sessions, PROMPTS, strict=True):
        session.forward(model, mx.array([prompt]))
        mx.eval(session.arrays())
    return sessions


def _off(model: Any, group: SessionCache, alone: list[SessionCache]) -> float | None:
    """How far the next tokens' logits of any row are from those of the session alone; None if it can't."""
    worst = 0.0
    for shift in range(STEPS):
        tokens = [token + shift for token in NEXT[: len(alone)]]
        try:
            packed = group.forward(model, mx.array(tokens)[:, None])[:, -1].astype(mx.float32)
            mx.eval(packed)
        except (TypeError, ValueError, IndexError):  # such as an array of positions where it wants a number
            return None
        for row, (session, token) in enumerate(zip(alone, tokens, strict=True)):
            want = session.forward(model, mx.array([[token]]))[0, -1].astype(mx.float32)
            worst = max(worst, _apart(packed[row], want))
    return worst


def _apart(got: mx.array, want: mx.array) -> float:
    """Of the largest logit; infinite where they aren't numbers."""
    apart = cast("float", (mx.abs(got - want).max() / mx.abs(want).max()).item())
    return apart if math.isfinite(apart) else math.inf


def slices_decode(codec: Codec, width: int) -> bool:
    """A slice of packed planes decodes as a copy of it does; on Metal, mlx 0.32.1 was off by hundreds."""
    capacity, live = 256, 16
    planes = codec.encode(mx.random.normal((1, 2, capacity, width), key=mx.random.key(0)))
    mx.eval(planes)
    # The first tokens, and some from the middle.
    for first in (0, live):
        slices = [plane[:, :, first : first + live] for plane in planes]
        got = codec.decode(slices).astype(mx.float32)
        want = codec.decode([mx.contiguous(piece) for piece in slices]).astype(mx.float32)
        if not mx.abs(got - want).max() <= 1e-3 * mx.abs(want).max():
            return False
    return True


def branches_agree(model: Any) -> bool:
    """A session that has its tokens in a trunk answers as without: all reads of the model are ours."""
    whole = SessionCache.create(model)
    whole.forward(model, mx.array([PROMPTS[0]]))
    parent = whole.fork()
    child = parent.branch(shared_min=1)
    for tokens in (NEXT[:1], PROMPTS[0][:3]):
        want = whole.fork().forward(model, mx.array([tokens]))[0, -1].astype(mx.float32)
        for session in (parent, child):
            shared = session.fork()
            got = shared.forward(model, mx.array([tokens]))[0, -1].astype(mx.float32)
            fell_back = bool(session.trunks) and not shared.trunks
            if fell_back or _apart(got, want) > PADDING_MIN:
                return False
    return True
