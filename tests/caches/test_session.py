"""Sessions of real tiny models: whatever is done to their rows, logits are those of a fresh session.

The tokens of every row are kept beside it; after each forward the logits are compared with one forward over
all tokens in a session of its own, of the same scheme (teacher-forced: B05, B14, B26, B30, B32).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.caches.models import ARCHITECTURES, QUANTISABLE, VOCAB
from tests.caches.sessions import Rows, assert_same, drawn, fresh_logits, model_of

from stateroom.caches.checkpoints import Checkpoint
from stateroom.caches.codecs.scheme import Scheme
from stateroom.caches.errors import CannotTrim
from stateroom.caches.session import SessionCache

GROUPS_MAX = 4
ROWS_MAX = 5
LENGTH_MAX = 70


class Sessions(RuleBasedStateMachine):
    """Random operations on a few groups of rows."""

    architecture = "llama"
    scheme: Scheme | None = None

    @initialize(lengths=st.lists(st.integers(1, 20), min_size=2, max_size=4), seed=st.integers(0, 99))
    def start(self, lengths: list[int], seed: int) -> None:
        self.model = model_of(self.architecture)
        self.random = np.random.default_rng(seed)
        self.groups = [self.fresh(drawn(self.random, length)) for length in lengths]
        self.checkpoints: list[tuple[Checkpoint, list[int]]] = []

    def fresh(self, tokens: list[int]) -> Rows:
        rows = Rows(self.model, SessionCache.create(self.model, self.scheme), [[]], self.scheme)
        rows.feed([tokens])
        return rows

    def add(self, *rows: Rows) -> None:
        self.groups = [*self.groups, *rows][-GROUPS_MAX:]

    def group(self, data: st.DataObject) -> Rows:
        return self.groups[data.draw(st.integers(0, len(self.groups) - 1), "group")]

    def row(self, data: st.DataObject, group: Rows) -> int:
        return data.draw(st.integers(0, len(group.tokens) - 1), "row")

    @rule(data=st.data(), n=st.sampled_from([1, 1, 1, 2, 5, 30]))
    def forward(self, data: st.DataObject, n: int) -> None:
        group = self.group(data)
        if max(map(len, group.tokens)) + n <= LENGTH_MAX:
            group.feed([drawn(self.random, n) for _ in group.tokens])

    @precondition(lambda self: len(self.groups) > 1 and self.groups[0].cache.batchable)
    @rule(data=st.data())
    def merge(self, data: st.DataObject) -> None:
        first = self.groups[0]
        others = [g for g in self.groups[1:] if g.cache.signature == first.cache.signature]
        if not others:
            return
        some = [first, *data.draw(st.lists(st.sampled_from(others), min_size=1, max_size=2, unique_by=id))]
        some = data.draw(st.permutations(some))
        tokens = [list(row) for g in some for row in g.tokens]
        if len(tokens) > ROWS_MAX:
            return
        merged = Rows(self.model, SessionCache.merge_rows([g.cache for g in some]), tokens, self.scheme)
        if not data.draw(st.booleans(), "sources stay"):
            self.groups = [g for g in self.groups if all(g is not s for s in some)]
        self.add(merged)

    @rule(data=st.data())
    def extract(self, data: st.DataObject) -> None:
        group = self.group(data)
        row = self.row(data, group)
        alone = Rows(self.model, group.cache.extract_row(row), [list(group.tokens[row])], self.scheme)
        if len(group.tokens) > 1:
            keep = data.draw(st.permutations([i for i in range(len(group.tokens)) if i != row]), "keep")
            group.cache.filter_rows(keep)
            group.tokens = [group.tokens[i] for i in keep]
        self.add(alone)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        group = self.group(data)
        if len(group.tokens) == 1:
            twin = Rows(self.model, group.cache.fork(), [list(group.tokens[0])], self.scheme)
            twin.feed([drawn(self.random, 1)])
            group.feed([drawn(self.random, 2)])
            self.add(twin)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.group(data).cache.forget_unseen()

    @rule(data=st.data(), n=st.integers(0, 45))
    def trim(self, data: st.DataObject, n: int) -> None:
        group = self.group(data)
        row = self.row(data, group)
        lengths = [len(tokens) for tokens in group.tokens]
        floor = group.cache.trim_floor(row)
        # To nothing a row without states can always go.
        exact = lengths[row] - n >= floor or (n == lengths[row] and group.cache.speculative)
        assert group.cache.can_trim(row, n) == (exact and n <= lengths[row])
        if group.cache.can_trim(row, n):
            group.cache.trim(row, n)
            lengths[row] -= n
        else:
            with pytest.raises(CannotTrim):
                group.cache.trim(row, n)
        group.cut(lengths)

    @rule(data=st.data(), n=st.integers(1, 4))
    def round(self, data: st.DataObject, n: int) -> None:
        """Each row keeps its own part of it, with states all or nothing."""
        group = self.group(data)
        before = [len(tokens) for tokens in group.tokens]
        if max(before) + n > LENGTH_MAX:
            return
        group.cache.spec_round_begin()
        group.feed([drawn(self.random, n) for _ in before])
        kept = st.integers(0, n) if group.cache.speculative else st.sampled_from([0, n])
        keep = [data.draw(kept, "keep") for _ in before]
        group.cache.spec_round_rollback(keep)
        group.cut([then + k for then, k in zip(before, keep, strict=True)])

    @rule(data=st.data())
    def leave_checkpoint(self, data: st.DataObject) -> None:
        group = self.group(data)
        row = self.row(data, group)
        made = group.cache.checkpoint(row)
        assert (made is not None) == group.cache.checkpointed
        if made is not None:
            self.checkpoints.append((made, list(group.tokens[row])))

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        """Of sessions that share a checkpoint's tokens any can go back to it."""
        made, tokens = data.draw(st.sampled_from(self.checkpoints), "checkpoint")
        for group in self.groups:
            if len(group.tokens) == 1 and group.tokens[0][: len(tokens)] == tokens:
                assert group.cache.can_restore(made)
                group.cache.restore(made)
                group.cut([len(tokens)])
                group.feed([drawn(self.random, 2)])


def grown(model: Any, lengths: list[int], seed: int) -> SessionCache:
    random = np.random.default_rng(seed)
    return Rows.of(model, [drawn(random, length) for length in lengths]).cache


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
        assert_same(np.array(logits[-1, -1]), fresh_logits(model, tokens)[-1])
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
        logits: mx.array = model(inputs, cache=cache)
        return logits

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
            assert_same(logits[i, -1], fresh_logits(model, row)[-1])


def machine(architecture: str, scheme: Scheme | None, examples: int) -> Any:
    name = f"Sessions_{architecture}_{scheme.name if scheme else 'dense'}"
    case = type(name, (Sessions,), {"architecture": architecture, "scheme": scheme}).TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=examples, stateful_step_count=14)
    return case


for _name in ARCHITECTURES:
    globals()[f"Test_{_name}"] = machine(_name, None, 6)
for _name in QUANTISABLE:
    for _scheme in (Scheme("affine8"), Scheme("affine4"), Scheme("turbo")):
        globals()[f"Test_{_name}_{_scheme.name}"] = machine(_name, _scheme, 2)
