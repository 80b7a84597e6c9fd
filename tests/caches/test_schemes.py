"""Sessions whose keys and values are quantised, from their first token or later: one defined point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from tests.caches.content import raw
from tests.caches.models import QUANTISABLE
from tests.caches.scripted import Scripted, feed
from tests.caches.sessions import Rows, assert_same, drawn, fresh_logits, model_of

from stateroom.caches.codecs.scheme import CannotQuantise, Scheme
from stateroom.caches.errors import CannotTrim, Mismatch
from stateroom.caches.session import SessionCache

NAMES: list[Any] = ["affine8", "affine4", "turbo"]
AFTER = 21


def scripted() -> Scripted:
    return Scripted(KVCache, lambda: RotatingKVCache(max_size=8, keep=2), lambda: ArraysCache(size=1))


def pieces_of(session: SessionCache, model: Any, tokens: Sequence[int], cuts: Sequence[int]) -> None:
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        if start < end:
            session.forward(model, mx.array([list(tokens[start:end])]))
            mx.eval(session.arrays())


def live(session: SessionCache) -> list[bytes]:
    """What the session's one row holds, of every layer."""
    row = session.extract_row(0)
    row.forget_unseen()
    return [raw(array) for store in row.stores for array in store.arrays()]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(
    length=st.sampled_from([AFTER - 1, AFTER, AFTER + 1, 50]),
    cuts=st.lists(st.integers(0, 50), max_size=4).map(sorted),
)
def test_the_point_of_conversion_is_one_whatever_the_pieces(name: Any, length: int, cuts: list[int]) -> None:
    """B40: the bytes of a session fed at once; of layers whose keys depend on the tokens alone."""
    model, scheme = scripted(), Scheme(name, quantise_after=AFTER)
    tokens = [7 * token % 101 for token in range(length)]
    whole, pieces = SessionCache.create(model, scheme), SessionCache.create(model, scheme)
    pieces_of(whole, model, tokens, [])
    pieces_of(pieces, model, tokens, [cut for cut in cuts if cut < length])
    assert whole.offsets == pieces.offsets == (length,)
    assert whole.quantised == pieces.quantised == (length > AFTER)
    assert live(whole) == live(pieces)
    if length > AFTER:  # each token as it would have been stored at once: keys don't depend on the others
        at_once = SessionCache.create(model, Scheme(name))
        pieces_of(at_once, model, tokens, [])
        assert live(whole) == live(at_once)


@pytest.mark.parametrize("architecture", QUANTISABLE)
@pytest.mark.parametrize("name", NAMES)
def test_pieces_that_end_at_the_point_give_the_same_bits(architecture: str, name: Any) -> None:
    """B40: of real models, 40 tokens in one request against two; and the logits of any pieces."""
    model, scheme = model_of(architecture), Scheme(name, quantise_after=AFTER)
    tokens = drawn(np.random.default_rng(8), 40)
    whole, two = SessionCache.create(model, scheme), SessionCache.create(model, scheme)
    at_once = np.array(whole.forward(model, mx.array([tokens]))[0])
    got = [np.array(two.forward(model, mx.array([part]))[0]) for part in (tokens[:AFTER], tokens[AFTER:])]
    assert (at_once == np.concatenate(got)).all()
    assert live(whole) == live(two)
    assert at_once.shape[0] == 40
    dense = fresh_logits(model, tokens)
    assert_same(at_once[:AFTER], dense[:AFTER])
    assert not np.allclose(at_once[AFTER:], dense[AFTER:], rtol=0, atol=1e-6)
    kinds = {kind.scheme for kind in whole.kinds() if kind.kind in ("full", "window", "chunked")}
    assert kinds == {name}


@pytest.mark.parametrize("name", NAMES)
def test_a_trim_to_before_the_point_is_refused(name: Any) -> None:
    """B40: what a session would store anew would be quantised now, and was dense then."""
    model, scheme = Scripted(KVCache), Scheme(name, quantise_after=AFTER)
    session = SessionCache.create(model, scheme)
    pieces_of(session, model, range(AFTER), [])
    session.trim(0, 5)
    assert session.trim_floor(0) == 0
    pieces_of(session, model, range(AFTER - 5, 30), [])
    assert session.trim_floor(0) == AFTER
    assert not session.can_trim(0, 30 - AFTER + 1)
    before = live(session)
    with pytest.raises(CannotTrim, match=f"within reach is {AFTER}"):
        session.trim(0, 30 - AFTER + 1)
    assert live(session) == before
    session.trim(0, 30 - AFTER)
    again = SessionCache.create(model, scheme)
    for each in (session, again):
        pieces_of(each, model, range(each.offsets[0], 40), [])
    assert live(session) == live(again)
    assert not session.trimmable


