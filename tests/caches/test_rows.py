"""Packed rows: what each operation promises and refuses; `test_surgery.py` tries their sequences."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from tests.caches.content import (
    AFFINE4,
    AFFINE8,
    DENSE,
    HALF,
    LAYERS,
    TURBO,
    Layer,
    Twin,
    array,
    assert_zeros_outside,
    bits,
    decoded,
    dtypes,
    encoded,
    feed,
    live,
    noise,
    packed,
    raw,
    with_padding,
)

from stateroom.caches.errors import Mismatch
from stateroom.caches.layers.attention_layer import AttentionLayer
from stateroom.caches.layout import CAPACITY_STEP, Layout
from stateroom.caches.reach import FULL, Chunk, Reach, Window
from stateroom.caches.rows import PackedRows

REACHES = [FULL, Window(7), Window(11, 3)]
WINDOWS = pytest.mark.parametrize("reach", REACHES, ids=str)


def filled(lengths: list[int], reach: Reach = FULL, seed: int = 0) -> Twin:
    """A group of rows of these lengths."""
    alone = []
    for i, length in enumerate(lengths):
        twin = Twin.start(LAYERS, 1, reach)
        twin.seed = 100 * seed + 10 * i
        if length:
            twin.append(length)
        alone.append(twin)
    rows = [row for twin in alone for row in twin.rows]
    return Twin(LAYERS, PackedRows.merge_rows([twin.packed for twin in alone]), rows, seed=seed)


@WINDOWS
@pytest.mark.parametrize("lengths", [[3], [3, 7], [0, 5, 0], [0, 0], [256, 1, 300], [11, 2, 13, 0]])
def test_extract_of_merge_is_the_row_itself(lengths: list[int], reach: Reach) -> None:
    alone = [filled([length], reach, seed=i).packed for i, length in enumerate(lengths)]
    merged = PackedRows.merge_rows(alone)
    for i, row in enumerate(alone):
        back = merged.extract_row(i)
        assert (live(back, 0) == live(row, 0)) if lengths[i] else back.layout == Layout.empty(1)
        assert back.capacity == lengths[i], "no spare capacity, no padding"


def test_joining_a_group_to_rows_never_filled() -> None:
    """B08: five rows, and every plane has five."""
    twin = filled([4, 9])
    empty = Twin.start(LAYERS, 3)
    joined = Twin(LAYERS, PackedRows.merge_rows([twin.packed, empty.packed]), twin.rows + empty.rows)
    joined.append(6)
    joined.check()
    assert joined.packed.layout.offset == (10, 15, 6, 6, 6)
    assert all(plane is not None and plane.shape[0] == 5 for plane in joined.packed.planes)


def test_filter_before_the_first_append_and_to_nothing() -> None:
    """B10: a group that holds nothing is legal, and so is a group without rows."""
    twin = Twin.start(LAYERS, 3)
    twin.packed.filter_rows([2, 0])
    twin.rows = twin.rows[:2]
    twin.append(3)
    twin.check()
    twin.packed.filter_rows([])
    rows = twin.packed
    assert (rows.layout.rows, rows.layout.width, rows.nbytes_capacity) == (0, 0, 0)
    other = filled([5])
    again = PackedRows.merge_rows([rows, other.packed])
    assert live(again, 0) == live(other.packed, 0)


def test_trim_is_per_row_and_refuses_more_than_the_row_holds() -> None:
    """X3."""
    twin = filled([3, 8])
    with pytest.raises(ValueError, match="holds 3"):
        twin.packed.trim(0, 5)
    with pytest.raises(ValueError, match="holds 8"):
        twin.packed.trim(1, -1)
    twin.check()
    twin.packed.trim(0, 3)
    assert twin.packed.layout.offset == (0, 8)


@WINDOWS
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.codecs[0].name)
def test_no_trimmed_token_is_handed_on(layer: Layer, reach: Reach) -> None:
    """B31: what a row forgot, in whatever way, is in no array that another owner gets."""
    random = np.random.default_rng(5)
    rows, rounds = packed([layer], 1, reach), packed([layer], 2, reach)
    for group in (rows, rounds):
        feed(group, noise(random, [layer], group.layout.rows, 4))
    secret = noise(random, [layer], 1, 3)
    feed(rows, secret)
    rows.trim(0, 3)
    rounds.spec_round_begin()
    feed(rounds, [mx.concatenate([x, x]) for x in secret])
    rounds.spec_round_rollback([0, 0])
    group = PackedRows.merge_rows([rows, packed([layer], 1, reach), rounds])
    handed = [
        rows.extract_row(0),
        rows.copy(),
        rows.recoded([layer.codecs]),
        rounds,
        group,
        group.extract_row(0),
    ]
    planes = [array(p[0], dtype) for p, dtype in zip(encoded([layer], secret), dtypes(layer), strict=True)]
    words = {raw(plane[:, token]) for plane in planes for token in range(3)}
    words = {word for word in words if len(word) > 4}  # a lone scale may be another token's too
    assert words
    for other in handed:
        for plane in other.arrays():
            for row in range(plane.shape[0]):
                for column in range(plane.shape[2]):
                    assert raw(plane[row, :, column]) not in words


def test_a_copy_never_aliases() -> None:
    """B30: either may write, and the other keeps its bytes; so may rows that share their arrays."""
    twin = filled([5])
    others = [twin.with_packed(twin.packed.copy()), twin.with_packed(twin.packed.sharing())]
    for n, other in enumerate(others):
        other.seed = 7 + n
        other.append(2)
        twin.check()
    twin.append(2)
    for each in (twin, *others):
        each.check()
    assert len({raw(each.packed.arrays()[0]) for each in (twin, *others)}) == 3


SURGERY: dict[str, Callable[[PackedRows], object]] = {
    "merge": lambda rows: PackedRows.merge_rows([rows, filled([3]).packed]),
    "extract": lambda rows: rows.extract_row(1),
    "filter": lambda rows: rows.filter_rows([1]),
    "align": lambda rows: rows.align_rows([3, 1]),
    "trim": lambda rows: rows.trim(0, 2),
    "copy": lambda rows: rows.copy(),
    "share": lambda rows: rows.sharing(),
    "recode": lambda rows: rows.recoded(rows.codecs),
    "restore": lambda rows: rows.restore_state(rows.planes, rows.layout),
    "forget": lambda rows: rows.forget_unseen(),
    "round": lambda rows: rows.spec_round_begin(),
    "prefill": lambda rows: rows.prepare_prefill([1, 2]),
    "padding": lambda rows: rows.restore_ends([1, 0]),
    "donor": lambda rows: rows.donor_view(0),
    "view": lambda rows: rows.temporal_view(0),
}


@pytest.mark.parametrize("name", SURGERY)
def test_surgery_waits_for_the_end_of_a_forward(name: str) -> None:
    twin = filled([4, 6])
    twin.packed.begin(1)
    with pytest.raises(RuntimeError, match="inside a forward"):
        SURGERY[name](twin.packed)
    twin.packed.rollback()
    twin.check()


def test_nothing_is_written_outside_of_a_forward() -> None:
    rows = filled([4, 6]).packed
    with pytest.raises(RuntimeError, match="inside a forward"):
        rows.write(0, *noise(np.random.default_rng(0), LAYERS, 2, 1)[:2])
    rows.begin(1)
    with pytest.raises(RuntimeError, match="open already"):
        rows.begin(1)
    for n, some in ((0, rows), (1, packed(LAYERS, 0))):
        with pytest.raises((ValueError, RuntimeError), match="forward"):
            some.begin(n)


@WINDOWS
@pytest.mark.parametrize("keep", [[0, 1, 3], [3, 0, 0], 2, 0])
def test_each_row_keeps_its_own_part_of_a_round(keep: int | list[int], reach: Reach) -> None:
    """What the others drop is zeros again, also where the planes were full."""
    for lengths in ([5, 253, 20], [4, 4, 4]):
        twin = filled(lengths, reach)
        twin.packed.spec_round_begin()
        twin.append(2)
        twin.append(1)
        twin.packed.spec_round_rollback(keep)
        kept = [keep] * 3 if isinstance(keep, int) else keep
        twin.rows = [row.until(n + k) for row, n, k in zip(twin.rows, lengths, kept, strict=True)]
        twin.check()
        twin.append(1)
        twin.check()


@pytest.mark.parametrize("rows", [1, 2])
@WINDOWS
def test_a_round_of_any_length_can_be_taken_back(reach: Reach, rows: int) -> None:
    """Windows forget nothing that the rows would see again, however much was appended."""
    twin = filled([100, 40][:rows], reach)
    before = twin.lengths
    twin.packed.spec_round_begin()
    for n in (300, 1, 200):
        twin.append(n)
        twin.packed.forget_unseen()
    twin.packed.spec_round_rollback(0)
    twin.rows = [row.until(length) for row, length in zip(twin.rows, before, strict=True)]
    twin.check()
    twin.append(300)
    twin.check()


def test_a_round_is_opened_once_and_ends_once() -> None:
    rows = filled([4, 6]).packed
    for work in (rows.spec_round_commit, lambda: rows.spec_round_rollback(0), lambda: rows.round_offsets):
        with pytest.raises(RuntimeError, match="no speculative round"):
            work()
    rows.spec_round_begin()
    with pytest.raises(RuntimeError, match="open already"):
        rows.spec_round_begin()
    with pytest.raises(ValueError, match="can't keep"):
        rows.spec_round_rollback([0, 1])
    rows.spec_round_rollback(0)


def test_a_ragged_prefill_ends_when_all_of_it_was_fed() -> None:
    """Ended too early, it would take real tokens for padding."""
    twin = filled([4, 6])
    rows = twin.packed
    with pytest.raises(RuntimeError, match="no ragged prefill"):
        rows.finalize_prefill()
    for lengths in ([1], [1, -1], [1, 2, 3]):
        with pytest.raises(ValueError, match="for 2 rows"):
            rows.prepare_prefill(lengths)
    rows.prepare_prefill([5, 2])
    assert rows.right_pad == (0, 3)
    feed(rows, noise(np.random.default_rng(0), LAYERS, 2, 3))
    with pytest.raises(RuntimeError, match="prompts end at"):
        rows.finalize_prefill()
    feed(rows, noise(np.random.default_rng(0), LAYERS, 2, 2))
    saved = rows.sharing()
    rows.finalize_prefill()
    assert rows.layout.offset == (9, 8)
    again = packed(LAYERS, 2)
    again.restore_state(list(saved.planes), saved.layout)
    for pads in ([1], [0, -1], [0, 12]):
        with pytest.raises(ValueError):
            again.restore_ends(pads)
    again.restore_ends((0, 3))
    again.finalize_prefill()
    assert [live(again, i) for i in range(2)] == [live(rows, i) for i in range(2)]


@WINDOWS
def test_a_long_prompt_beside_a_short_one(reach: Reach) -> None:
    """The short one's padding passes for tokens until the end, but takes no real ones out of sight."""
    twin = filled([40, 30, 2], reach)
    lengths = [600, 1, 50]
    twin.packed.prepare_prefill(lengths)
    for start in range(0, 600, 200):
        content = noise(np.random.default_rng(start), LAYERS, 3, 200)
        feed(twin.packed, content)
        new = encoded(LAYERS, content)
        real = [min(max(length - start, 0), 200) for length in lengths]
        twin.rows = [
            row.and_then([plane[i, :, : real[i]] for plane in new]) for i, row in enumerate(twin.rows)
        ]
    twin.packed.finalize_prefill()
    twin.check()
    twin.append(300)
    twin.check()


