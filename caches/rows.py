"""The keys and values of all layers of one reach, of a group of rows, in shared columns.

Ownership: every array here is replaced, never written in place, so that an array that is still held
elsewhere (a forward that failed, a copy) keeps its content. For the same reason nobody may hold an old
plane while a step is evaluated: mlx would copy the whole plane instead of writing into it.

A forward pass is `begin(n)`, one `write` per layer, then `commit` or `rollback`. Between forwards, every
column of a group of two or more rows that lies outside a row's live run is zero: masked columns are still
multiplied (by a weight of 0), and 0 x NaN is NaN. A lone row never reads past its end.

Rows whose reach is a window hold more than it: columns are cut off the front only when the planes are full,
so that a step moves nothing and the last tokens can be trimmed exactly (`TRIM_BACK` of them at any time).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from stateroom.caches import planes as plane_of
from stateroom.caches.codecs.codec import Codec
from stateroom.caches.codecs.dense import Dense
from stateroom.caches.errors import Mismatch
from stateroom.caches.layout import CAPACITY_STEP, Layout, capacity_for
from stateroom.caches.masks import Mask, boolean_mask, make_mask, narrowed, next_mask
from stateroom.caches.planes import Plane
from stateroom.caches.ragged import Ragged
from stateroom.caches.reach import FULL, Reach
from stateroom.kernels.spans import Spans

TRIM_BACK = 32  # tokens that a window can always be trimmed by: a speculative round, a step looked ahead
FORGET_MIN = 64  # columns; cutting fewer would move the rows too often

LayerCodecs = tuple[Codec, Codec]  # of keys and of values
Fetched = tuple[mx.array, mx.array]  # keys and values
DENSE: LayerCodecs = (Dense(), Dense())


@dataclass(slots=True)
class Forward:
    """What all layers of one forward share."""

    tokens: int
    layout: Layout  # before the append, after forgetting
    cut: int  # columns forgotten at the front
    first: int  # the first column that is read
    capacity: int
    position: int | mx.array  # of the first new token, for RoPE
    start: mx.array  # the column where all rows write, or [B, 1, n, 1] columns when ends differ
    scatter: bool
    width: int  # columns in use after the append
    before: tuple[list[Plane], Layout]
    masks: dict[tuple[int, Reach, bool], Mask] = field(default_factory=dict)
    overlays: dict[Hashable, mx.array] = field(default_factory=dict)  # masks of the named reads
    spans: dict[Reach | None, Spans] = field(default_factory=dict)
    fetched: dict[int, Fetched] = field(default_factory=dict)  # layer → what its model was given


@dataclass(frozen=True, slots=True)
class DonorView:
    """What a drafter reads of a layer: keys and values [B, Hkv, S, D], of row i the columns [start, end)."""

    keys: mx.array
    values: mx.array
    offsets: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]


class PackedRows:
    """The planes of some layers for `rows` rows, and the one layout they share."""

    __slots__ = ("_at", "_forward", "_junk", "_ragged", "_round", "codecs", "layout", "planes", "reach")

    def __init__(self, codecs: Sequence[LayerCodecs], rows: int = 1, reach: Reach = FULL) -> None:
        self.codecs = tuple(codecs)
        self.reach = reach
        self.layout = Layout.empty(rows)
        at = [0]
        for keys, values in self.codecs:
            at += [at[-1] + keys.planes, at[-1] + keys.planes + values.planes]
        self._at = tuple(at)  # where each layer's keys begin, then its values
        self.planes: list[Plane] = [None] * at[-1]
        self._forward: Forward | None = None
        self._junk = False  # a lone row may have bytes behind its end; it never reads there
        self._round: tuple[int, ...] | None = None  # offsets when a speculative round began
        self._ragged: Ragged | None = None  # an open ragged prefill

    @classmethod
    def dense(cls, layers: int, rows: int = 1, reach: Reach = FULL) -> PackedRows:
        """Rows that store keys and values as they come."""
        return cls([DENSE] * layers, rows, reach)

    @property
    def signature(self) -> Hashable:
        """The layout of the planes: rows may share a group only when it is equal."""
        return (self.reach, self.codecs)

    # ------------------------------------------------------------ one forward

    def begin(self, n: int, position: int | mx.array | None = None) -> None:
        """Opens the append of `n` tokens to every row. `position`: as `position`, if it was made already."""
        if self._forward is not None:
            raise RuntimeError("a forward is open already")
        if n < 1 or self.layout.rows < 1:
            raise ValueError(f"a forward of {n} tokens on {self.layout.rows} rows")
        position = self.position if position is None else position
        before = (list(self.planes), self.layout)
        cut, capacity = self._room(n)
        layout = self.layout.forget(cut) if cut else self.layout
        scatter = not layout.ends_agree
        self._forward = Forward(
            tokens=n,
            layout=layout,
            cut=cut,
            first=self._first(layout),
            capacity=capacity,
            position=position,
            start=_columns(layout, n) if scatter else mx.array([layout.width], dtype=mx.int32),
            scatter=scatter,
            width=layout.width + n,
            before=before,
        )

    def write(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends keys and values [B, Hkv, n, D] of one layer.

        Returns those of the columns that any query of this forward sees, [B, Hkv, S, D], as they are stored.
        """
        forward = self._open()
        start, planes = self._at[2 * layer], self.planes
        key_codec, value_codec = codecs = self.codecs[layer]
        if codecs is DENSE:  # at every layer of every step: no lists
            new_keys = planes[start] = self._appended(planes[start], keys, forward)
            new_values = planes[start + 1] = self._appended(planes[start + 1], values, forward)
            first, width = forward.first, forward.width
            fetched = new_keys[:, :, first:width], new_values[:, :, first:width]
            if forward.tokens > 1:
                forward.fetched[layer] = fetched
            return fetched
        for place, new in enumerate((*key_codec.encode(keys), *value_codec.encode(values)), start):
            planes[place] = self._appended(planes[place], new, forward)
        fetched = self._decoded(layer, forward.first, forward.width)
        forward.fetched[layer] = fetched
        return fetched

    def commit(self) -> None:
        """Every row now holds the tokens of the forward."""
        forward = self._open()
        if forward.cut:
            for i, old in enumerate(forward.before[0]):  # layers that this forward passed over
                if old is not None and self.planes[i] is old:
                    self.planes[i] = self._moved(old, forward)
        self.layout = forward.layout.append(forward.tokens)
        self._forward = None

    def rollback(self) -> None:
        """Puts the planes back as they were at `begin`."""
        self.planes, self.layout = self._open().before
        self._forward = None

    def make_room(self, n: int) -> None:
        """What `begin(n)` would do to make room, done now: forgets, grows, and silences what trims left."""
        self._refuse_inside_forward()
        cut, capacity = self._room(n)
        layout = self.layout.forget(cut) if cut else self.layout
        if cut or capacity > self.capacity or layout.rows == 1:
            planes: list[Plane] = []
            for plane in self.planes:
                moved = plane
                if moved is not None and cut:
                    moved = plane_of.forgetting(moved, self.layout, cut, self.reach.pinned)
                if moved is not None:
                    moved = plane_of.grown(moved[:, :, : layout.width] if self._junk else moved, capacity)
                planes.append(moved)
            self.planes, self.layout, self._junk = planes, layout, False

    def advance(self, planes: Sequence[mx.array], n: int) -> None:
        """Takes planes that `n` tokens of every row were written to, elsewhere."""
        self._refuse_inside_forward()
        held = iter(planes)
        self.planes = [None if plane is None else next(held) for plane in self.planes]
        self.layout = self.layout.append(n)

    @property
    def position(self) -> int | mx.array:
        """RoPE position of the next token: a number for a lone row, else int32 [B]."""
        if self._forward is not None:
            return self._forward.position
        # A scalar RoPE offset with more than one row and one token is wrong on some Metal builds.
        if self.layout.rows == 1:
            return self.layout.offset[0]
        return mx.array(self.layout.offset, dtype=mx.int32)

    def mask(self, n: int, window: int | None = None, as_array: bool = False) -> Mask:
        """The mask of `n` new tokens, made once for all layers of a forward that ask the same."""
        reach = narrowed(self.reach, window)
        key = (n, reach, as_array)
        leases = self._forward.masks if self._forward is not None else {}
        if key not in leases:
            layout, first = self._view()
            mask = make_mask(layout, n, reach, first)
            spelled = as_array and isinstance(mask, str)
            leases[key] = boolean_mask(layout, n, reach, first) if spelled else mask
        return leases[key]

    def leased(self, key: Hashable, make: Callable[[], mx.array]) -> mx.array:
        """A mask of the caller's own kind, made once for all layers of the open forward."""
        overlays = self._open().overlays
        if key not in overlays:
            overlays[key] = make()
        return overlays[key]

    def spans(self, mask: Mask) -> tuple[Spans, int | None] | None:
        """The columns that `mask`, one of `mask`'s, shows of whole planes, and the window; None: not ours."""
        forward = self._open()
        if isinstance(mask, mx.array):
            reach = next((key[1] for key, own in forward.masks.items() if own is mask), None)
            window = getattr(reach, "size", None)
            if reach is None or reach.pinned or reach.kind == "chunked":
                return None
        else:  # everything that is read
            reach, window = None, None
        if reach not in forward.spans:
            layout = forward.layout
            starts = layout.left_pad if reach is not None else (forward.first,) * layout.rows
            forward.spans[reach] = Spans.of(starts, [end + forward.tokens for end in layout.ends])
        return forward.spans[reach], window

    def stored(self, layer: int) -> tuple[Sequence[mx.array], Sequence[mx.array]]:
        """The planes of a layer's keys and of its values, whole."""
        start, middle, end = self._at[2 * layer : 2 * layer + 3]
        planes = [plane for plane in self.planes[start:end] if plane is not None]
        if not planes:
            raise ValueError("this layer holds nothing yet")
        return planes[: middle - start], planes[middle - start :]

    def shown(self, layer: int) -> tuple[Sequence[mx.array], Sequence[mx.array]]:
        """The same, cut to the columns that are read: those that `mask` is about."""
        first, width = self._read_columns(self._at[2 * layer])
        return self._cut(layer, first, width)

    def live(self, layer: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the columns that are read, what the open forward has written to this layer
        included."""
        first, width = self._read_columns(self._at[2 * layer])
        return self._decoded(layer, first, width)

    def _cut(self, layer: int, first: int, width: int) -> tuple[list[mx.array], list[mx.array]]:
        keys, values = self.stored(layer)
        return [plane[:, :, first:width] for plane in keys], [plane[:, :, first:width] for plane in values]

    def _decoded(self, layer: int, first: int, width: int) -> tuple[mx.array, mx.array]:
        keys, values = self._cut(layer, first, width)
        key_codec, value_codec = self.codecs[layer]
        return key_codec.decode(keys), value_codec.decode(values)

    def plane(self, layer: int, of_values: bool) -> Plane:
        """The first plane of a layer's keys or values, whole."""
        return self.planes[self._at[2 * layer + of_values]]

    def set_plane(self, layer: int, plane: mx.array, of_values: bool) -> None:
        """Takes a plane that a model has tied work to, or cleared.

        One of another shape is left: a model that reads keys only clears its values by zeros in the shape of
        the keys, which the values of other codecs don't have.
        """
        place = self._at[2 * layer + of_values]
        held = self.planes[place]
        if held is None or held.shape == plane.shape:
            self.planes[place] = plane

    @property
    def first_token(self) -> int:
        """The token of a lone row in the first column that is read."""
        layout, first = self._view()
        return layout.forgotten[0] + first

    def is_ours(self, layer: int, keys: mx.array, values: mx.array) -> bool:
        """Both are what this forward gave the layer's model, untouched."""
        given = self._forward.fetched.get(layer) if self._forward is not None else None
        return given is not None and given[0] is keys and given[1] is values

    def next_token(self, layer: int) -> tuple[Sequence[mx.array], Sequence[mx.array], mx.array]:
        """`shown`, and which of these columns each row's next token would see: bool [B, 1, 1, S]."""
        self._refuse_inside_forward()
        return *self.shown(layer), next_mask(self.layout, self.reach, self._first(self.layout))

    def is_dense(self, layer: int) -> bool:
        return self.codecs[layer] == DENSE

    @property
    def forward(self) -> Forward:
        """The open forward."""
        return self._open()

    def _open(self) -> Forward:
        if self._forward is None:
            raise RuntimeError("keys and values can only be appended inside a forward")
        return self._forward

    def _view(self) -> tuple[Layout, int]:
        forward = self._forward
        return (forward.layout, forward.first) if forward else (self.layout, self._first(self.layout))

    def _read_columns(self, plane: int) -> tuple[int, int]:
        forward = self._forward
        if forward is None or self.planes[plane] is forward.before[0][plane]:  # not written in this forward
            return self._first(self.layout), self.layout.width
        return forward.first, forward.width

    def _first(self, layout: Layout) -> int:
        """Columns before this one are seen by no coming query, of any row."""
        if self.reach is FULL or self.reach.pinned:
            return 0
        seen = (layout.first_seen(self.reach, at, row) for row, at in enumerate(layout.offset))
        return min(seen, default=0)

    def _room(self, n: int) -> tuple[int, int]:
        """Columns to forget before `n` tokens are appended, and the capacity to hold the rest."""
        needed, capacity = self.layout.width + n, self.capacity
        cut = 0 if self.reach is FULL else self._unseen()
        if needed <= capacity and cut < max(CAPACITY_STEP, self.layout.width - cut):
            return 0, capacity
        if cut < FORGET_MIN:
            return 0, max(capacity, capacity_for(needed))
        return cut, capacity_for(needed - cut + FORGET_MIN)

    def _unseen(self) -> int:
        if self._ragged is not None:
            return 0
        lengths = [max(offset - TRIM_BACK, 0) for offset in self.layout.offset]
        if self._round is not None:
            lengths = [min(pair) for pair in zip(lengths, self._round, strict=True)]
        return self.layout.unseen(self.reach, lengths)

    def _moved(self, plane: mx.array, forward: Forward) -> mx.array:
        """An old plane with room for the forward's tokens."""
        if forward.cut:
            plane = plane_of.forgetting(plane, forward.before[1], forward.cut, self.reach.pinned)
        return plane_of.grown(plane, forward.capacity)

    def _appended(self, plane: Plane, new: mx.array, forward: Forward) -> mx.array:
        rows, heads, tokens, field_width = new.shape
        if rows != forward.layout.rows or tokens != forward.tokens:
            raise Mismatch(f"{new.shape} appended to {forward.layout.rows} rows of {forward.tokens} tokens")
        if plane is None:
            plane = mx.zeros((rows, heads, forward.capacity, field_width), dtype=new.dtype)
        else:
            _, held, capacity, held_width = plane.shape
            if (heads, field_width) != (held, held_width):
                raise Mismatch(f"{new.shape} appended to a plane of {plane.shape}")
            if forward.cut or capacity < forward.capacity:
                plane = self._moved(plane, forward)
        if forward.scatter:
            return mx.put_along_axis(plane, forward.start, new.astype(plane.dtype), axis=2)
        return mx.slice_update(plane, new, forward.start, (2,))

    # ------------------------------------------------------------ row surgery

    @classmethod
    def merge_rows(cls, sources: Sequence[PackedRows]) -> PackedRows:
        """All rows in one group, in order, aligned at the right. The sources stay as they are.

        Raises `Mismatch` when planes differ in codec, reach, number, heads, field width or dtype.
        """
        if not sources:
            raise ValueError("nothing to merge")
        for source in sources:
            source._refuse_unfinished()
        if len({source.signature for source in sources}) != 1:
            raise Mismatch("rows of different layers, reach or codec")
        layouts = [source.layout for source in sources]
        layout, shifts = Layout.merge(layouts)
        return sources[0]._made(
            [
                plane_of.merged([source.planes[i] for source in sources], layouts, shifts, layout)
                for i in range(len(sources[0].planes))
            ],
            layout,
        )

    def extract_row(self, row: int) -> PackedRows:
        """One row alone, without padding or spare capacity."""
        self._refuse_unfinished()
        only, _ = self.layout.filter([row])
        start, end = self.layout.left_pad[row], self.layout.ends[row]
        planes = [
            None if p is None or start == end else mx.contiguous(p[row : row + 1, :, start:end])
            for p in self.planes
        ]
        return self._made(planes, only)

    def filtered(self, keep: Sequence[int]) -> PackedRows:
        """The rows of `keep`, in its order, without the padding that all of them share. None is legal.

        An open ragged prefill goes on with the rows that are kept.
        """
        self._refuse_inside_forward()
        layout, cut = self.layout.filter(keep)
        index = mx.array(list(keep), dtype=mx.int32)
        planes: list[Plane] = [None] * len(self.planes)
        if layout.width:
            planes = [None if p is None else mx.take(p[:, :, cut:], index, axis=0) for p in self.planes]
        kept = self._made(planes, layout)
        kept._round = None if self._round is None else tuple(self._round[i] for i in keep)
        kept._ragged = None if self._ragged is None else self._ragged.filter(keep)
        kept._junk = self._junk
        return kept

    def filter_rows(self, keep: Sequence[int]) -> None:
        """`filtered`, in place."""
        kept = self.filtered(keep)
        self.planes, self.layout = kept.planes, kept.layout
        self._round, self._ragged = kept._round, kept._ragged

    def align_rows(self, left_pad: Sequence[int]) -> None:
        """Moves each row's live tokens so that they begin at its column of `left_pad`."""
        self._refuse_unfinished()
        layout = self.layout.align(left_pad)
        if layout != self.layout:
            moved = [None if p is None else plane_of.aligned(p, self.layout, layout) for p in self.planes]
            self._replace(moved if layout.width else [None] * len(moved), layout)

    def forget_unseen(self) -> None:
        """Drops what no query can see any more and no trim within `TRIM_BACK` needs."""
        self._refuse_inside_forward()
        cut = 0 if self.reach is FULL else self._unseen()
        if cut:
            kept = [
                None if p is None else plane_of.forgetting(p, self.layout, cut, self.reach.pinned)
                for p in self.planes
            ]
            self._replace([p if p is None else mx.contiguous(p) for p in kept], self.layout.forget(cut))

    def can_trim(self, row: int, n: int) -> bool:
        """`trim(row, n)` would be exact."""
        return self.layout.can_trim(row, n, self.reach)

    def trim_floor(self, row: int) -> int:
        """The shortest length that `row` can be trimmed to, but for what is within its pinned tokens."""
        return self.layout.trim_floor(row, self.reach)

    def trim(self, row: int, n: int) -> None:
        """`row` forgets its last `n` tokens; ValueError when it holds fewer or would miss some then."""
        self._refuse_unfinished()
        layout = self.layout.trim(row, n, self.reach)
        start, end = layout.ends[row], self.layout.ends[row]
        planes = self.planes
        if start < end and layout.rows > 1:
            planes = [None if p is None else plane_of.zeroed(p, row, start, end) for p in planes]
        fitting = capacity_for(layout.width + 1)
        if self.capacity > 2 * fitting:  # gives back what most likely would stay empty
            cut = [None if p is None else mx.contiguous(p[:, :, :fitting]) for p in planes]
            planes = self._made(cut, layout).planes
        self.planes, self.layout, self._junk = planes, layout, layout.rows == 1

    def copy(self) -> PackedRows:
        """The same rows in arrays of their own; nothing beyond the columns in use is taken along."""
        self._refuse_unfinished()
        width = self.layout.width
        planes = [None if p is None or not width else mx.contiguous(p[:, :, :width]) for p in self.planes]
        return self._made(planes, self.layout)

    def sharing(self) -> PackedRows:
        """The same rows, an open round and all, over the same arrays; who appends first pays for a copy."""
        self._refuse_inside_forward()
        made = self._with(list(self.planes), self.layout)
        made._round, made._ragged, made._junk = self._round, self._ragged, self._junk
        return made

    def recoded(self, codecs: Sequence[LayerCodecs]) -> PackedRows:
        """The same tokens, an open round and all, as other codecs store what these give back."""
        self._refuse_unfinished()
        made = PackedRows(codecs, self.layout.rows, self.reach)
        made.layout, made._round = self.layout, self._round
        for layer, (keys, values) in enumerate(made.codecs):
            if self.layout.width and self.planes[self._at[2 * layer]] is not None:
                held = self._everything(layer)
                # Zeros, too, may be stored as something else.
                new = [
                    plane_of.only_live(p, made.layout)
                    for p in (*keys.encode(held[0]), *values.encode(held[1]))
                ]
                made.planes[made._at[2 * layer] : made._at[2 * layer + 2]] = new
                mx.eval(new)  # layer by layer, so that no second copy of everything is alive
        return made

    def restore_state(self, planes: Sequence[Plane], layout: Layout) -> None:
        """Replaces everything held; takes the planes over. Columns without a token may hold anything."""
        self._refuse_inside_forward()
        held = [p for p in planes if p is not None]
        shapes = {(p.shape[0], p.shape[2]) for p in held}
        fits = all(rows == layout.rows and capacity >= layout.width for rows, capacity in shapes)
        if len(planes) != len(self.planes) or len(shapes) > 1 or not fits or bool(held) != bool(layout.width):
            raise Mismatch(f"{len(planes)} planes of {sorted(shapes)} do not fit {layout}")
        padded = layout.rows > 1 or any(layout.left_pad)
        self._junk = layout.rows == 1
        clean = [plane_of.only_live(p, layout) if padded and p is not None else p for p in planes]
        self._replace(clean, layout)
        self._round = self._ragged = None

    # ------------------------------------------------------------ speculative rounds

    def spec_round_begin(self) -> None:
        """Remembers where the rows end; what follows can be taken back per row."""
        self._refuse_unfinished()
        if self._round is not None:
            raise RuntimeError("a speculative round is open already")
        self._round = self.layout.offset

    def spec_round_commit(self) -> None:
        """Keeps all of the round."""
        self._round_open()
        self._round = None

    def spec_round_rollback(self, keep: int | Sequence[int]) -> None:
        """Keeps the first `keep` tokens of the round, one number for all rows or one for each."""
        self._refuse_unfinished()
        before, layout = self._round_open(), self.layout
        kept = [keep] * layout.rows if isinstance(keep, int) else list(keep)
        after = [offset + n for offset, n in zip(before, kept, strict=True)]
        if any(n < 0 for n in kept) or any(a > o for a, o in zip(after, layout.offset, strict=True)):
            raise ValueError(f"can't keep {kept} tokens of rounds of {_minus(layout.offset, before)}")
        self._drop_ends(layout.with_offsets(after))
        self._round = None

    @property
    def in_round(self) -> bool:
        return self._round is not None

    @property
    def round_offsets(self) -> tuple[int, ...]:
        """Where the rows ended when the open round began."""
        return self._round_open()

    def _round_open(self) -> tuple[int, ...]:
        if self._round is None:
            raise RuntimeError("no speculative round is open")
        return self._round

    def _drop_ends(self, shorter: Layout) -> None:
        """The same rows with fewer tokens at their ends; the columns are zeroed, all rows in one scatter."""
        gone = max(_minus(self.layout.offset, shorter.offset), default=0)
        if gone and shorter.rows > 1:
            # A row that drops fewer zeroes the column behind its end more than once.
            spare = capacity_for(self.layout.width + 1)
            ends, last = mx.array(shorter.ends, dtype=mx.int32), mx.array(self.layout.ends, dtype=mx.int32)
            columns = mx.minimum(ends[:, None] + mx.arange(gone), last[:, None])[:, None, :, None]
            self.planes = [
                None
                if p is None
                else mx.put_along_axis(plane_of.grown(p, spare), columns, mx.zeros((), dtype=p.dtype), axis=2)
                for p in self.planes
            ]
        self._junk = shorter.rows == 1
        self.layout = shorter

    # ------------------------------------------------------------ ragged prefill

    @property
    def right_pad(self) -> tuple[int, ...] | None:
        """The padding behind each row's prompt while a ragged prefill is open."""
        return None if self._ragged is None else self._ragged.right_pad

    def prepare_prefill(self, lengths: Sequence[int]) -> None:
        """Opens a prefill of prompts of these lengths, each padded at its right to the longest."""
        self._refuse_unfinished()
        self._ragged = Ragged.of(self.layout.offset, lengths)

    def restore_ends(self, right_pad: Sequence[int]) -> None:
        """Re-opens a ragged prefill, as `right_pad` told it, on rows that hold their padding already."""
        self._refuse_unfinished()
        self._ragged = Ragged.fed(self.layout.offset, right_pad)

    def finalize_prefill(self) -> None:
        """Ends it: padding moves to the left, and only real tokens are live."""
        self._refuse_inside_forward()
        if self._ragged is None:
            raise RuntimeError("no ragged prefill is open")
        self._ragged.check_fed(self.layout.offset)
        if any(self._ragged.right_pad):
            layout = self.layout.with_offsets(self._ragged.ends)
            ends = layout.ends
            moved = layout.align([p + max(ends) - end for p, end in zip(layout.left_pad, ends, strict=True)])
            planes = [None if p is None else plane_of.aligned(p, layout, moved) for p in self.planes]
            self._replace(planes, moved)
        self._ragged = None

    def donor_view(self, layer: int) -> DonorView:
        """Keys and values of a layer in the order of time, also while a ragged prefill is open."""
        self._refuse_inside_forward()
        layout = self.layout
        if self._ragged is not None:
            layout = layout.with_offsets(self._ragged.real(layout.offset))
        keys, values = self._everything(layer)
        return DonorView(
            keys=keys,
            values=values,
            offsets=layout.offset,
            starts=layout.left_pad,
            ends=layout.ends,
        )

    def temporal_view(self, layer: int) -> tuple[mx.array, mx.array]:
        """All live keys and values of a layer in the order of time; an error when it holds none."""
        self._refuse_inside_forward()
        return self._everything(layer)

    def _everything(self, layer: int) -> tuple[mx.array, mx.array]:
        if not self.layout.width:
            raise ValueError("this layer holds nothing yet")
        return self._decoded(layer, 0, self.layout.width)

    # ------------------------------------------------------------ inside

    def _with(self, planes: list[Plane], layout: Layout) -> PackedRows:
        made = PackedRows(self.codecs, layout.rows, self.reach)
        made.planes, made.layout = planes, layout
        return made

    def _made(self, planes: list[Plane], layout: Layout) -> PackedRows:
        """Computes the planes now: a lazy copy would pin the rows that it comes from, and fail too late."""
        mx.eval([p for p in planes if p is not None])
        return self._with(planes, layout)

    def _replace(self, planes: list[Plane], layout: Layout) -> None:
        """The same rows in other columns; an open round goes on."""
        self.planes, self.layout = self._made(planes, layout).planes, layout

    def _refuse_inside_forward(self) -> None:
        if self._forward is not None:
            raise RuntimeError("rows can't be rearranged inside a forward")

    def _refuse_unfinished(self) -> None:
        self._refuse_inside_forward()
        if self._ragged is not None:
            raise RuntimeError("a ragged prefill is open: its padding would be taken for tokens")

    # ------------------------------------------------------------ sizes, from shapes alone

    @property
    def capacity(self) -> int:
        """Columns that are allocated."""
        return next((p.shape[2] for p in self.planes if p is not None), 0)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one row in all planes; 0 before the first append."""
        return sum(p.shape[1] * p.shape[3] * p.dtype.size for p in self.planes if p is not None)

    @property
    def nbytes_live(self) -> int:
        return self.bytes_per_token * sum(self.layout.held)

    @property
    def nbytes_capacity(self) -> int:
        """What the planes occupy."""
        return self.bytes_per_token * self.capacity * self.layout.rows

    def arrays(self) -> list[mx.array]:
        return [p for p in self.planes if p is not None]


def _columns(layout: Layout, n: int) -> mx.array:
    # [B, 1, n, 1]
    return (mx.array(layout.ends, dtype=mx.int32)[:, None] + mx.arange(n))[:, None, :, None]


def _minus(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a - b for a, b in zip(left, right, strict=True)]
