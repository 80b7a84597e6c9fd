"""Random operations on packed rows of every codec and reach, against rows kept one by one, byte for byte.

Each group holds a layer of every codec at once. Beside it, all encoded tokens of each row are kept in numpy:
what a window may forget is known from the rule, token by token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from tests.caches.content import LAYERS, Kept, Twin, decoded, dtypes, encoded, feed, noise, raw, with_padding
from tests.caches.tokens import held

from stateroom.caches.layout import Layout
from stateroom.caches.reach import FULL, Chunk, Reach, Window
from stateroom.caches.rows import PackedRows

ROWS_MAX = 5
LENGTH_MAX = 700


class Surgery(RuleBasedStateMachine):
    """A row that shared memory with another, or lost a token, would show in its bytes."""

    reach: Reach = FULL
    twins = Bundle("twins")

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Twin] = []

    def made(self, twin: Twin) -> Twin:
        self.all.append(twin)
        return twin

    @initialize(target=twins, counts=st.lists(st.integers(1, 3), min_size=2, max_size=3))
    def start(self, counts: list[int]) -> object:
        alone = isinstance(self.reach, Chunk)
        return multiple(*(self.made(Twin.start(LAYERS, 1 if alone else n, self.reach)) for n in counts))

    def row(self, twin: Twin, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(twin.rows) - 1), "row")

    # ------------------------------------------------------------ tokens

    @rule(twin=twins, tokens=st.sampled_from([1, 1, 1, 2, 5, 70, 300]))
    def append(self, twin: Twin, tokens: int) -> None:
        if twin.rows and max(twin.lengths) + tokens < LENGTH_MAX:
            twin.append(tokens)

    @rule(twin=twins, data=st.data())
    def trim(self, twin: Twin, data: st.DataObject) -> None:
        if not twin.rows:
            return
        row = self.row(twin, data)
        n = data.draw(st.integers(-1, min(twin.lengths[row], 40) + 1), "n")
        if twin.packed.can_trim(row, n):
            twin.packed.trim(row, n)
            twin.rows[row] = twin.rows[row].until(twin.lengths[row] - n)
        else:
            with pytest.raises(ValueError, match="can't trim"):
                twin.packed.trim(row, n)

    @rule(twin=twins, tokens=st.integers(1, 3), layers=st.integers(0, len(LAYERS)))
    def fail(self, twin: Twin, tokens: int, layers: int) -> None:
        """B16: a forward that ends after some layers."""
        if not twin.rows:
            return
        content = noise(np.random.default_rng(1), LAYERS, len(twin.rows), tokens)
        twin.packed.begin(tokens)
        for layer in range(layers):
            twin.packed.write(layer, content[2 * layer], content[2 * layer + 1])
        mx.eval(twin.packed.arrays())
        twin.packed.rollback()

    # ------------------------------------------------------------ rows

    @precondition(lambda self: not isinstance(self.reach, Chunk))
    @rule(target=twins, some=st.lists(consumes(twins), min_size=1, max_size=3, unique_by=id))
    def merge(self, some: list[Twin]) -> object:
        rows = [row for twin in some for row in twin.rows]
        if len(rows) > ROWS_MAX:
            return multiple(*some)
        return self.made(Twin(LAYERS, PackedRows.merge_rows([twin.packed for twin in some]), rows))

    @rule(target=twins, twin=twins, data=st.data())
    def extract(self, twin: Twin, data: st.DataObject) -> object:
        if not twin.rows:
            return multiple()
        row = self.row(twin, data)
        alone = twin.packed.extract_row(row)
        assert alone.layout.left_pad == (0,)
        assert alone.capacity == alone.layout.width, "no spare capacity, no padding"
        return self.made(Twin(LAYERS, alone, [twin.rows[row]]))

    @rule(twin=twins, data=st.data())
    def filter(self, twin: Twin, data: st.DataObject) -> None:
        rows = range(len(twin.rows))
        keep = data.draw(st.lists(st.sampled_from(rows), unique=True) if rows else st.just([]), "keep")
        twin.packed.filter_rows(keep)
        twin.rows = [twin.rows[i] for i in keep]
        twin.round = None if twin.round is None else [twin.round[i] for i in keep]

    @rule(twin=twins, data=st.data())
    def align(self, twin: Twin, data: st.DataObject) -> None:
        pads = tuple(data.draw(st.integers(0, 9), "pad") for _ in twin.rows)
        twin.packed.align_rows(pads)
        assert twin.packed.layout.left_pad == pads

    @rule(target=twins, twin=twins)
    def copy(self, twin: Twin) -> Twin:
        return self.made(replace(twin, packed=twin.packed.copy(), rows=list(twin.rows), round=None))

    @rule(target=twins, twin=twins)
    def share(self, twin: Twin) -> Twin:
        return self.made(replace(twin, packed=twin.packed.sharing(), rows=list(twin.rows)))

    @rule(twin=twins)
    def forget(self, twin: Twin) -> None:
        twin.packed.forget_unseen()

    @rule(twin=twins, data=st.data())
    def restore(self, twin: Twin, data: st.DataObject) -> None:
        """Planes from elsewhere, with NaN wherever there is no token."""
        pads = tuple(data.draw(st.integers(0, 9), "pad") for _ in twin.rows)
        forgotten = tuple(data.draw(st.integers(0, gone), "gone") for gone in twin.packed.layout.forgotten)
        layout = Layout(pads, tuple(twin.lengths), forgotten)
        planes: list[mx.array | None] = [None] * len(twin.packed.planes)
        if layout.width:
            spare = data.draw(st.integers(0, 5), "spare")
            planes = [*with_padding(twin.rows, LAYERS, layout, self.reach, layout.width + spare)]
        twin.packed.restore_state(planes, layout)
        twin.round = None

    # ------------------------------------------------------------ rounds

    @rule(twin=twins)
    def begin_round(self, twin: Twin) -> None:
        if twin.round is None:
            twin.packed.spec_round_begin()
            twin.round = twin.lengths
        assert list(twin.packed.round_offsets) == twin.round

    @rule(twin=twins)
    def commit_round(self, twin: Twin) -> None:
        if twin.round is not None:
            twin.packed.spec_round_commit()
            twin.round = None

    @rule(twin=twins, data=st.data(), one_number=st.booleans())
    def roll_back(self, twin: Twin, data: st.DataObject, one_number: bool) -> None:
        """Each row keeps its own number of the round's tokens, or all the same."""
        if twin.round is None:
            return
        most = [now - then for now, then in zip(twin.lengths, twin.round, strict=True)]
        if min(most, default=0) < 0:  # trimmed to before the round
            with pytest.raises(ValueError, match="can't keep"):
                twin.packed.spec_round_rollback(0)
            return
        keep: int | list[int] = data.draw(st.integers(0, min(most, default=0)), "keep")
        if not one_number:
            keep = [data.draw(st.integers(0, n), "keep of row") for n in most]
        twin.packed.spec_round_rollback(keep)
        kept = [keep] * len(most) if isinstance(keep, int) else keep
        after = [then + n for then, n in zip(twin.round, kept, strict=True)]
        twin.rows = [row.until(length) for row, length in zip(twin.rows, after, strict=True)]
        twin.round = None

    @rule(twin=twins, data=st.data(), pieces=st.lists(st.integers(1, 4), min_size=1, max_size=3))
    def whole_round(self, twin: Twin, data: st.DataObject, pieces: list[int]) -> None:
        if not twin.rows or twin.round is not None:
            return
        self.begin_round(twin)
        for n in pieces:
            twin.append(n)
        self.roll_back(twin, data, data.draw(st.booleans(), "one number"))

    # ------------------------------------------------------------ ragged prompts

    @rule(twin=twins, data=st.data(), pieces=st.lists(st.integers(1, 4), min_size=1, max_size=3))
    def prefill(self, twin: Twin, data: st.DataObject, pieces: list[int]) -> None:
        """Prompts of different lengths, padded at the right, in several forwards; rows may leave then."""
        if not twin.rows:
            return
        longest = sum(pieces)
        lengths = [data.draw(st.integers(0, longest), "length") for _ in twin.rows]
        lengths[data.draw(st.integers(0, len(lengths) - 1), "longest")] = longest
        leaves_after = data.draw(st.integers(0, 2 * len(pieces)), "leave after")
        twin.packed.prepare_prefill(lengths)
        fed = 0
        for i, n in enumerate(pieces):
            content = noise(np.random.default_rng([fed, *twin.lengths]), LAYERS, len(twin.rows), n)
            feed(twin.packed, content)
            new = encoded(LAYERS, content)
            real = [min(max(length - fed, 0), n) for length in lengths]
            twin.rows = [
                row.and_then([plane[at][:, : real[at]] for plane in new]) for at, row in enumerate(twin.rows)
            ]
            fed += n
            if i == leaves_after:
                keep = data.draw(st.permutations(range(len(twin.rows))), "keep")[: 1 + i]
                twin.packed.filter_rows(keep)
                twin.rows, lengths = [twin.rows[at] for at in keep], [lengths[at] for at in keep]
                twin.round = None if twin.round is None else [twin.round[at] for at in keep]
        assert twin.packed.right_pad == tuple(longest - length for length in lengths)
        self.refused_while_open(twin)
        if twin.packed.layout.rows:
            check_donor(twin)
        twin.packed.finalize_prefill()
        assert twin.packed.right_pad is None

    def refused_while_open(self, twin: Twin) -> None:
        """Padding would be taken for tokens."""
        rows = twin.packed
        works: list[Any] = [
            lambda: rows.extract_row(0),
            lambda: rows.trim(0, 1),
            lambda: PackedRows.merge_rows([rows]),
            lambda: rows.align_rows(rows.layout.left_pad),
            rows.copy,
            rows.spec_round_begin if twin.round is None else lambda: rows.spec_round_rollback(0),
            lambda: rows.prepare_prefill([1] * len(twin.rows)),
        ]
        for work in works:
            with pytest.raises(RuntimeError, match="ragged prefill is open"):
                work()

    @rule(twin=twins)
    def read(self, twin: Twin) -> None:
        if twin.packed.capacity and twin.packed.layout.width:
            check_donor(twin)
        else:
            for view in (twin.packed.donor_view, twin.packed.temporal_view):
                with pytest.raises(ValueError, match="holds nothing"):
                    view(0)

    # ------------------------------------------------------------ the law

    @invariant()
    def rows_are_what_they_should_be(self) -> None:
        for twin in self.all:
            twin.check()

    @invariant()
    def sizes_count_what_is_there(self) -> None:
        for twin in self.all:
            rows = twin.packed
            if not rows.capacity:
                assert rows.nbytes_live == rows.nbytes_capacity == 0
                continue
            token = sum(
                plane.shape[0] * plane.shape[2] * plane.itemsize for plane in Kept.empty(LAYERS).planes
            )
            assert rows.bytes_per_token == token
            assert rows.nbytes_live == token * sum(rows.layout.held)
            assert rows.nbytes_capacity == sum(plane.nbytes for plane in rows.arrays())


