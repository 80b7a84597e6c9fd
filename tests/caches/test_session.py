"""Sessions of real tiny models: whatever is done to their rows, logits are those of a fresh session.

The tokens of every row are kept beside it; after each forward the last logits are compared with one
forward over all tokens in a session of its own (teacher-forced: B05, B14, B26, B30, B32).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.caches.models import ARCHITECTURES, VOCAB, tiny

from stateroom.caches.attention import install
from stateroom.caches.errors import CannotTrim
from stateroom.caches.session import SessionCache

RELATIVE = 1e-4  # of the largest logit, float32


@cache
def model_of(architecture: str) -> Any:
    model = tiny(architecture)
    install(model)
    return model


def fresh_logits(model: Any, tokens: list[int]) -> np.ndarray:
    return np.array(SessionCache.create(model).forward(model, mx.array([tokens]))[0, -1])


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= RELATIVE * np.abs(want).max()


@dataclass
class Group:
    cache: SessionCache
    tokens: list[list[int]]  # of each row


class Sessions(RuleBasedStateMachine):
    """Random operations on a few groups of rows."""

    architecture = "llama"

    @initialize(lengths=st.lists(st.integers(1, 20), min_size=2, max_size=4), seed=st.integers(0, 99))
    def start(self, lengths: list[int], seed: int) -> None:
        self.model = model_of(self.architecture)
        self.random = np.random.default_rng(seed)
        self.groups = [Group(SessionCache.create(self.model), [[]]) for _ in lengths]
        for group, length in zip(self.groups, lengths, strict=True):
            self.feed(group, length)

    def feed(self, group: Group, n: int) -> None:
        new = self.random.integers(0, VOCAB, (len(group.tokens), n))
        logits = group.cache.forward(self.model, mx.array(new))
        mx.eval(logits, group.cache.arrays())
        for row, tokens in enumerate(group.tokens):
            tokens.extend(map(int, new[row]))
            assert_same(np.array(logits[row, -1]), fresh_logits(self.model, tokens))
        assert group.cache.offsets == tuple(map(len, group.tokens))

    def group(self, data: st.DataObject) -> Group:
        return self.groups[data.draw(st.integers(0, len(self.groups) - 1), "group")]

    def row(self, data: st.DataObject, group: Group) -> int:
        return data.draw(st.integers(0, len(group.tokens) - 1), "row")

    @rule(data=st.data(), n=st.sampled_from([1, 1, 1, 2, 5]))
    def forward(self, data: st.DataObject, n: int) -> None:
        self.feed(self.group(data), n)

    @precondition(lambda self: len(self.groups) > 1 and self.groups[0].cache.batchable)
    @rule(data=st.data())
    def merge(self, data: st.DataObject) -> None:
        first = self.groups[0]
        others = [g for g in self.groups[1:] if g.cache.signature == first.cache.signature]
        if not others:
            return
        some = [first, *data.draw(st.lists(st.sampled_from(others), min_size=1, max_size=2, unique_by=id))]
        some = data.draw(st.permutations(some))
        merged = SessionCache.merge_rows([g.cache for g in some])
        tokens = [list(row) for g in some for row in g.tokens]
        if data.draw(st.booleans(), "sources stay"):
            self.groups = [*self.groups, Group(merged, tokens)][-4:]
        else:
            self.groups = [g for g in self.groups if all(g is not s for s in some)] + [Group(merged, tokens)]

    @rule(data=st.data())
    def extract(self, data: st.DataObject) -> None:
        group = self.group(data)
        row = self.row(data, group)
        alone = Group(group.cache.extract_row(row), [list(group.tokens[row])])
        if len(group.tokens) > 1:
            keep = data.draw(st.permutations([i for i in range(len(group.tokens)) if i != row]), "keep")
            group.cache.filter_rows(keep)
            group.tokens = [group.tokens[i] for i in keep]
        self.groups = [*self.groups, alone][-4:]

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        group = self.group(data)
        if len(group.tokens) == 1:
            twin = Group(group.cache.fork(), [list(group.tokens[0])])
            self.feed(twin, 1)
            self.feed(group, 2)
            self.groups = [*self.groups, twin][-4:]

    @rule(data=st.data(), n=st.integers(0, 25))
    def trim(self, data: st.DataObject, n: int) -> None:
        group = self.group(data)
        row = self.row(data, group)
        held = len(group.tokens[row])
        floor = group.cache.trim_floor(row)
        assert group.cache.can_trim(row, n) == (held - n >= floor)
        if held - n >= floor:
            group.cache.trim(row, n)
            group.tokens[row] = group.tokens[row][: held - n]
        else:
            with pytest.raises(CannotTrim):
                group.cache.trim(row, n)
        assert group.cache.offsets == tuple(map(len, group.tokens))


def grown(model: Any, lengths: list[int], seed: int) -> SessionCache:
    random = np.random.default_rng(seed)
    sessions = []
    for length in lengths:
        session = SessionCache.create(model)
        mx.eval(session.forward(model, mx.array(random.integers(0, VOCAB, (1, length)))), session.arrays())
        sessions.append(session)
    return SessionCache.merge_rows(sessions)


BATCHABLE = [name for name in ARCHITECTURES if name != "llama4"]


@pytest.mark.parametrize("architecture", BATCHABLE)
def test_a_neighbours_content_changes_no_bit(architecture: str) -> None:
    """B15: the same shapes twice, other tokens in the other rows; then X6, a neighbour of NaN."""
    model = model_of(architecture)
    first = [SessionCache.create(model) for _ in range(2)]
    for session in first:
        mx.eval(session.forward(model, mx.array([[5, 17, 3, 88, 2, 41, 9]])), session.arrays())
    answers = []
    for seed, session in enumerate(first):
        group = SessionCache.merge_rows([grown(model, [13], seed), session, grown(model, [4], 7 + seed)])
        steps = [group.forward(model, mx.array([[seed], [token], [60 + seed]]))[1, -1] for token in (1, 2, 3)]
        answers.append(np.stack([np.array(step) for step in steps]))
    assert answers[0].tobytes() == answers[1].tobytes()


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "qwen3_next"])
def test_a_row_of_nan_stays_alone(architecture: str) -> None:
    """X6: finite rows stay finite and right, with the poisoned row beside them and after it is gone."""
    model = model_of(architecture)
    random = np.random.default_rng(1)
    tokens = list(map(int, random.integers(0, VOCAB, 9)))
    poisoned, clean = grown(model, [12], 3), SessionCache.create(model)
    mx.eval(clean.forward(model, mx.array([tokens])), clean.arrays())
    for layer in poisoned.layers:
        if hasattr(layer, "keys"):
            layer.keys, layer.values = layer.keys * mx.nan, layer.values * mx.nan
    group = SessionCache.merge_rows([poisoned, clean])
    for step in range(4):
        logits = group.forward(model, mx.array([[step], [30 + step]] if group.rows == 2 else [[30 + step]]))
        tokens.append(30 + step)
        assert_same(np.array(logits[-1, -1]), fresh_logits(model, tokens))
        if step < 2:
            assert np.isnan(np.array(logits[0])).all()
        if step == 1:
            group.filter_rows([1])


def test_equal_lengths_decode_with_positions_of_their_own() -> None:
    """B01: two level rows and one token get an array of positions; a lone row gets a number."""
    model = model_of("llama")
    seen = []

    def spying(inputs: mx.array, cache: list[Any]) -> mx.array:
        seen.append(cache[0].offset)
        return model(inputs, cache=cache)

    group = grown(model, [6, 6], 0)
    group.forward(spying, mx.array([[1], [2]]))
    group.extract_row(0).forward(spying, mx.array([[1]]))
    assert isinstance(seen[0], mx.array)
    assert (seen[0].tolist(), seen[1]) == ([6, 6], 7)
    assert group.layers[0].offset.tolist() == [7, 7]


def test_a_group_of_one_model_steps_like_its_rows_alone() -> None:
    """B14: solo prefills of 25 and 30, merged, decoded: each row goes on at its own position."""
    model = model_of("qwen3")
    group = grown(model, [25, 30], 4)
    alone = [group.extract_row(i) for i in range(2)]
    for token in range(5):
        packed = np.array(group.forward(model, mx.array([[token], [token + 50]]))[:, -1])
        for i, session in enumerate(alone):
            assert_same(packed[i], np.array(session.forward(model, mx.array([[token + 50 * i]]))[0, -1]))


@pytest.mark.parametrize("architecture", ["llama_windows", "gemma3_text", "gpt_oss"])
def test_several_tokens_at_once_on_wrapped_windows(architecture: str) -> None:
    """B07: mlx-lm hides a token of the shorter rows from such a block when the window has wrapped."""
    model = model_of(architecture)
    tokens = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3]]
    sessions = [SessionCache.create(model) for _ in tokens]
    for session, row in zip(sessions, tokens, strict=True):
        session.forward(model, mx.array([row]))
    group = SessionCache.merge_rows(sessions)
    for n in (1, 1, 2, 3, 1, 4, 1, 2):
        new = np.random.default_rng(len(tokens[0])).integers(0, VOCAB, (3, n))
        logits = np.array(group.forward(model, mx.array(new)))
        for i, row in enumerate(tokens):
            row.extend(map(int, new[i]))
            assert_same(logits[i, -1], fresh_logits(model, row))


def machine(name: str) -> Any:
    case = type(f"Sessions_{name}", (Sessions,), {"architecture": name}).TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=12, stateful_step_count=12, deadline=None)
    return case


for _name in ARCHITECTURES:
    globals()[f"Test_{_name}"] = machine(_name)
