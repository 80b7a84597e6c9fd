"""Rows that share a pass and are stored apart: each answers as it does alone, and joins for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache
from tests.caches.reading import ALL, FULL, MERGEABLE, VOCAB, Reading, fed
from tests.caches.scripted import Scripted
from tests.caches.scripted import fed as scripted

from stateroom.caches.attention import original
from stateroom.caches.codecs.scheme import Scheme
from stateroom.caches.errors import CannotTrim, Mismatch
from stateroom.caches.group import Group
from stateroom.caches.layers.group_layer import GroupLayer
from stateroom.caches.session import SessionCache

RELATIVE = 1e-4  # of the largest logit, float32
SCHEMES = [None, Scheme("affine8"), Scheme("affine4"), Scheme("turbo"), Scheme("affine8", quantise_after=12)]


def drawn(random: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(random.integers(0, VOCAB, shape))


def tokens(random: np.random.Generator, n: int) -> list[int]:
    return [int(token) for token in random.integers(0, VOCAB, n)]


def same(got: mx.array, want: mx.array) -> bool:
    got, want = np.array(got), np.array(want)
    return bool(np.isfinite(got).all() and np.abs(got - want).max() <= RELATIVE * np.abs(want).max())


def alone(model: Any, parts: Sequence[SessionCache], inputs: mx.array) -> mx.array:
    """What each part answers by itself."""
    ends = np.cumsum([part.rows for part in parts])
    cut = zip(parts, pairwise([0, *ends]), strict=True)
    logits = mx.concatenate([part.forward(model, inputs[start:end]) for part, (start, end) in cut])
    mx.eval(logits, [part.arrays() for part in parts])
    return logits


def twins(parts: Sequence[SessionCache]) -> list[SessionCache]:
    """Copies, which see the same trunks."""
    return [
        part.fork()
        if part.rows == 1
        else SessionCache.merge_rows([part.extract_row(i) for i in range(part.rows)])
        for part in parts
    ]


@st.composite
def parts_of(draw: st.DrawFn, model: Reading, most: int = 4) -> list[SessionCache]:
    """Sessions of any length and scheme; some lie over a trunk, some are merged."""
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    parts = []
    for _ in range(draw(st.integers(2, most))):
        scheme = draw(st.sampled_from(SCHEMES))
        session = fed(model, tokens(random, draw(st.integers(0, 40))), scheme)
        shape = draw(st.sampled_from(["alone", "trunk", "branches", "merged"]))
        if (
            shape == "alone"
            or not session.offsets[0]
            or not session.batchable
            or session.tokens_left_dense < 99
        ):
            parts.append(session)
            continue
        others = [session.fork() if shape == "merged" else session.branch(shared_min=1) for _ in range(2)]
        if shape == "trunk":
            parts.append(others[0])
            continue
        others[0].forward(model, drawn(random, 1, draw(st.integers(1, 9))))
        parts.append(SessionCache.merge_rows([session, *others]))
    return parts


@pytest.mark.parametrize("model", [ALL, MERGEABLE, FULL], ids=["chunks", "sinks", "full"])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_pass_gives_what_each_part_gives_alone(model: Reading, data: st.DataObject) -> None:
    """Any mix of codecs, reaches, trunks and lengths, for any number of tokens, and after rounds."""
    parts = data.draw(parts_of(model))
    random = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    group, others = Group(parts), twins(parts)
    for n in data.draw(st.lists(st.sampled_from([1, 1, 2, 5, 17]), min_size=1, max_size=4)):
        inputs = drawn(random, group.rows, n)
        if data.draw(st.booleans(), "round"):
            keep = [data.draw(st.integers(0, n)) for _ in range(group.rows)]
            group.spec_round_begin()
            got = group.forward(model, inputs)
            group.spec_round_rollback(keep)
            ends = [0, *np.cumsum([part.rows for part in others])]
            for part in others:
                part.spec_round_begin()
            assert same(got, alone(model, others, inputs))
            for part, (start, end) in zip(others, pairwise(ends), strict=True):
                part.spec_round_rollback(keep[start:end])
        else:
            assert same(group.forward(model, inputs), alone(model, others, inputs))
        mx.eval(group.arrays())
        assert group.apart
        assert group.offsets == tuple(offset for part in others for offset in part.offsets)
        assert [part.kinds() for part in group.parts] == [part.kinds() for part in others]


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_rows_come_go_and_are_packed_in_any_order(data: st.DataObject) -> None:
    """Whatever the parts were on the way, a row answers as a session that was fed the same tokens."""
    model = MERGEABLE
    random = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    first = tokens(random, 30)
    parent = fed(model, first)
    histories: list[list[int]] = []
    group = Group()
    for _ in range(data.draw(st.integers(3, 10), "operations")):
        kind = data.draw(st.sampled_from(["add", "branch", "remove", "pack", "feed", "feed"]))
        some = data.draw(st.sets(st.integers(0, max(group.rows - 1, 0)), max_size=group.rows), "rows")
        if kind in ("add", "branch") and group.rows < 6:
            if kind == "branch":
                group.add([parent.branch(shared_min=1)])
                histories.append(list(first))
            else:
                histories.append(tokens(random, data.draw(st.integers(1, 20))))
                group.add([fed(model, histories[-1])])
        elif kind == "remove":
            for session, row in zip(group.remove(sorted(some)), sorted(some), strict=True):
                assert session.offsets == (len(histories[row]),)
                assert same(
                    session.forward(model, mx.array([[3]]))[:, -1], fed_last(model, [*histories[row], 3])
                )
            histories = [history for row, history in enumerate(histories) if row not in some]
        elif kind == "pack":
            order = group.pack(sorted(some))
            histories = [histories[row] for row in order]
        elif group.rows:
            inputs = drawn(random, group.rows, data.draw(st.sampled_from([1, 3])))
            got = group.forward(model, inputs)
            for row, (history, new) in enumerate(zip(histories, inputs.tolist(), strict=True)):
                history += new
                assert same(got[row, -1:], fed_last(model, history))
        assert group.offsets == tuple(map(len, histories))


def fed_last(model: Reading, history: list[int]) -> mx.array:
    return SessionCache.create(model).forward(model, mx.array([history]))[:, -1]


# ---------------------------------------------------------------- what it costs


def planes_of(session: SessionCache) -> list[int]:
    return [id(array) for array in session.arrays()]


def test_joining_and_leaving_moves_nothing() -> None:
    random = np.random.default_rng(1)
    sessions = [fed(ALL, tokens(random, n)) for n in (3, 30, 11)]
    held = [planes_of(session) for session in sessions]
    group = Group(sessions[:2])
    group.add(sessions[2:])
    assert [planes_of(part) for part in group.parts] == held
    assert group.nbytes_capacity == sum(session.nbytes_capacity for session in sessions)
    last, first = group.remove([2, 0])
    assert (last, first) == (sessions[2], sessions[0])
    assert [planes_of(last), planes_of(first), planes_of(sessions[1])] == [held[2], held[0], held[1]]
    assert group.parts == [sessions[1]]


def test_a_lone_part_hands_its_own_layers_to_the_model() -> None:
    session = fed(FULL, [1, 2])
    Group([session]).forward(FULL, mx.array([[3]]))
    assert all(got is own for got, own in zip(FULL.caches, session.layers, strict=True))


def test_rows_over_a_trunk_are_packed_without_moving_it() -> None:
    parent = fed(FULL, list(range(40)))
    group = Group([parent, *(parent.branch(shared_min=1) for _ in range(2)), fed(FULL, [1, 2])])
    (trunk,) = group.trunks
    assert group.pack([2, 0, 1]) == [3, 0, 1, 2]
    assert [part.rows for part in group.parts] == [1, 3]
    assert group.trunks == {trunk}
    assert group.place(3) == (group.parts[1], 2)
    assert group.columns == (2, 0, 0, 0)
    assert group.pack([1, 2, 3]) == [0, 1, 2, 3], "what is packed already stays as it is"
    assert group.pack([2]) == [0, 1, 3, 2]
    assert [part.rows for part in group.parts] == [1, 2, 1]


# ---------------------------------------------------------------- models that do something of their own


class Own(Reading):
    """Reads pieces of more than three tokens by itself."""

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        if inputs.shape[1] <= 3:
            return super().__call__(inputs, cache)
        (layer,) = cache
        x = self.embedding[inputs][:, None]
        mask = layer.make_mask(inputs.shape[1])
        keys, values = layer.update_and_fetch(x, x)
        return original(x, keys, values, None, 0.1, mask)[:, 0]


class OwnMask(Reading):
    """Hides what it likes."""

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        (layer,) = cache
        x = self.embedding[inputs][:, None]
        keys, values = layer.update_and_fetch(x, x)
        mask = mx.arange(layer.rows.layout.width + 1) % 2 == 0 if not isinstance(layer, GroupLayer) else x > 0
        return layer.attend(x, keys, values, 0.1, mask)[:, 0]


@pytest.mark.parametrize(("model", "n"), [(Own(KVCache), 5), (OwnMask(KVCache), 1)])
def test_a_model_that_does_something_of_its_own_is_fed_part_by_part(model: Reading, n: int) -> None:
    random = np.random.default_rng(2)
    parts = [fed(model, [token]) for token in (3, 4, 5)]
    for _ in range(4):
        alone(model, parts, drawn(random, 3, 1))
    group, others = Group(parts), twins(parts)
    inputs = drawn(random, 3, n)
    assert same(group.forward(model, inputs), alone(model, others, inputs))
    assert not group.apart
    assert group.pack([0, 1, 2]) == [0, 1, 2]
    assert len(group.parts) == 1


def test_a_model_that_cannot_be_fed_apart_is_merged_as_before() -> None:
    model = Scripted(KVCache, lambda: ArraysCache(size=1))
    sessions = [scripted(model, range(n)) for n in (3, 5, 2)]
    group = Group(sessions[:1], apart=False)
    group.add(sessions[1:])
    assert [part.rows for part in group.parts] == [3]
    group.forward(model, mx.array([[7], [8], [9]]))
    assert [model.seen(0, row)[0][-1] for row in range(3)] == [7, 8, 9]
    assert [session.offsets for session in group.remove([1])] == [(6,)]
    assert group.offsets == (4, 3)


def test_recurrent_states_are_fed_part_by_part() -> None:
    model = Scripted(lambda: ArraysCache(size=1))
    group = Group([scripted(model, range(n)) for n in (3, 5)])
    group.forward(model, mx.array([[7], [8]]))
    assert group.offsets == (4, 6)
    assert not group.apart
    group.spec_round_begin()
    group.forward(model, mx.array([[1, 2], [3, 4]]))
    with pytest.raises(CannotTrim):
        group.spec_round_rollback([2, 1])
    assert group.offsets == (6, 8)
    group.spec_round_rollback([0, 2])
    assert group.offsets == (4, 8)


# ---------------------------------------------------------------- what is refused


def test_what_does_not_fit_is_refused_and_nothing_changes() -> None:
    group = Group([fed(FULL, [1, 2]), fed(FULL, [3], Scheme("affine8"))])
    other = fed(ALL, [1])
    with pytest.raises(Mismatch):
        group.add([other])
    with pytest.raises(Mismatch):
        group.pack([0, 1])
    for inputs in ([[1]], [[], []], [[1], [2], [3]]):
        with pytest.raises(ValueError, match="2 rows"):
            group.forward(FULL, mx.array(inputs, dtype=mx.int32))
    for rows in ([2], [-1], [0, 0]):
        for act in (group.remove, group.pack):
            with pytest.raises(IndexError):
                act(rows)
    with pytest.raises(IndexError):
        group.place(2)
    with pytest.raises(RuntimeError, match="no speculative round"):
        group.spec_round_commit()
    group.spec_round_begin()
    for refused in (lambda: group.add([fed(FULL, [1])]), lambda: group.remove([0]), lambda: group.pack([0])):
        with pytest.raises(RuntimeError, match="round is open"):
            refused()
    with pytest.raises(ValueError, match="1 numbers"):
        group.spec_round_rollback([0])
    group.spec_round_commit()
    assert group.offsets == (2, 1)
    assert group.apart


def test_a_row_of_a_larger_part_that_is_due_must_leave_it_first() -> None:
    scheme = Scheme("affine8", quantise_after=12)
    pair = SessionCache.merge_rows([fed(FULL, list(range(11)), scheme), fed(FULL, [1], scheme)])
    group = Group([pair, fed(FULL, [5])])
    with pytest.raises(RuntimeError, match="leave its part"):
        group.forward(FULL, mx.array([[1, 2]] * 3))
    assert group.offsets == (11, 1, 1)
    group.pack([0])
    group.forward(FULL, mx.array([[1, 2]] * 3))
    assert group.offsets == (3, 3, 13)
    assert [part.quantised for part in group.parts] == [False, True, True]


def test_what_is_no_number_in_one_part_stays_there() -> None:
    parts = [fed(FULL, [1, 2, 3]), fed(FULL, [4] * 30), fed(FULL, [5])]
    for store in parts[1].stores:
        store.planes = [mx.full(plane.shape, mx.nan) for plane in store.planes]
    group, others = Group(parts), twins([parts[0], parts[2]])
    got = group.forward(FULL, mx.array([[7, 1], [8, 1], [9, 1]]))
    assert same(got[mx.array([0, 2])], alone(FULL, others, mx.array([[7, 1], [9, 1]])))
    assert np.isnan(np.array(got[1])).all()
