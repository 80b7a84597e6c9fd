"""Random operations on the sessions of every architecture, against the law of `tests.architectures.law`.

The windows of these models hold 8 tokens and rows grow to about 40, so windows wrap many times. A seed fixes
a whole walk; a failure names it and the operations so far.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.architectures.configs import CHUNKS_DIFFER, NAMES
from tests.architectures.law import RELATIVE, Rows, model_of, random_tokens

from stateroom.caches.errors import CannotTrim, Mismatch, UnknownKind
from stateroom.caches.probe import rows_agree
from stateroom.caches.session import SessionCache

SEED = 7
LENGTH_MAX = 40
GROUPS_MAX = 3
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
        self.batches = rows_agree(model)
        self.groups = [Rows.start(model, random_tokens(self.random, n)) for n in (5, 17, 1)]

    def pick(self, n: int) -> int:
        return int(self.random.integers(n))

    def group(self) -> Rows:
        return self.groups[self.pick(len(self.groups))]

    def feed(self, rows: Rows, n: int) -> None:
        self.log.append(f"feed {n} to {list(map(len, rows.tokens))}")
        assert rows.feed([random_tokens(self.random, n) for _ in rows.tokens]) <= RELATIVE

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
        assert rows.cache.offsets == tuple(map(len, rows.tokens))

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

    # ------------------------------------------------------------ the walk

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
        ]
        for _ in range(steps):
            operations[self.pick(len(operations))]()
            self.groups = [g for g in self.groups if max(map(len, g.tokens)) <= LENGTH_MAX][-GROUPS_MAX:]
            while len(self.groups) < 2:
                self.groups.append(Rows.start(self.model, random_tokens(self.random, 1 + self.pick(20))))
        for rows in self.groups:
            self.feed(rows, 1)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(CHUNKS_DIFFER) - {"deepseek_v41"}))
def test_random_operations_keep_the_law(name: str) -> None:
    model = model_of(name)
    walk = Walk(model, SEED)
    try:
        walk.take(30 if walk.plain else 60)
    except BaseException as error:
        error.add_note(f"{name}, seed {SEED}: " + "; ".join(walk.log))
        raise


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(UnknownKind, match="LayerCache"):
        SessionCache.create(model_of("deepseek_v41"))