def test_rows_due_to_be_quantised_leave_their_group_first() -> None:
    model, scheme = scripted(), Scheme("affine8", quantise_after=AFTER)
    sessions = [SessionCache.create(model, scheme) for _ in range(2)]
    for session, n in zip(sessions, (AFTER - 2, 4), strict=True):
        pieces_of(session, model, range(n), [])
    group = SessionCache.merge_rows(sessions)
    assert group.tokens_left_dense == 2
    feed(model, group, [[1, 2], [3, 4]])
    assert group.tokens_left_dense == 0
    with pytest.raises(RuntimeError, match="must leave first"):
        feed(model, group, [[5], [6]])
    assert group.offsets == (AFTER, 6)
    alone = group.extract_row(0)
    group.filter_rows([1])
    feed(model, alone, [[5]])
    feed(model, group, [[6]])
    assert (alone.quantised, group.quantised) == (True, False)
    with pytest.raises(Mismatch):
        SessionCache.merge_rows([alone, group])


@pytest.mark.parametrize("keep", range(7))
def test_a_round_across_the_point_goes_back_to_either_side(keep: int) -> None:
    """Three tokens before it, three behind: what a session that was fed the same would hold."""
    model, scheme = (
        Scripted(KVCache, lambda: RotatingKVCache(max_size=8)),
        Scheme("affine4", quantise_after=AFTER),
    )
    session, fresh = SessionCache.create(model, scheme), SessionCache.create(model, scheme)
    tokens = list(range(AFTER + 3))
    pieces_of(session, model, tokens[: AFTER - 3], [])
    session.spec_round_begin()
    pieces_of(session, model, tokens[AFTER - 3 :], [2, 4])
    session.spec_round_rollback([keep])
    pieces_of(fresh, model, tokens[: AFTER - 3 + keep], [])
    assert session.quantised == fresh.quantised == (keep > 3)
    assert live(session) == live(fresh)
    for each in (session, fresh):
        pieces_of(each, model, range(each.offsets[0], 40), [])
    assert live(session) == live(fresh)


def test_conversion_holds_one_layer_twice() -> None:
    """B40: not all rows in both forms at once."""
    layers, model = 8, Scripted(*[KVCache] * 8)
    session = SessionCache.create(model, Scheme("affine8", quantise_after=4096))
    pieces_of(session, model, [1] * 2000, [500, 1000, 1500])
    model.noted = []
    mx.synchronize()
    dense = session.nbytes_capacity
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    session.quantise()
    quantised = session.nbytes_capacity
    # A layer's keys and values decoded and encoded, and what is on the way between.
    assert mx.get_peak_memory() - before < quantised + 4 * dense / layers


@pytest.mark.parametrize("name", NAMES)
def test_heads_that_do_not_fit_are_refused_at_creation(name: Any) -> None:
    """B38, B39: heads of width 10, before any token; windows are quantised like all others."""
    for architecture in ("llama", "gemma3_text"):
        with pytest.raises(CannotQuantise, match="width 10"):
            SessionCache.create(model_of(architecture), Scheme(name))
    session = SessionCache.create(model_of("gemma3_text_64"), Scheme(name))
    assert {(kind.kind, kind.scheme) for kind in session.kinds()} == {("full", name), ("window", name)}


@pytest.mark.parametrize("name", NAMES)
def test_mixed_schemes_are_never_merged(name: Any) -> None:
    """B38."""
    model = model_of("llama_64")
    others = [Scheme(), *(Scheme(other) for other in NAMES if other != name), Scheme(name, quantise_after=5)]
    if name != "turbo":
        others.append(Scheme(name, group_size=32))
    quantised = Rows.of(model, [[1, 2, 3]], Scheme(name)).cache
    for other in others:
        with pytest.raises(Mismatch):
            SessionCache.merge_rows([quantised, Rows.of(model, [[1, 2, 3]], other).cache])
