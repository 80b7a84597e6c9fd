"""Each way to read packed rows, for every codec and reach, against float64 over each row's own tokens.

Rows are restored with NaN wherever there is no token; what a query sees is known from positions alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.caches.content import (
    AFFINE4,
    AFFINE8,
    DENSE,
    HALF,
    TURBO,
    Kept,
    Layer,
    decoded,
    encoded,
    raw,
    with_padding,
)
from tests.caches.oracle import BOUND, assert_close, attended, exact, floats
from tests.caches.tokens import visible

from stateroom.caches import reads
from stateroom.caches.codecs.affine import Affine
from stateroom.caches.codecs.scheme import Scheme, codecs_for
from stateroom.caches.layers.attention_layer import AttentionLayer
from stateroom.caches.layout import Layout
from stateroom.caches.masks import narrowed
from stateroom.caches.reach import FULL, Chunk, Reach, Window
from stateroom.caches.rows import PackedRows
from stateroom.kernels import dispatch, host

LAYERS = [DENSE, HALF, AFFINE4, AFFINE8, TURBO]
REACHES = [FULL, Window(7), Window(11, 3), Chunk(5)]
SCHEMES = {"affine4": Scheme("affine4"), "affine8": Scheme("affine8"), "turbo8": Scheme("turbo")}
REPEATS = 3  # query heads a KV head
SCALE = 0.31


def finite(random: np.random.Generator, layer: Layer, rows: int, heads: int, n: int, width: int) -> mx.array:
    # Around something else than zero: the mean of thousands must not be small beside each of them.
    numbers = random.normal(size=(rows, heads, n, width)).astype(np.float32) + 0.75
    return mx.array(numbers).astype(layer.dtype)


# The row's length before and after the read, and the query's position → the tokens that it sees.
Sees = Callable[[int, int, int], set[int]]


def within(reach: Reach) -> Sees:
    return lambda _, __, at: visible(reach, at)


def around(window: int) -> Sees:
    return lambda _, end, at: {token for token in range(end) if abs(at - token) < window}


def or_in_one_block(reach: Reach, blocks: Sequence[tuple[int, int]]) -> Sees:
    def sees(before: int, _: int, at: int) -> set[int]:
        start, end = next(((a, b) for a, b in blocks if a <= at - before < b), (0, 0))
        return visible(reach, at) | set(range(before + start, before + end))

    return sees


def stored_and_block(reach: Reach) -> Sees:
    return lambda before, end, _: (visible(reach, before) - {before}) | set(range(before, end))


class Reading:
    """A group of one layer, with NaN in its padding, and what each of its rows holds."""

    def __init__(
        self,
        layer: Layer,
        reach: Reach,
        lengths: Sequence[int],
        pads: Sequence[int],
        seed: int,
        repeats: int = REPEATS,
    ) -> None:
        self.layer, self.random, self.repeats = layer, np.random.default_rng(seed), repeats
        self.rows = PackedRows([layer.codecs], len(lengths), reach)
        self.kept = []
        for length in lengths:
            content = [x[:, :, :length] for x in self.drawn(1, max(length, 1))[1:]]
            empty = Kept.empty([layer])
            self.kept.append(empty.and_then([p[0] for p in encoded([layer], content)]) if length else empty)
        layout = Layout(tuple(pads), tuple(lengths))
        if layout.width:
            self.rows.restore_state(with_padding(self.kept, [layer], layout, reach, layout.width + 2), layout)

    def drawn(self, rows: int, n: int) -> tuple[mx.array, mx.array, mx.array]:
        layer = self.layer
        return (
            finite(self.random, layer, rows, layer.heads * self.repeats, n, layer.key_width),
            finite(self.random, layer, rows, layer.heads, n, layer.key_width),
            finite(self.random, layer, rows, layer.heads, n, layer.value_width),
        )

    def check(
        self,
        read: Callable[..., mx.array],
        n: int,
        sees: Sees,
        stored: bool = True,
        bound: float = BOUND,
        **given: object,
    ) -> None:
        """`stored`: what is read is what the codec makes of the new keys and values, and it stays."""
        queries, keys, values = self.drawn(len(self.kept), n)
        if stored:
            self.rows.begin(n)
        got = read(self.rows, 0, queries, keys, values, self.layer.scale, **given)
        assert got.dtype == self.layer.dtype
        assert got.shape == (*queries.shape[:3], self.layer.value_width)
        want = []
        new = encoded([self.layer], [keys, values])
        for row, kept in enumerate(self.kept):
            before = kept.length
            if stored:
                self.kept[row] = kept = kept.and_then([plane[row] for plane in new])
            all_keys, all_values = exact(self.layer, kept.planes) if kept.length else (None, None)
            if not stored:
                all_keys, all_values = (
                    floats(x[row]) if held is None else np.concatenate([held, floats(x[row])], axis=1)
                    for held, x in zip((all_keys, all_values), (keys, values), strict=True)
                )
            assert all_keys is not None
            assert all_values is not None
            shown = [sorted(sees(before, before + n, before + query)) for query in range(n)]
            want.append(attended(floats(queries[row]), all_keys, all_values, shown, self.layer.scale))
        assert_close(got, np.stack(want), bound)
        if stored:
            self.rows.commit()


@st.composite
def readings(draw: st.DrawFn, layer: Layer, reach: Reach) -> Reading:
    rows = 1 if isinstance(reach, Chunk) else draw(st.integers(1, 3))
    lengths = [draw(st.integers(0, 30)) for _ in range(rows)]
    pads = [draw(st.integers(0, 9)) for _ in range(rows)]
    if rows == 1 and draw(st.booleans()):
        pads = [0]
    return Reading(layer, reach, lengths, pads, draw(st.integers(0, 2**16)))


@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.codecs[0].name)
@settings(max_examples=8)
@given(data=st.data())
def test_named_reads(layer: Layer, reach: Reach, data: st.DataObject) -> None:
    """B03, B06, B14: several in turn, so that each reads what the others have stored."""
    reading = data.draw(readings(layer, reach))
    names = ["decode", "window", "committed", "bidirectional", "block"]
    if not reach.pinned and not isinstance(reach, Chunk):
        names += ["narrow", "encoder"]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=2, max_size=4)):
        n = 1 if name == "decode" else data.draw(st.integers(1, 6), "n")
        if name == "decode":
            reading.check(reads.append_decode, n, within(reach))
        elif name == "window":
            reading.check(reads.append_window, n, within(reach))
        elif name == "committed":
            reading.check(reads.append_committed, n, within(reach))
        elif name == "narrow":
            window = data.draw(st.integers(1, 9), "window")
            reading.check(reads.append_window, n, within(narrowed(reach, window)), window=window)
        elif name == "encoder":
            window = data.draw(st.integers(1, 9 if reach is FULL else 7), "window")
            reading.check(reads.append_encoder_window, n, around(window), window=window)
        elif name == "bidirectional":
            start = data.draw(st.integers(0, n), "start")
            blocks = [(0, start), (start, data.draw(st.integers(start, n), "end"))]
            reading.check(reads.append_bidirectional, n, or_in_one_block(reach, blocks), blocks=blocks)
        else:
            reading.check(reads.read_block, n, stored_and_block(reach), stored=False)


# ------------------------------------------------------------ a model's own reads


class Attending(Reading):
    """The same through the seam that models call: `give` makes the mask and the values that they pass."""

    def attend(
        self,
        n: int,
        sees: Callable[[int], set[int]],
        sinks: bool = False,
        per_head: bool = False,
        added: bool = False,
        keys_as_values: bool = False,
    ) -> None:
        queries, keys, values = self.drawn(len(self.kept), n)
        heads = queries.shape[1]
        layer = AttentionLayer(self.rows, 0)
        self.rows.begin(n)
        mask = layer.make_mask(n)
        got_keys, got_values = layer.update_and_fetch(keys, values)
        layout, first, columns = self.rows.forward.layout, self.rows.forward.first, got_keys.shape[2]
        scores, extra = None, None
        if added or per_head:
            scores = self.random.normal(size=(len(self.kept), heads, n, columns)).astype(np.float32)
            hidden = np.zeros((1, 1, n, columns), bool) if mask is None else ~np.array(mask)
            if per_head:
                scores = np.where(scores > -0.5, np.float32(0), np.float32(-np.inf))
                for row, end in enumerate(layout.ends):
                    scores[row, :, :, end - first] = 0  # no head is blind
                mask = mx.array((scores == 0) & ~hidden)
            else:
                added_scores = mx.array(scores).astype(queries.dtype)
                scores = floats(added_scores).astype(np.float32)
                mask = mx.where(mx.array(hidden), mx.finfo(queries.dtype).min, added_scores)
        logits = self.random.normal(size=heads).astype(np.float32) if sinks else None
        passed = got_keys if keys_as_values else got_values
        given = None if logits is None else mx.array(logits).astype(queries.dtype)
        got = layer.attend(queries, got_keys, passed, self.layer.scale, mask, given)
        new, want = encoded([self.layer], [keys, values]), []
        for row, kept in enumerate(self.kept):
            before = kept.length
            self.kept[row] = kept = kept.and_then([plane[row] for plane in new])
            all_keys, all_values = exact(self.layer, kept.planes)
            if scores is not None or keys_as_values:  # what the model was given is read, decoded
                all_keys, all_values = (floats(x) for x in decoded(self.layer, kept.planes))
            if scores is not None:
                # Column by column, of tokens that have one.
                at = np.arange(kept.length) - layout.forgotten[row] + layout.left_pad[row] - first
                extra = np.where(at >= 0, scores[row][:, :, np.maximum(at, 0)], 0).astype(np.float64)
            shown = [sorted(sees(before + query)) for query in range(n)]
            with np.errstate(invalid="ignore"):
                want.append(
                    attended(
                        floats(queries[row]),
                        all_keys,
                        all_keys if keys_as_values else all_values,
                        shown,
                        self.layer.scale,
                        None if given is None else floats(given),
                        extra,
                    )
                )
        assert_close(got, np.stack(want))
        self.rows.commit()


def attending(layer: Layer, reach: Reach, seed: int) -> Attending:
    alone = isinstance(reach, Chunk)
    return Attending(layer, reach, [13] if alone else [13, 2, 30], [0] if alone else [5, 0, 3], seed)


@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.codecs[0].name)
def test_sinks(layer: Layer, reach: Reach) -> None:
    """Logits that take their share of the softmax and bring no value, as gpt-oss has them."""
    group = attending(layer, reach, 3)
    for n in (1, 4, 1):
        group.attend(n, lambda at: visible(reach, at), sinks=True)


@pytest.mark.parametrize("kind", ["added", "per_head", "keys_as_values", "both"])
@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.codecs[0].name)
def test_masks_of_the_models_own(layer: Layer, reach: Reach, kind: str) -> None:
    """deepseek adds the scores of positions as a mask, per head, and reads its latents as keys and values."""
    group = attending(layer, reach, 4)
    for _ in range(3):
        group.attend(
            1,
            lambda at: visible(reach, at),
            added=kind in ("added", "both"),
            per_head=kind == "per_head",
            keys_as_values=kind in ("keys_as_values", "both"),
        )


# ------------------------------------------------------------ what went wrong elsewhere


def test_what_slid_out_of_a_window_contributes_nothing() -> None:
    """B06: 600 tokens on a full cache, of a model that asks for 512; one token, and several."""
    row = Reading(DENSE, FULL, [600], [0], 5)
    row.kept[0].planes[0][:, :40] = 1e4  # keys that would take all of the softmax
    layout = row.rows.layout
    row.rows.restore_state(with_padding(row.kept, [DENSE], layout, FULL, 600), layout)
    for n in (1, 3, 1):
        row.check(reads.append_window, n, within(Window(512)), window=512)


@pytest.mark.parametrize("layer", [AFFINE8, AFFINE4, TURBO], ids=lambda layer: layer.codecs[0].name)
def test_quantised_rows_of_four_and_forty_tokens(layer: Layer) -> None:
    """B11: packed; a prefill of 3, then decodes. The mask is as wide as what is stored."""
    group = Attending(layer, FULL, [4, 40], [36, 0], 6)
    for n in (3, 1, 1):
        group.attend(n, lambda at: set(range(at + 1)))


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("repeats", [1, 3, 8])
@pytest.mark.parametrize(("layer", "bits"), [(AFFINE4, 4), (AFFINE8, 8)])
def test_few_query_rows_on_shared_heads(layer: Layer, bits: int, repeats: int, tokens: int) -> None:
    """B37: against dequantising first, for one row and for a group."""
    assert layer.codecs[0].name == f"affine{bits}"
    for lengths, pads in (([33], [0]), ([33, 7], [0, 26])):
        group = Attending(layer, FULL, lengths, pads, 7, repeats)
        group.attend(tokens, lambda at: set(range(at + 1)))


@pytest.mark.parametrize("layer", [AFFINE4, AFFINE8, TURBO], ids=lambda layer: layer.codecs[0].name)
def test_an_extracted_row_decodes_to_what_a_contiguous_copy_does(layer: Layer) -> None:
    """B36: 16 tokens of a capacity of 256, beside a longer row; a copy, a merge and a trim of it too."""
    group = Reading(layer, FULL, [16, 80], [64, 0], 8)
    rows = group.rows
    feed_one = group.drawn(2, 1)
    rows.begin(1)
    rows.write(0, *feed_one[1:])
    rows.commit()
    rows.trim(0, 1)
    want = [raw(x) for x in decoded(layer, group.kept[0].planes)]
    alone = rows.extract_row(0)
    again = PackedRows.merge_rows([alone, alone.copy()])
    again.align_rows([3, 5])
    for other in (alone, alone.copy(), again.extract_row(1)):
        assert [raw(x[0]) for x in other.temporal_view(0)] == want


@pytest.mark.parametrize("length", [32_766, 32_767, 32_768, 36_863])
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("layer", [DENSE, AFFINE4], ids=lambda layer: layer.codecs[0].name)
def test_columns_past_sixteen_bits(layer: Layer, window: int | None, length: int) -> None:
    """B02: a long row packed with one of 100 tokens, by one token and by several."""
    narrow = replace(layer, heads=1)
    if layer is AFFINE4:
        codec = Affine(4, 32, mx.float32)
        narrow = Layer((codec, codec), 1, 32, 32, mx.float32)
    group = Reading(narrow, FULL, [length, 100], [0, length - 100], 9)
    for n in (1, 3):
        seen = within(FULL if window is None else Window(window))
        # Sums of so many terms in float32 are off by more.
        group.check(reads.append_window, n, seen, bound=5 * BOUND, window=window)


@pytest.mark.parametrize("form", ["quantised", "host"])
@pytest.mark.parametrize("layer", [AFFINE4, AFFINE8, TURBO], ids=lambda layer: layer.codecs[0].name)
def test_other_forms_of_the_kernels_read_the_same(layer: Layer, form: dispatch.Form) -> None:
    """mlx's own quantised product, and our kernel compiled for the host, where it takes such heads."""
    if form == "host" and not host.compiler():
        pytest.skip("no g++")
    wide = Layer(codecs_for(SCHEMES[layer.codecs[0].name], 64, 128, layer.dtype), 2, 64, 128, layer.dtype)
    group = Attending(wide, FULL, [13, 2, 30], [5, 0, 3], 10)
    with dispatch.forced(form):
        for n in (1, 4, 1):
            group.attend(n, lambda at: set(range(at + 1)))


