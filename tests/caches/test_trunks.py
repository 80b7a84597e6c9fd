"""Sessions that share their first tokens: no write of one is seen by another, nothing is copied or kept."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.architectures.configs import make
from tests.tiny import make_tiny_model

from stateroom.caches import shared_reads, snapshot
from stateroom.caches.attention import install
from stateroom.caches.codecs.scheme import Scheme
from stateroom.caches.compiled import CannotCompile, CompiledDecode
from stateroom.caches.probe import branches_agree
from stateroom.caches.read_costs import ReadCosts
from stateroom.caches.session import SessionCache
from stateroom.caches.stored_rows import CHAIN_MAX
from stateroom.caches.trunk import Trunk, levels

RELATIVE = 1e-4  # of the largest logit
QUANTISED = 0.02  # other pieces of a prompt round otherwise
VOCAB = 90
SHARING = ["llama", "qwen3", "gemma3_text", "gpt_oss", "lfm2", "falcon_h1", "qwen3_next", "mamba2"]


class InTurns(ReadCosts):
    """Trunks that may be are read by each row by itself in every second layer or step."""

    turns = itertools.cycle([True, False])

    def plain(self, rows: int, nbytes: int, passes: int = 1) -> bool:
        return next(self.turns)


@pytest.fixture(autouse=True)
def both_ways_of_reading() -> Iterator[None]:
    before = shared_reads.costs()
    shared_reads.use_costs(InTurns(1.0, 1.0))
    yield
    shared_reads.use_costs(before)


@cache
def model_of(name: str) -> Any:
    model = make_tiny_model("llama", width=256).model if name == "wide" else make(name)
    install(model)
    return model


@cache
def empty(name: str, scheme: Scheme | None) -> SessionCache:
    return SessionCache.create(model_of(name), scheme)


def fed(name: str, tokens: list[int], scheme: Scheme | None = None) -> SessionCache:
    session = empty(name, scheme).extract_row(0)
    session.forward(model_of(name), mx.array([tokens]))
    mx.eval(session.arrays())
    return session


def off(got: mx.array, name: str, tokens: list[int], scheme: Scheme | None = None) -> float:
    fresh = empty(name, scheme).extract_row(0)
    want = np.array(fresh.forward(model_of(name), mx.array([tokens]))[0, -1])
    assert np.isfinite(np.array(got)).all()
    return float(np.abs(np.array(got) - want).max() / np.abs(want).max())


@dataclass
class Row:
    cache: SessionCache
    tokens: list[int]


class Family(RuleBasedStateMachine):
    """A tree of forks, whose members are fed, trimmed, merged and closed in any order."""

    name = "llama"
    scheme: Scheme | None = None

    @initialize(n=st.integers(1, 20), seed=st.integers(0, 99))
    def start(self, n: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        tokens = self.draw(n)
        self.rows = [Row(fed(self.name, tokens, self.scheme), tokens)]

    def draw(self, n: int) -> list[int]:
        return [int(token) for token in self.random.integers(1, VOCAB, n)]

    def check(self, logits: mx.array, row: Row) -> None:
        assert off(logits, self.name, row.tokens, self.scheme) <= (QUANTISED if self.scheme else RELATIVE)
        assert row.cache.offsets == (len(row.tokens),)

    def row(self, data: st.DataObject) -> Row:
        return self.rows[data.draw(st.integers(0, len(self.rows) - 1), "row")]

    @precondition(lambda self: len(self.rows) < 6)
    @rule(data=st.data())
    def branch(self, data: st.DataObject) -> None:
        row = self.row(data)
        self.rows.append(
            Row(row.cache.branch(shared_min=data.draw(st.sampled_from([1, 8]))), list(row.tokens))
        )

    @rule(data=st.data(), n=st.sampled_from([1, 1, 2, 5]))
    def feed(self, data: st.DataObject, n: int) -> None:
        row = self.row(data)
        new = self.draw(n)
        row.tokens += new
        logits = row.cache.forward(model_of(self.name), mx.array([new]))
        self.check(logits[0, -1], row)

    @rule(data=st.data(), n=st.integers(0, 12))
    def trim(self, data: st.DataObject, n: int) -> None:
        row = self.row(data)
        if n < len(row.tokens) and row.cache.can_trim(0, n):
            row.cache.trim(0, n)
            del row.tokens[len(row.tokens) - n :]

    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        self.row(data).cache.take_back()

    @precondition(lambda self: len(self.rows) > 1)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        del self.rows[data.draw(st.integers(0, len(self.rows) - 1), "closed")]

    @precondition(lambda self: len(self.rows) > 1)
    @rule(data=st.data(), n=st.sampled_from([1, 1, 3]), keep=st.integers(0, 3))
    def together(self, data: st.DataObject, n: int, keep: int) -> None:
        """A step or a round in a group, all of it kept or, where that can be, a part."""
        some = data.draw(st.permutations(self.rows), "group")
        some = [row for row in some if row.cache.signature == some[0].cache.signature]
        group = SessionCache.merge_rows([row.cache for row in some])
        new = [self.draw(n) for _ in some]
        kept = [min(keep + i, n) if group.speculative else n for i in range(len(some))]
        group.spec_round_begin()
        logits = group.forward(model_of(self.name), mx.array(new))
        for i, (row, tokens, length) in enumerate(zip(some, new, kept, strict=True)):
            assert off(logits[i, -1], self.name, row.tokens + tokens, self.scheme) <= QUANTISED
            row.tokens += tokens[:length]
        group.spec_round_rollback(kept)
        for i, row in enumerate(some):
            row.cache = group.extract_row(i)

    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        row = self.row(data)
        row.cache = snapshot.restore(empty(self.name, self.scheme).extract_row(0), snapshot.take(row.cache))


def machine(name: str, scheme: Scheme | None) -> Any:
    title = f"Family_{name}_{scheme.name if scheme else 'dense'}"
    case = type(title, (Family,), {"name": name, "scheme": scheme}).TestCase
    case.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
    return case


for each in SHARING:
    globals()[f"Test_{each}"] = machine(each, None)
for each_scheme in (Scheme("affine8"), Scheme("affine4"), Scheme("turbo")):
    globals()[f"Test_{each_scheme.name}"] = machine("wide", each_scheme)


def test_a_branch_copies_nothing() -> None:
    """Both go on over the very arrays that were the parent's."""
    session = fed("llama", list(range(1, 80)))
    planes = list(session.stores[0].planes)
    child = session.branch()
    (trunk,) = session.trunks
    assert child.trunks == {trunk}
    assert all(held is plane for held, plane in zip(trunk.planes, planes, strict=True))
    assert (session.nbytes_capacity, child.nbytes_capacity) == (0, 0)
    assert trunk.holders == 2