@pytest.mark.parametrize("wrong", [(3, 2, 1, 5), (2, 1, 1, 5), (2, 2, 2, 5), (2, 2, 1, 4)])
def test_an_append_of_another_shape_is_refused(wrong: tuple[int, ...]) -> None:
    """One head would broadcast over all of them in silence."""
    twin = filled([4, 6])
    twin.packed.begin(1)
    with pytest.raises(Mismatch):
        twin.packed.write(0, mx.zeros(wrong), noise(np.random.default_rng(0), LAYERS, 2, 1)[1])
    twin.packed.rollback()
    twin.check()


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        (([DENSE], FULL), ([HALF], FULL), "geometry or dtype"),
        (([DENSE], FULL), ([Layer(DENSE.codecs, 2, 5, 3, mx.float16)], FULL), "geometry or dtype"),
        (([DENSE], FULL), ([DENSE, DENSE], FULL), "layers, reach or codec"),
        (([DENSE], FULL), ([AFFINE4], FULL), "layers, reach or codec"),
        (([AFFINE4], FULL), ([AFFINE8], FULL), "layers, reach or codec"),
        (
            ([TURBO], FULL),
            ([Layer(TURBO.codecs[::-1], 1, 128, 64, mx.float32)], FULL),
            "layers, reach or codec",
        ),
        (([DENSE], FULL), ([DENSE], Window(7)), "layers, reach or codec"),
        (([DENSE], Window(7)), ([DENSE], Window(7, 1)), "layers, reach or codec"),
        (([DENSE], Window(7)), ([DENSE], Chunk(7)), "layers, reach or codec"),
    ],
)
def test_rows_of_different_layers_are_not_merged(
    one: tuple[list[Layer], Reach], other: tuple[list[Layer], Reach], why: str
) -> None:
    made = []
    for layers, reach in (one, other):
        rows = packed(layers, 1, reach)
        feed(rows, noise(np.random.default_rng(0), layers, 1, 2))
        made.append(rows)
    with pytest.raises(Mismatch, match=why):
        PackedRows.merge_rows(made)