def test_layers_of_one_forward_share_their_masks() -> None:
    """One array a forward and kind of read, whichever layers ask for it."""
    rows = PackedRows.dense(3, rows=2)
    one = mx.ones((2, 6, 2, 5)), mx.ones((2, 2, 2, 5)), mx.ones((2, 2, 2, 5))
    blocks = [(0, 2)]
    for length in (2, 2):
        rows.begin(length)
        for layer in range(3):
            rows.write(layer, *one[1:])
        rows.commit()
    rows.trim(0, 1)
    rows.begin(2)
    for layer in range(2):
        reads.append_window(rows, layer, *one, SCALE)
    assert len(rows.forward.masks) == 1
    rows.rollback()
    rows.begin(2)
    for layer in range(3):
        reads.append_bidirectional(rows, layer, *one, SCALE, blocks)
    assert len(rows.forward.overlays) == 1
    rows.rollback()
    rows.begin(2)
    reads.append_bidirectional(rows, 0, *one, SCALE, blocks)
    reads.append_bidirectional(rows, 1, *one, SCALE, [(0, 1)])
    reads.append_encoder_window(rows, 2, *one, SCALE, 3)
    assert len(rows.forward.overlays) == 3, "other blocks are other masks"
    rows.rollback()


def test_reads_that_can_not_be_are_refused() -> None:
    rows = PackedRows([DENSE.codecs], 1, Window(7))
    one = mx.ones((1, 2, 2, 5)), mx.ones((1, 1, 2, 5)), mx.ones((1, 1, 2, 5))
    rows.begin(2)
    with pytest.raises(ValueError, match="one token a row"):
        reads.append_decode(rows, 0, *one, SCALE)
    with pytest.raises(ValueError, match="encoder's window of 8"):
        reads.append_encoder_window(rows, 0, *one, SCALE, 8)
    reads.append_window(rows, 0, *one, SCALE)
    rows.commit()
    rows.begin(1)
    with pytest.raises(RuntimeError, match="inside a forward"):
        reads.read_block(rows, 0, *one, SCALE)
    rows.rollback()
    for reach in (Window(7, 2), Chunk(5)):
        other = PackedRows([DENSE.codecs], 1, reach)
        other.begin(2)
        with pytest.raises(ValueError, match="encoder's window of 3"):
            reads.append_encoder_window(other, 0, *one, SCALE, 3)
