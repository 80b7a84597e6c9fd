"""Random operations on the sessions of every architecture, against the law of `tests.architectures.law`.

The windows of these models hold 8 tokens and rows grow to about 40, so windows wrap many times. A seed fixes
a whole walk; a failure names it and the operations so far.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from tests.architectures.configs import NAMES, WRONG_IN_MLX_LM
from tests.architectures.law import RELATIVE, Rows, model_of, random_tokens

from stateroom.caches.errors import CannotTrim, Mismatch, UnknownKind
from stateroom.caches.probe import prompts_agree, rows_agree
from stateroom.caches.session import SessionCache

LENGTH_MAX = 40
LONG = 130  # windows forget for the first time
GROUPS_MAX = 4
ROWS_MAX = 4


class Walk:
    """A few groups of rows of one model, and random operations on them."""

    def __init__(self, model: Any, seed: int) -> None:
        self.model = model
        self.random = np.random.default_rng(seed)
        self.log: list[str] = []
        kinds = {kind.kind for kind in SessionCache.create(model).kinds()}
        self.plain = kinds == {"full"}
        self.stateful = not kinds.isdisjoint(("state", "composite"))
        self.batches, self.prompts = rows_agree(model), prompts_agree(model)
        lengths = (5, 17, 1) if self.plain else (5, 17, LONG)
        self.groups = [Rows.start(model, random_tokens(self.random, n)) for n in lengths]
        if self.batches:
            self.groups.append(Rows.merge(self.groups[:2]))

    def pick(self, n: int) -> int:
        return int(self.random.integers(n))

    def group(self) -> Rows:
        return self.groups[self.pick(len(self.groups))]

    def feed(self, rows: Rows, n: int) -> None:
        self.log.append(f"feed {n} to {list(map(len, rows.tokens))}")
        off = rows.feed([random_tokens(self.random, n) for _ in rows.tokens])
        assert off <= RELATIVE

    # ------------------------------------------------------------ operations

    def step(self) -> None:
        self.feed(self.group(), 1)

    def chunk(self) -> None:
        self.feed(self.group(), 2 + self.pick(10))

    def trim(self) -> None:
        """By what is within reach, or one token more than that, which is refused."""
        rows = self.group()
        row = self.pick(len(rows.tokens))
        held, floor = len(rows.tokens[row]), rows.cache.trim_floor(row)
        n = self.pick(held - floor + 1)
        self.log.append(f"trim {n} of {held}, floor {floor}")
        assert rows.cache.can_trim(row, n)
        assert not rows.cache.can_trim(row, held - floor + 1)
        with pytest.raises(CannotTrim):
            rows.cache.trim(row, held - floor + 1)
        rows.trim(row, n)
        rows.check_offsets()

    def fork(self) -> None:
        rows = self.group()
        if len(rows.tokens) == 1:
            self.log.append(f"fork {len(rows.tokens[0])}")
            self.groups.append(rows.fork())

    def merge(self) -> None:
        first, second = (self.groups[i] for i in self.random.permutation(len(self.groups))[:2])
        if not self.batches or len(first.tokens) + len(second.tokens) > ROWS_MAX:
            return
        self.log.append(f"merge {list(map(len, first.tokens))} and {list(map(len, second.tokens))}")
        try:
            joined = Rows.merge([first, second])
        except Mismatch:  # recurrent states of which one isn't used yet; both must go on as they were
            assert self.stateful
            return
        if self.pick(2):  # else the sources live on
            self.groups = [g for g in self.groups if g is not first and g is not second]
        self.groups.append(joined)

    def extract(self) -> None:
        rows = self.group()
        row = self.pick(len(rows.tokens))
        self.log.append(f"extract {row} of {list(map(len, rows.tokens))}")
        self.groups.append(rows.extract(row))
        if len(rows.tokens) > 1:
            rows.filter([int(i) for i in self.random.permutation(len(rows.tokens)) if i != row])

    def filter(self) -> None:
        rows = self.group()
        keep = [int(i) for i in self.random.permutation(len(rows.tokens))[: 1 + self.pick(len(rows.tokens))]]
        self.log.append(f"keep {keep} of {list(map(len, rows.tokens))}")
        rows.filter(keep)

    def start(self) -> None:
        """A new session, unused: it may be forked, trimmed by nothing, and merged where the model allows."""
        self.log.append("start")
        self.groups.append(Rows.start(self.model))

    def round(self) -> None:
        """A speculative round, of which each row keeps its own number of tokens."""
        rows = self.group()
        before = [len(tokens) for tokens in rows.tokens]
        rows.cache.spec_round_begin()
        for n in (1 + self.pick(4), 1)[: 1 + self.pick(2)]:
            self.feed(rows, n)
        fed = len(rows.tokens[0]) - before[0]
        if rows.cache.speculative:
            keep = [self.pick(fed + 1) for _ in before]
        else:
            keep = [fed * self.pick(2) for _ in before]
            if fed > 1:
                with pytest.raises(CannotTrim):
                    rows.cache.spec_round_rollback([1, *keep[1:]])
        self.log.append(f"keep {keep} of the round of {fed}")
        rows.cache.spec_round_rollback(keep)
        for row, n in enumerate(keep):
            del rows.tokens[row][before[row] + n :]
        rows.check_offsets()

    def restore(self) -> None:
        """Back to a checkpoint, and not forward to a later one."""
        rows = self.group()
        if len(rows.tokens) > 1 or not rows.tokens[0]:
            return
        checkpoint, held = rows.cache.checkpoint(0), len(rows.tokens[0])
        assert (checkpoint is None) == (not rows.cache.checkpointed)
        if checkpoint is None:
            return
        self.feed(rows, 1 + self.pick(11))
        later = rows.cache.checkpoint(0)
        assert later is not None
        self.log.append(f"back to the checkpoint at {held}")
        rows.cache.restore(checkpoint)
        del rows.tokens[0][held:]
        rows.check_offsets()
        with pytest.raises(CannotTrim):
            rows.cache.restore(later)

    def ragged(self) -> None:
        """Prompts of different lengths in one forward."""
        rows = self.group()
        if len(rows.tokens) > 1 and not self.prompts:
            return
        lengths = [1 + self.pick(9) for _ in rows.tokens]
        self.log.append(f"ragged {lengths} to {list(map(len, rows.tokens))}")
        off = rows.feed_ragged([random_tokens(self.random, n) for n in lengths])
        assert off <= RELATIVE
        self.feed(rows, 1)

    # ------------------------------------------------------------ the walk

    def short_enough(self, rows: Rows) -> bool:
        return all(len(row) <= LENGTH_MAX or LONG <= len(row) <= LONG + LENGTH_MAX for row in rows.tokens)

    def take(self, steps: int) -> None:
        operations = [
            *(self.step,) * 5,
            *(self.chunk,) * 3,
            *(self.merge,) * 3,
            *(self.trim,) * 2,
            self.extract,
            self.filter,
            self.fork,
            self.start,
            self.round,
            self.restore,
            self.ragged,
        ]
        for _ in range(steps):
            operations[self.pick(len(operations))]()
            self.groups = [g for g in self.groups if self.short_enough(g)][-GROUPS_MAX:]
            while len(self.groups) < 2:
                self.groups.append(Rows.start(self.model, random_tokens(self.random, 1 + self.pick(20))))
        for rows in self.groups:
            self.feed(rows, 1)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {"deepseek_v41", *WRONG_IN_MLX_LM}])
def test_random_operations_keep_the_law(name: str) -> None:
    model = model_of(name)
    seed = zlib.crc32(name.encode())
    walk = Walk(model, seed)
    try:
        walk.take(30 if walk.plain else 60)
    except BaseException as error:
        error.add_note(f"seed {seed}: " + "; ".join(walk.log))
        raise


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "falcon_h1"])
def test_a_round_from_nothing_is_kept_by_all_rows_or_by_none(name: str) -> None:
    """A state that was never used, which is not one of zeros, can't stand beside used ones."""
    model = model_of(name)
    rows = Rows.merge([Rows.start(model), Rows.start(model)])
    rows.cache.spec_round_begin()
    rows.grow([[1, 2], [3, 4]])
    with pytest.raises(CannotTrim):
        rows.cache.spec_round_rollback([2, 0])
    rows.check_offsets()
    rows.cache.spec_round_rollback([0, 0])
    rows.tokens = [[], []]
    rows.check_offsets()
    assert rows.feed([[5], [6]]) <= RELATIVE


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(UnknownKind, match="LayerCache"):
        SessionCache.create(model_of("deepseek_v41"))