def test_nan_before_a_lone_row_does_not_stay() -> None:
    """Behind its end a lone row reads nothing, but what is before its start is read under a mask."""
    twin = filled([5])
    layout = Layout((3,), (5,))
    twin.packed.restore_state([*with_padding(twin.rows, LAYERS, layout, FULL, 11)], layout)
    twin.check()
    group = Twin(LAYERS, PackedRows.merge_rows([twin.packed, filled([9]).packed]), [])
    assert_zeros_outside(group.packed)


@pytest.mark.parametrize("wrong", ["few planes", "rows", "narrow", "no planes", "uneven"])
def test_a_state_that_does_not_fit_is_refused(wrong: str) -> None:
    twin = filled([4, 6])
    planes, layout = list(twin.packed.copy().planes), twin.packed.layout
    first = planes[0]
    assert first is not None
    if wrong == "few planes":
        planes.pop()
    elif wrong == "rows":
        layout = Layout((0,), (4,))
    elif wrong == "narrow":
        layout = Layout((0, 0), (4, 7))
    elif wrong == "no planes":
        planes = [None] * len(planes)
    else:
        planes[0] = first[:, :, :-1]
    with pytest.raises(Mismatch):
        twin.packed.restore_state(planes, layout)
    twin.check()


# ------------------------------------------------------------ columns


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.codecs[0].name)
def test_capacity_grows_in_steps(layer: Layer, ragged: bool) -> None:
    twin = Twin.start([layer], 2)
    twin.append(250)
    if ragged:
        twin.packed.trim(0, 3)
        twin.rows[0] = twin.rows[0].until(247)
    for n in (5, 1, 1, 300):
        twin.append(n)
        twin.check()
        columns = twin.packed.layout.width
        assert twin.packed.capacity == -(-columns // CAPACITY_STEP) * CAPACITY_STEP


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
def test_a_step_writes_in_place(ragged: bool, quantised: bool) -> None:
    """A decode step allocates less than one plane: nothing holds the old planes while it is evaluated."""
    layer = (
        Layer(AFFINE8.codecs, 3, 128, 32, mx.bfloat16)
        if quantised
        else Layer(DENSE.codecs, 3, 16, 16, mx.float32)
    )
    rows = packed([layer], 2)
    feed(
        rows, [mx.zeros((2, 3, 20_000, width), layer.dtype) for width in (layer.key_width, layer.value_width)]
    )
    if ragged:
        rows.trim(0, 2)
    mx.eval(rows.planes)
    mx.synchronize()
    plane = min(plane.nbytes for plane in rows.arrays() if plane.nbytes > 2**20)
    one = [mx.ones((2, 3, 1, width), layer.dtype) for width in (layer.key_width, layer.value_width)]
    for _ in range(3):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        feed(rows, one)
        mx.eval(rows.planes)
        assert mx.get_peak_memory() - before < plane / 4


@pytest.mark.parametrize("reach", [Window(7), Window(11, 3), Chunk(5)], ids=str)
def test_a_window_moves_its_rows_seldom_and_stays_small(reach: Reach) -> None:
    """Columns are cut off when the planes are full, not at every step."""
    twin = Twin.start([DENSE], 1, reach)
    widths = []
    for _ in range(1000):
        feed(twin.packed, noise(np.random.default_rng(0), [DENSE], 1, 1))
        widths.append(twin.packed.layout.width)
        assert twin.packed.capacity == CAPACITY_STEP
    assert sum(now <= before for before, now in pairwise(widths)) <= 5
    feed(twin.packed, noise(np.random.default_rng(0), [DENSE], 1, 2000))
    feed(twin.packed, noise(np.random.default_rng(0), [DENSE], 1, 1))
    assert twin.packed.capacity <= 2 * CAPACITY_STEP, "a long prompt is forgotten as soon as it is read"


def test_a_layer_shows_what_the_forward_has_written_to_it() -> None:
    """Models whose last layers read an earlier layer's keys and values ask for them inside the forward."""
    rows = filled([2, 3]).packed
    first, second = AttentionLayer(rows, 0), AttentionLayer(rows, 1)
    new = noise(np.random.default_rng(1), LAYERS, 2, 2)
    rows.begin(2)
    written = first.update_and_fetch(new[0], new[1])
    for again, fetched in zip(first.keys_and_values(), written, strict=True):
        assert again.shape[2] == 5
        assert raw(again) == raw(fetched)
    assert second.keys_and_values()[0].shape[2] == 3
    rows.rollback()
    assert first.keys_and_values()[0].shape[2] == 3
    with pytest.raises(ValueError, match="nothing yet"):
        AttentionLayer(packed(LAYERS), 0).keys_and_values()


@pytest.mark.parametrize("reach", [Window(7), Window(11, 3)], ids=str)
def test_a_layer_that_a_forward_passed_over_keeps_its_columns(reach: Reach) -> None:
    """When the others' columns are cut off, its own move along."""
    layers = [DENSE, HALF]
    twin = Twin.start(layers, 2, reach)
    twin.append(250)
    twin.packed.trim(0, 3)
    twin.rows[0] = twin.rows[0].until(247)
    content = noise(np.random.default_rng(3), layers, 2, 20)
    rows = twin.packed
    rows.begin(20)
    rows.write(0, *content[:2])
    rows.commit()
    assert any(rows.layout.forgotten)
    for row, kept in enumerate(twin.rows):
        pad, held = rows.layout.left_pad[row], rows.layout.held[row] - 20
        tokens = [*range(reach.pinned), *range(kept.length - held + reach.pinned, kept.length)]
        for plane, want in zip(rows.planes[2:], kept.planes[2:], strict=True):
            assert plane is not None
            assert (bits(plane)[row, :, pad : pad + held] == want[:, tokens]).all()


# ------------------------------------------------------------ other codecs


@WINDOWS
@pytest.mark.parametrize("into", [AFFINE4, AFFINE8, TURBO], ids=lambda layer: layer.codecs[0].name)
def test_recoded_rows_hold_what_their_new_codec_makes_of_each_token(into: Layer, reach: Reach) -> None:
    """In groups too, whose padding stays zero; and an open round goes on."""
    dense = Layer(DENSE.codecs, into.heads, into.key_width, into.value_width, into.dtype)
    twin = Twin.start([dense], 3, reach)
    for n in (40, 3, 2):
        content = [x + 1 for x in noise(np.random.default_rng(n), [into], 3, n)]
        feed(twin.packed, content)
        new = encoded([dense], content)
        twin.rows = [row.and_then([plane[i] for plane in new]) for i, row in enumerate(twin.rows)]
        twin.packed.trim(1, 1)
        twin.rows[1] = twin.rows[1].until(twin.rows[1].length - 1)
    twin.packed.forget_unseen()
    twin.packed.spec_round_begin()
    recoded = twin.packed.recoded([into.codecs])
    assert recoded.layout == twin.packed.layout
    assert recoded.round_offsets == twin.packed.round_offsets
    assert_zeros_outside(recoded)
    for row in range(3):
        pad, end = twin.packed.layout.left_pad[row], twin.packed.layout.ends[row]
        keys, values = decoded(dense, [bits(plane[row])[:, pad:end] for plane in twin.packed.arrays()])
        assert live(recoded, row) == [
            plane.tobytes() for plane in encoded([into], [keys[None], values[None]])
        ]
    twin.check()
