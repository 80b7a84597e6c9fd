"""Packed rows against rows kept one by one as numpy arrays, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from stateroom.caches.errors import Mismatch
from stateroom.caches.layers import FullLayer
from stateroom.caches.rows import PackedRows

# (heads, field width, dtype) of each plane: all different, some prime.
PLANES = [(2, 5, mx.float32), (2, 3, mx.float16), (7, 1, mx.float32), (7, 11, mx.float32)]
LAYERS = len(PLANES) // 2
SPECIAL = [np.nan, -0.0, np.inf, 1e-30]  # bytes that arithmetic on the way would change


def noise(rows: int, tokens: int, seed: int) -> list[mx.array]:
    """New content for every plane, [B, Hkv, N, D]."""
    random = np.random.default_rng(seed)
    made = []
    for heads, width, dtype in PLANES:
        values = random.normal(size=(rows, heads, tokens, width)).astype(np.float32)
        flat = values.reshape(-1)
        flat[random.integers(0, flat.size, 3)] = random.choice(SPECIAL, 3)
        made.append(mx.array(values).astype(dtype))
    return made


def feed(rows: PackedRows, content: list[mx.array]) -> None:
    rows.begin(content[0].shape[2])
    for layer in range(LAYERS):
        rows.write(layer, content[2 * layer], content[2 * layer + 1])
    rows.commit()


def filled(lengths: list[int], seed: int = 0) -> PackedRows:
    """A group of rows of these lengths."""
    alone = []
    for i, length in enumerate(lengths):
        row = PackedRows(LAYERS)
        if length:
            feed(row, noise(1, length, seed + i))
        alone.append(row)
    return PackedRows.merge_rows(alone)


def raw(array: mx.array) -> bytes:
    return np.array(array).tobytes()


def contents(rows: PackedRows) -> list[list[bytes]]:
    """The live bytes of every row and plane, read through the layout alone."""
    found = []
    for row, (pad, end) in enumerate(zip(rows.layout.left_pad, rows.layout.ends, strict=True)):
        found.append([b"" if p is None else raw(p[row, :, pad:end]) for p in rows.planes])
    return found


@dataclass
class Twin:
    """Packed rows, and what each of their rows must hold: per plane [Hkv, tokens, D]."""

    packed: PackedRows
    naive: list[list[np.ndarray]] = field(default_factory=list)


def empty_row() -> list[np.ndarray]:
    return [np.zeros((heads, 0, width), np.array(mx.zeros(1, dtype)).dtype) for heads, width, dtype in PLANES]


class Surgery(RuleBasedStateMachine):
    """Any sequence of operations; a row that shared memory with another would show in its bytes."""

    twins = Bundle("twins")

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Twin] = []

    def made(self, packed: PackedRows, naive: list[list[np.ndarray]]) -> Twin:
        twin = Twin(packed, naive)
        self.live.append(twin)
        return twin

    @initialize(target=twins, counts=st.lists(st.integers(1, 3), min_size=2, max_size=3))
    def start(self, counts: list[int]) -> object:
        return multiple(
            *(self.made(PackedRows(LAYERS, rows), [empty_row() for _ in range(rows)]) for rows in counts)
        )

    @rule(twin=twins, tokens=st.sampled_from([1, 1, 2, 5, 300]), seed=st.integers(0, 2**31))
    def append(self, twin: Twin, tokens: int, seed: int) -> None:
        if not twin.naive:
            return
        content = noise(len(twin.naive), tokens, seed)
        feed(twin.packed, content)
        for i, row in enumerate(twin.naive):
            twin.naive[i] = [
                np.concatenate([old, np.array(new[i])], 1) for old, new in zip(row, content, strict=True)
            ]

    @rule(twin=twins, data=st.data())
    def trim(self, twin: Twin, data: st.DataObject) -> None:
        if not twin.naive:
            return
        row = data.draw(st.integers(0, len(twin.naive) - 1))
        held = twin.naive[row][0].shape[1]
        n = data.draw(st.integers(0, held))
        twin.packed.trim(row, n)
        twin.naive[row] = [plane[:, : held - n] for plane in twin.naive[row]]

    @rule(target=twins, some=st.lists(consumes(twins), min_size=1, max_size=3, unique_by=id))
    def merge(self, some: list[Twin]) -> Twin:
        return self.made(
            PackedRows.merge_rows([t.packed for t in some]), [list(row) for t in some for row in t.naive]
        )

    @rule(target=twins, twin=twins, data=st.data())
    def extract(self, twin: Twin, data: st.DataObject) -> object:
        if not twin.naive:
            return multiple()
        row = data.draw(st.integers(0, len(twin.naive) - 1))
        return self.made(twin.packed.extract_row(row), [list(twin.naive[row])])

    @rule(twin=twins, data=st.data())
    def filter(self, twin: Twin, data: st.DataObject) -> None:
        rows = range(len(twin.naive))
        keep = data.draw(st.lists(st.sampled_from(rows), unique=True) if rows else st.just([]))
        twin.packed.filter_rows(keep)
        twin.naive = [twin.naive[i] for i in keep]

    @rule(target=twins, twin=twins)
    def copy(self, twin: Twin) -> Twin:
        return self.made(twin.packed.copy(), [list(row) for row in twin.naive])

    @rule(twin=twins, tokens=st.integers(1, 3), layers=st.integers(0, LAYERS))
    def fail(self, twin: Twin, tokens: int, layers: int) -> None:
        if not twin.naive:
            return
        content = noise(len(twin.naive), tokens, 1)
        twin.packed.begin(tokens)
        for layer in range(layers):
            twin.packed.write(layer, content[2 * layer], content[2 * layer + 1])
        mx.eval(twin.packed.planes)
        twin.packed.rollback()

    @invariant()
    def rows_are_what_they_should_be(self) -> None:
        for twin in self.live:
            want = [[plane.tobytes() for plane in row] for row in twin.naive]
            assert contents(twin.packed) == want
            assert twin.packed.layout.offset == tuple(row[0].shape[1] for row in twin.naive)
            live = sum(plane.nbytes for row in twin.naive for plane in row)
            if twin.packed.capacity:
                assert twin.packed.nbytes_live == live
                assert twin.packed.nbytes_capacity == sum(
                    p.nbytes for p in twin.packed.planes if p is not None
                )

    @invariant()
    def columns_outside_are_zero_in_groups(self) -> None:
        for twin in self.live:
            layout = twin.packed.layout
            if layout.rows < 2:
                continue
            for plane in twin.packed.planes:
                for row, (pad, end) in enumerate(zip(layout.left_pad, layout.ends, strict=True)):
                    if plane is not None:
                        outside = mx.concatenate([plane[row, :, :pad], plane[row, :, end:]], axis=1)
                        assert not np.array(outside).any()


TestSurgery = Surgery.TestCase
TestSurgery.settings = settings(max_examples=60, stateful_step_count=14, deadline=None)


@pytest.mark.parametrize("lengths", [[3], [3, 7], [0, 5, 0], [0, 0], [256, 1, 300], [11, 2, 13, 0]])
def test_extract_of_merge_is_the_row_itself(lengths: list[int]) -> None:
    alone = [filled([length], seed=i) for i, length in enumerate(lengths)]
    merged = PackedRows.merge_rows(alone)
    for i, row in enumerate(alone):
        back = merged.extract_row(i)
        assert contents(back) == contents(row) if lengths[i] else back.layout.offset == (0,)
        assert back.layout.left_pad == (0,)
        assert back.capacity == lengths[i], "no spare capacity, no padding"


def test_joining_a_group_to_rows_never_filled() -> None:
    """B08: five rows, and every plane has five."""
    merged = PackedRows.merge_rows([filled([4, 9]), PackedRows(LAYERS, rows=3)])
    assert merged.layout.offset == (4, 9, 0, 0, 0)
    feed(merged, noise(5, 6, seed=9))
    assert merged.layout.offset == (10, 15, 6, 6, 6)
    assert all(plane is not None and plane.shape[0] == 5 for plane in merged.planes)


def test_filter_before_the_first_append_and_to_nothing() -> None:
    """B10: a group that holds nothing is legal, and so is a group without rows."""
    rows = PackedRows(LAYERS, rows=3)
    rows.filter_rows([2, 0])
    feed(rows, noise(2, 3, seed=1))
    assert rows.layout.offset == (3, 3)
    rows.filter_rows([])
    assert (rows.layout.rows, rows.layout.width, rows.nbytes_capacity) == (0, 0, 0)
    again = PackedRows.merge_rows([rows, filled([5])])
    assert contents(again) == contents(filled([5]))


def test_trim_is_per_row_and_refuses_more_than_the_row_holds() -> None:
    """X3."""
    rows = filled([3, 8])
    before = contents(rows)
    with pytest.raises(ValueError, match="holds 3"):
        rows.trim(0, 5)
    with pytest.raises(ValueError, match="holds 8"):
        rows.trim(1, -1)
    assert contents(rows) == before
    rows.trim(0, 3)
    assert rows.layout.offset == (0, 8)


def test_no_trimmed_token_is_handed_on() -> None:
    """B31: what a row forgot is in no array that another owner gets."""
    secret = 7654.0
    rows = filled([4])
    feed(rows, [mx.full((1, heads, 3, width), secret, dtype) for heads, width, dtype in PLANES])
    rows.trim(0, 3)
    group = PackedRows.merge_rows([rows, filled([9])])
    handed = [rows.extract_row(0), rows.copy(), group, group.extract_row(0)]
    for other in handed:
        for plane in other.planes:
            assert plane is not None
            assert not (np.array(plane) == secret).any()


def test_a_copy_never_aliases() -> None:
    """B30: either may write, and the other keeps its bytes."""
    rows = filled([5])
    twin = rows.copy()
    before = contents(rows)
    feed(twin, noise(1, 2, seed=5))
    assert contents(rows) == before
    feed(rows, noise(1, 2, seed=6))
    assert contents(twin) != contents(rows)
    assert contents(twin.extract_row(0))[0][0][: len(before[0][0])] != b""


SURGERY: dict[str, Callable[[PackedRows], object]] = {
    "merge": lambda rows: PackedRows.merge_rows([rows, filled([3])]),
    "extract": lambda rows: rows.extract_row(1),
    "filter": lambda rows: rows.filter_rows([1]),
    "trim": lambda rows: rows.trim(0, 2),
    "copy": lambda rows: rows.copy(),
}


@pytest.mark.parametrize("name", SURGERY)
@pytest.mark.parametrize("planes", range(len(PLANES)))
def test_surgery_that_fails_at_any_plane_changes_nothing(
    name: str, planes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B16."""
    rows = filled([4, 6])
    held, layout, before = list(rows.planes), rows.layout, contents(rows)
    done = 0

    def fails_after(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def wrapped(*args: object, **kwargs: object) -> mx.array:
            nonlocal done
            if done == planes:
                raise MemoryError("injected")
            done += 1
            return function(*args, **kwargs)

        return wrapped

    other = filled([3])
    work = dict(SURGERY, merge=lambda rows: PackedRows.merge_rows([rows, other]))[name]
    for function in ("contiguous", "take", "slice_update"):
        monkeypatch.setattr(mx, function, fails_after(getattr(mx, function)))
    with pytest.raises(MemoryError):
        work(rows)
    monkeypatch.undo()
    assert all(now is then for now, then in zip(rows.planes, held, strict=True))
    assert rows.layout == layout
    assert contents(rows) == before
    feed(rows, noise(2, 1, seed=3))


def test_surgery_waits_for_the_end_of_a_forward() -> None:
    rows = filled([4, 6])
    rows.begin(1)
    for work in SURGERY.values():
        with pytest.raises(RuntimeError, match="inside a forward"):
            work(rows)
    rows.rollback()
    with pytest.raises(RuntimeError, match="inside"):
        rows.write(0, *noise(2, 1, 0)[:2])


@pytest.mark.parametrize("wrong", [(3, 2, 1, 5), (2, 1, 1, 5), (2, 2, 2, 5), (2, 2, 1, 4)])
def test_an_append_of_another_shape_is_refused(wrong: tuple[int, ...]) -> None:
    """One head would broadcast over all of them in silence."""
    rows = filled([4, 6])
    rows.begin(1)
    with pytest.raises(Mismatch):
        rows.write(0, mx.zeros(wrong), noise(2, 1, 0)[1])
    rows.rollback()
    assert rows.layout.offset == (4, 6)


def test_rows_of_different_geometry_or_dtype_are_not_merged() -> None:
    other = PackedRows(1)
    other.begin(2)
    other.write(0, mx.zeros((1, 2, 2, 5)), mx.zeros((1, 2, 2, 3)))
    other.commit()
    half = PackedRows(1)
    half.begin(2)
    half.write(0, mx.zeros((1, 2, 2, 5), mx.float16), mx.zeros((1, 2, 2, 3), mx.float16))
    half.commit()
    with pytest.raises(Mismatch, match="dtype"):
        PackedRows.merge_rows([other, half])
    with pytest.raises(Mismatch, match="layers"):
        PackedRows.merge_rows([other, filled([1])])


@pytest.mark.parametrize("ragged", [False, True])
def test_a_step_writes_in_place(ragged: bool) -> None:
    """A decode step allocates less than one plane: nothing holds the old planes while it is evaluated."""
    rows = PackedRows(1, rows=2)
    rows.begin(20_000)
    rows.write(0, mx.zeros((2, 3, 20_000, 16)), mx.zeros((2, 3, 20_000, 16)))
    rows.commit()
    if ragged:
        rows.trim(0, 2)
    mx.eval(rows.planes)
    mx.synchronize()
    for _ in range(3):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        rows.begin(1)
        keys, values = rows.write(0, mx.ones((2, 3, 1, 16)), mx.ones((2, 3, 1, 16)))
        rows.commit()
        read = keys[:, :, -1].sum() + values[:, :, -1].sum()
        mx.eval(read)
        del keys, values
        plane = rows.planes[0]
        assert plane is not None
        assert mx.get_peak_memory() - before < plane.nbytes / 4
        del plane


def test_twenty_thousand_steps_leave_no_graph_behind(tmp_path: object) -> None:
    """B50: positions are numbers, so there is nothing that could grow without being evaluated."""
    rows = PackedRows(1, rows=2)
    one = mx.ones((2, 1, 1, 2))
    for step in range(20_000):
        rows.begin(1)
        keys, _ = rows.write(0, one, one)
        rows.commit()
        mx.eval(keys)
        if step == 100:
            settled = mx.get_active_memory() - rows.nbytes_capacity
    assert mx.get_active_memory() - rows.nbytes_capacity < settled + 100_000
    assert rows.layout.offset == (20_000, 20_000)


def test_a_layer_shows_what_the_forward_has_written_to_it() -> None:
    """Models whose last layers read an earlier layer's keys and values ask for them inside the forward."""
    rows = filled([2, 3])
    first, second = FullLayer(rows, 0), FullLayer(rows, 1)
    new = noise(2, 2, seed=1)
    rows.begin(2)
    written = first.update_and_fetch(new[0], new[1])
    for again, fetched in zip(first.keys_and_values(), written, strict=True):
        assert again.shape[2] == 5
        assert raw(again) == raw(fetched)
    assert second.keys_and_values()[0].shape[2] == 3
    rows.rollback()
    assert first.keys_and_values()[0].shape[2] == 3
    with pytest.raises(ValueError, match="nothing yet"):
        FullLayer(PackedRows(1), 0).keys_and_values()