def test_a_short_run_is_copied() -> None:
    session = fed("llama", [1, 2, 3])
    child = session.branch()
    assert not child.trunks
    assert off(child.forward(model_of("llama"), mx.array([[4]]))[0, -1], "llama", [1, 2, 3, 4]) <= RELATIVE


def test_a_trunk_is_freed_with_its_last_holder_and_taken_back_by_the_last_but_one() -> None:
    gc.collect()
    session = fed("llama", list(range(1, 80)))
    at = mx.get_active_memory()
    children = [session.branch() for _ in range(4)]
    assert mx.get_active_memory() == at, "nothing was copied"
    (trunk,) = session.trunks
    for child in children:
        child.forward(model_of("llama"), mx.array([[5]]))
        mx.eval(child.arrays())
    del child
    children.clear()
    assert trunk.holders == 1
    planes = trunk.planes
    session.take_back()
    assert not session.trunks
    assert all(held is plane for held, plane in zip(session.stores[0].planes, planes, strict=True))
    assert trunk.holders == 0


def test_what_came_since_moves_into_the_trunk_that_is_taken_back() -> None:
    tokens = list(range(1, 80))
    session = fed("llama", tokens)
    session.branch()
    session.trim(0, 9)
    session.forward(model_of("llama"), mx.array([[5, 6]]))
    session.take_back()
    assert not session.trunks
    tokens = [*tokens[:-9], 5, 6, 7]
    assert off(session.forward(model_of("llama"), mx.array([[7]]))[0, -1], "llama", tokens) <= RELATIVE