def check_donor(twin: Twin) -> None:
    """Keys and values of each row in the order of time, at the columns that the view names."""
    layout, reach = twin.packed.layout, twin.packed.reach
    right = twin.packed.right_pad or (0,) * layout.rows
    start = 0
    for i, layer in enumerate(LAYERS):
        view = twin.packed.donor_view(i)
        end = start + len(dtypes(layer))
        assert (view.offsets, view.starts) == (tuple(twin.lengths), layout.left_pad)
        for row, kept in enumerate(twin.rows):
            tokens = held(reach, kept.length, layout.forgotten[row])
            assert view.ends[row] == view.starts[row] + len(tokens) == layout.ends[row] - right[row]
            if not tokens:
                continue
            want = decoded(layer, [plane[:, tokens] for plane in kept.planes[start:end]])
            for got, expected in zip((view.keys, view.values), want, strict=True):
                assert raw(got[row, :, view.starts[row] : view.ends[row]]) == raw(expected)
        if twin.packed.right_pad is None:
            both = twin.packed.temporal_view(i)
            assert [raw(x) for x in both] == [raw(x) for x in (view.keys, view.values)]
        start = end


def machine(reach: Reach) -> Any:
    name = f"Surgery_{reach.kind}_{reach.pinned}"
    case = type(name, (Surgery,), {"reach": reach}).TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=18, stateful_step_count=16)
    return case


TestFull = machine(FULL)
TestWindow = machine(Window(7))
TestPinnedWindow = machine(Window(11, 3))
TestChunk = machine(Chunk(5))
