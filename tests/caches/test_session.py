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


def machine(name: str) -> Any:
    case = type(f"Sessions_{name}", (Sessions,), {"architecture": name}).TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=12, stateful_step_count=12, deadline=None)
    return case


for _name in ARCHITECTURES:
    globals()[f"Test_{_name}"] = machine(_name)