def test_each_trunk_is_read_once_for_all_who_see_as_much_of_it() -> None:
    session = fed("llama", list(range(1, 80)))
    first = session.branch()
    second = first.branch()
    second.trim(0, 10)
    other = fed("llama", [3] * 70)
    lone = other.branch()
    group = SessionCache.merge_rows([session, first, second, lone, fed("llama", [4, 5])])
    (level,) = levels(group.stores[0].chains)
    assert [(length, None if rows is None else rows.tolist()) for _, length, rows in level.reads] == [
        (79, [0, 1]), (69, [2]), (70, [3]),
    ]  # fmt: skip
    assert level.missing == 1


def test_a_window_that_a_model_asks_for_reaches_into_trunks() -> None:
    """B06: a plain cache under a mask of the last tokens."""
    model = model_of("llama")
    session = fed("llama", list(range(1, 31)))
    whole = session.fork()
    session.branch(shared_min=1)
    rows, plain = session.stores[0], whole.stores[0]
    random = np.random.default_rng(3)
    for cache_ in (rows, plain):
        cache_.begin(2)
    heads, width = plain.planes[0].shape[1], plain.planes[0].shape[3]
    queries = mx.array(random.standard_normal((1, 2 * heads, 2, width)), dtype=mx.float32)
    new = [mx.array(random.standard_normal((1, heads, 2, width)), dtype=mx.float32) for _ in range(2)]
    got, want = (
        layer.attend(queries, *layer.update_and_fetch(*new), 0.3, layer.make_mask(2, window_size=9))
        for layer in (session.layers[0], whole.layers[0])
    )
    assert np.abs(np.array(got) - np.array(want)).max() <= 1e-5
    for cache_ in (rows, plain):
        cache_.rollback()
    del model


def test_a_compiled_step_is_refused_in_parts() -> None:
    session = fed("llama", list(range(1, 80)))
    session.branch()
    with pytest.raises(CannotCompile):
        CompiledDecode(model_of("llama")).step(session, mx.array([[1]]))


@pytest.mark.parametrize("name", SHARING)
def test_models_that_read_through_us_are_found(name: str) -> None:
    assert branches_agree(model_of(name))


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3n", "plamo2", "afm7", "stablelm"])
def test_models_that_read_by_themselves_are_found_out(name: str) -> None:
    """Latent attention, layers that read another layer's keys, attention without the seam."""
    assert not branches_agree(model_of(name))


def test_views_count_themselves() -> None:
    session = fed("llama", list(range(1, 80)))
    children = [session.branch() for _ in range(3)]
    (trunk,) = session.trunks
    assert isinstance(trunk, Trunk)
    group = SessionCache.merge_rows([session, *children])
    assert trunk.holders == 4, "a group looks on through its sessions' views"
    del session, children
    assert trunk.holders == 4
    group.filter_rows([0, 2])
    assert trunk.holders == 2
    del group
    assert trunk.holders == 0


def test_a_long_chain_is_brought_together() -> None:
    """A session that is branched again and again while all its children stay."""
    tokens = list(range(1, 40))
    session, kept = fed("llama", tokens), []
    for n in range(3 * CHAIN_MAX):
        copied = session.branch_bytes(shared_min=1)
        assert (copied > 0) == (len(session.stores[0].chains[0]) >= CHAIN_MAX)
        kept.append(session.branch(shared_min=1))
        assert len(session.stores[0].chains[0]) <= CHAIN_MAX
        session.forward(model_of("llama"), mx.array([[n + 1]]))
        tokens.append(n + 1)
    assert off(session.forward(model_of("llama"), mx.array([[7]]))[0, -1], "llama", [*tokens, 7]) <= RELATIVE
    assert (
        off(kept[5].forward(model_of("llama"), mx.array([[7]]))[0, -1], "llama", [*tokens[:44], 7])
        <= RELATIVE
    )


def test_a_model_that_reads_by_itself_gets_its_tokens_back() -> None:
    """Nobody should have branched it; what it answers is right all the same."""
    session = fed("deepseek_v3", list(range(1, 30)))
    child = session.branch(shared_min=1)
    got = child.forward(model_of("deepseek_v3"), mx.array([[7, 8]]))[0, -1]
    assert off(got, "deepseek_v3", [*range(1, 30), 7, 8]) <= RELATIVE
    assert not child.trunks
    assert session.trunks
