"""Rows between forwards: planes, one layout, and what moves rows about without looking into them.

Ownership: every array here is replaced, never written in place, so that an array that is still held
elsewhere (a forward that failed, a copy) keeps its content. For the same reason nobody may hold an old
plane while a step is evaluated: mlx would copy the whole plane instead of writing into it.

Every column of a group of two or more rows that lies outside a row's live run is zero: masked columns are
still multiplied (by a weight of 0), and 0 x NaN is NaN. A lone row never reads past its end.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from stateroom.caches import planes as plane_of
from stateroom.caches.codecs.codec import Codec
from stateroom.caches.codecs.dense import Dense
from stateroom.caches.errors import Mismatch
from stateroom.caches.forward import Forward
from stateroom.caches.layout import Layout, capacity_for
from stateroom.caches.planes import Plane
from stateroom.caches.ragged import Ragged
from stateroom.caches.reach import FULL, Reach
from stateroom.caches.trunk import Chain, Trunk, View, cut, twin
from stateroom.caches.unfinished import Unfinished

CHAIN_MAX = 8  # trunks in a row's view; each is a pass of its own, in every step
SHARED_MIN = 64  # tokens; a shorter run costs more to read apart than it costs to copy
TRIM_BACK = 32  # tokens that a window can always be trimmed by: a speculative round, a step looked ahead

LayerCodecs = tuple[Codec, Codec]  # of keys and of values
DENSE: LayerCodecs = (Dense(), Dense())


@dataclass(frozen=True, slots=True)
class DonorView:
    """What a drafter reads of a layer: keys and values [B, Hkv, S, D], of row i the columns [start, end)."""

    keys: mx.array
    values: mx.array
    offsets: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]


class StoredRows(Unfinished[Forward, tuple[int, ...]]):
    """The planes of some layers for `rows` rows, and the one layout they share."""

    __slots__ = ("_at", "_junk", "_token_bytes", "chains", "codecs", "layout", "planes", "reach")

    def __init__(self, codecs: Sequence[LayerCodecs], rows: int = 1, reach: Reach = FULL) -> None:
        super().__init__()  # a round remembers offsets
        self.codecs = tuple(codecs)
        self.reach = reach
        self.layout = Layout.empty(rows)
        at = [0]
        for keys, values in self.codecs:
            at += [at[-1] + keys.planes, at[-1] + keys.planes + values.planes]
        self._at = tuple(at)  # where each layer's keys begin, then its values
        self.planes: list[Plane] = [None] * at[-1]
        self._token_bytes = 0  # once all planes are there; it doesn't change
        self._junk = False  # a lone row may have bytes behind its end; it never reads there
        # What a row of full reach has before its columns, shared with others; its layout calls it forgotten.
        self.chains: tuple[Chain, ...] = ((),) * rows

    @classmethod
    def dense(cls, layers: int, rows: int = 1, reach: Reach = FULL) -> Self:
        """Rows that store keys and values as they come."""
        return cls([DENSE] * layers, rows, reach)

    @property
    def signature(self) -> Hashable:
        """The layout of the planes: rows may share a group only when it is equal."""
        return (self.reach, self.codecs)

    # ------------------------------------------------------------ row surgery

    @classmethod
    def merge_rows(cls, sources: Sequence[Self]) -> Self:
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
            tuple(chain for source in sources for chain in source.chains),
        )

    def extract_row(self, row: int) -> Self:
        """One row alone, without padding or spare capacity."""
        self._refuse_unfinished()
        only, _ = self.layout.filter([row])
        start, end = self.layout.left_pad[row], self.layout.ends[row]
        planes = [
            None if p is None or start == end else mx.contiguous(p[row : row + 1, :, start:end])
            for p in self.planes
        ]
        return self._made(planes, only, (self.chains[row],))

    def seen_row(self, row: int) -> Self:
        """One row alone, as views of these planes: nothing is computed until somebody evaluates them."""
        self._refuse_unfinished()
        only, _ = self.layout.filter([row])
        start, end = self.layout.left_pad[row], self.layout.ends[row]
        planes = [None if p is None or start == end else p[row : row + 1, :, start:end] for p in self.planes]
        return self._with(planes, only, (self.chains[row],))

    def filtered(self, keep: Sequence[int]) -> Self:
        """The rows of `keep`, in its order, without the padding that all of them share. None is legal.

        An open ragged prefill goes on with the rows that are kept.
        """
        self._refuse_inside_forward()
        layout, front = self.layout.filter(keep)
        index = mx.array(list(keep), dtype=mx.int32)
        planes: list[Plane] = [None] * len(self.planes)
        if layout.width:
            planes = [None if p is None else mx.take(p[:, :, front:], index, axis=0) for p in self.planes]
        kept = self._made(planes, layout, tuple(self.chains[i] for i in keep))
        kept._round = None if self._round is None else tuple(self._round[i] for i in keep)
        kept._ragged = None if self._ragged is None else self._ragged.filter(keep)
        kept._junk = self._junk
        return kept

    def filter_rows(self, keep: Sequence[int]) -> None:
        """`filtered`, in place."""
        kept = self.filtered(keep)
        self.planes, self.layout, self.chains = kept.planes, kept.layout, kept.chains
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
        front = 0 if self.reach is FULL else self._unseen()
        if front:
            kept = [
                None if p is None else plane_of.forgetting(p, self.layout, front, self.reach.pinned)
                for p in self.planes
            ]
            self._replace([p if p is None else mx.contiguous(p) for p in kept], self.layout.forget(front))

    def can_trim(self, row: int, n: int) -> bool:
        """`trim(row, n)` would be exact."""
        if self.chains[row]:
            return 0 <= n <= self.layout.offset[row]
        return self.layout.can_trim(row, n, self.reach)

    def trim_floor(self, row: int) -> int:
        """The shortest length that `row` can be trimmed to, but for what is within its pinned tokens."""
        return 0 if self.chains[row] else self.layout.trim_floor(row, self.reach)

    def trim(self, row: int, n: int) -> None:
        """`row` forgets its last `n` tokens; ValueError when it holds fewer or would miss some then."""
        self._refuse_unfinished()
        length = self.layout.offset[row] - n
        chains = self.chains
        if chains[row] and n >= 0 and 0 <= length < self.layout.forgotten[row]:
            layout = self.layout.narrow(row, length)
            chains = (*chains[:row], cut(chains[row], length), *chains[row + 1 :])
        else:
            layout = self.layout.trim(row, n, self.reach)
        start, end = layout.ends[row], self.layout.ends[row]
        planes = self.planes
        if start < end and layout.rows > 1:
            planes = [None if p is None else plane_of.zeroed(p, row, start, end) for p in planes]
        fitting = capacity_for(layout.width + 1)
        if self.capacity > 2 * fitting:  # gives back what most likely would stay empty
            fewer = [None if p is None else mx.contiguous(p[:, :, :fitting]) for p in planes]
            planes = self._made(fewer, layout).planes
        self.planes, self.layout, self._junk = planes, layout, layout.rows == 1
        self.chains = chains

    def copy(self) -> Self:
        """The same rows in arrays of their own; nothing beyond the columns in use is taken along."""
        self._refuse_unfinished()
        width = self.layout.width
        planes = [None if p is None or not width else mx.contiguous(p[:, :, :width]) for p in self.planes]
        return self._made(planes, self.layout, self.chains)

    def sharing(self) -> Self:
        """The same rows, an open round and all, over the same arrays; who appends first pays for a copy."""
        self._refuse_inside_forward()
        made = self._with(list(self.planes), self.layout, self.chains)
        made._round, made._ragged, made._junk = self._round, self._ragged, self._junk
        return made

    def recoded(self, codecs: Sequence[LayerCodecs]) -> Self:
        """The same tokens, an open round and all, as other codecs store what these give back."""
        self._refuse_unfinished()
        if self.shares:
            return self.whole().recoded(codecs)
        made = type(self)(codecs, self.layout.rows, self.reach)
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
        self.chains = ((),) * layout.rows

    # ------------------------------------------------------------ trunks

    @property
    def shares(self) -> bool:
        """Some row has tokens in trunks."""
        return any(self.chains)

    def branch(self, shared_min: int = SHARED_MIN) -> Self:
        """A lone row's twin for another session, with which it shares all of its tokens. Copies none.

        Its columns are frozen into a trunk, which both have in view from then on; a short run is copied. Too
        many trunks are brought together into one first.
        """
        self._refuse_unfinished()
        if self.layout.rows != 1 or self.reach is not FULL:
            raise ValueError("only a lone row of full reach is branched")
        if len(self.chains[0]) >= CHAIN_MAX:
            whole = self.whole()
            self.planes, self.layout, self.chains = whole.planes, whole.layout, whole.chains
        (held,), (offset,), (chain,) = self.layout.held, self.layout.offset, self.chains
        if held < shared_min:
            child = self.copy()
            child.chains = (twin(chain),)
            return child
        if any(self.layout.left_pad):
            self.align_rows((0,))
        trunk = Trunk(self.planes, offset - held, offset)
        self.planes, self.layout = [None] * len(self.planes), Layout((0,), (offset,), (offset,))
        self.chains, self._junk = ((*chain, View(trunk, held)),), False
        return self._with(list(self.planes), self.layout, (twin(self.chains[0]),))

    def copied_by_branch(self, shared_min: int) -> int:
        """How many tokens of a lone row `branch` copies."""
        if len(self.chains[0]) >= CHAIN_MAX:
            return self.layout.offset[0]
        held = self.layout.held[0]
        return held if held < shared_min else 0

    def take_back(self) -> None:
        """A lone row whose last trunk nobody else has in view goes on in it; what came since is copied."""
        if self.layout.rows != 1 or not self.chains[0] or self.in_round:
            return
        self._refuse_unfinished()
        *rest, last = self.chains[0]
        (pad,), (end,), (offset,) = self.layout.left_pad, self.layout.ends, self.layout.offset
        if last.trunk.holders > 1:
            return
        start = last.trunk.start
        needed = capacity_for(offset - start + 1)
        planes: list[Plane] = []
        for old, new in zip(last.trunk.planes, self.planes, strict=True):
            if old is not None and new is not None and pad < end:
                at = mx.array([last.length], dtype=mx.int32)
                old = mx.slice_update(plane_of.grown(old, needed), new[:, :, pad:end], at, (2,))
            planes.append(old)
        self.planes, self.layout = planes, Layout((0,), (offset,), (start,))
        self.chains, self._junk = (tuple(rest),), True

    def whole(self) -> Self:
        """The same rows with all tokens in columns of their own."""
        if not self.shares:
            return self
        if self.layout.rows > 1:
            return type(self).merge_rows([self.extract_row(i).whole() for i in range(self.layout.rows)])
        (chain,), (held,), (offset,) = self.chains, self.layout.held, self.layout.offset
        planes: list[Plane] = []
        for i, plane in enumerate(self.planes):
            shared = [(view.trunk.planes[i], view.length) for view in chain]
            parts = [held_plane[:, :, :length] for held_plane, length in shared if held_plane is not None]
            if plane is not None and held:
                parts.append(plane[:, :, self.layout.left_pad[0] : self.layout.ends[0]])
            planes.append(mx.concatenate(parts, axis=2) if parts else None)
        made = self._made(planes, Layout((0,), (offset,)), ((),))
        made._round = self._round
        return made

    # ------------------------------------------------------------ speculative rounds

    def spec_round_begin(self) -> None:
        """Remembers where the rows end; what follows can be taken back per row."""
        self._begin_round(self.layout.offset)

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
    def round_offsets(self) -> tuple[int, ...]:
        """Where the rows ended when the open round began."""
        return self._round_open()

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
        ragged = self._ragged_open()
        ragged.check_fed(self.layout.offset)
        if any(ragged.right_pad):
            layout = self.layout.with_offsets(ragged.ends)
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
        if self.shares:
            return self.whole()._everything(layer)
        if not self.layout.width:
            raise ValueError("this layer holds nothing yet")
        return self._decoded(layer, 0, self.layout.width)

    # ------------------------------------------------------------ inside

    def layer_planes(self, planes: Sequence[Plane], layer: int) -> tuple[list[mx.array], list[mx.array]]:
        """A layer's planes of keys and of values, of all that rows like these have."""
        start, middle, end = self._at[2 * layer : 2 * layer + 3]
        held = [plane for plane in planes[start:end] if plane is not None]
        return held[: middle - start], held[middle - start :]

    def stored(self, layer: int) -> tuple[Sequence[mx.array], Sequence[mx.array]]:
        """The planes of a layer's keys and of its values, whole; ValueError when it holds nothing yet."""
        keys, values = self.layer_planes(self.planes, layer)
        if not keys and not values:
            raise ValueError("this layer holds nothing yet")
        return keys, values

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

    def is_dense(self, layer: int) -> bool:
        return self.codecs[layer] == DENSE

    def _unseen(self) -> int:
        if self._ragged is not None:
            return 0
        lengths = [max(offset - TRIM_BACK, 0) for offset in self.layout.offset]
        if self._round is not None:
            lengths = [min(pair) for pair in zip(lengths, self._round, strict=True)]
        return self.layout.unseen(self.reach, lengths)

    def _with(self, planes: list[Plane], layout: Layout, chains: tuple[Chain, ...] | None = None) -> Self:
        made = type(self)(self.codecs, layout.rows, self.reach)
        made.planes, made.layout = planes, layout
        if chains is not None:
            made.chains = chains
        return made

    def _made(self, planes: list[Plane], layout: Layout, chains: tuple[Chain, ...] | None = None) -> Self:
        """Computes the planes now: a lazy copy would pin the rows that it comes from, and fail too late."""
        mx.eval([p for p in planes if p is not None])
        return self._with(planes, layout, chains)

    def _replace(self, planes: list[Plane], layout: Layout) -> None:
        """The same rows in other columns; an open round goes on."""
        self.planes, self.layout = self._made(planes, layout).planes, layout

    # ------------------------------------------------------------ sizes, from shapes alone

    @property
    def capacity(self) -> int:
        """Columns that are allocated."""
        return next((p.shape[2] for p in self.planes if p is not None), 0)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one row in all planes; 0 before the first append."""
        if self._token_bytes:
            return self._token_bytes
        planes: Sequence[Plane] = self.planes
        if not any(p is not None for p in planes):
            planes = next((chain[0].trunk.planes for chain in self.chains if chain), ())
        nbytes = sum(p.shape[1] * p.shape[3] * p.dtype.size for p in planes if p is not None)
        if all(p is not None for p in planes):
            self._token_bytes = nbytes
        return nbytes

    @property
    def nbytes_live(self) -> int:
        return self.bytes_per_token * sum(self.layout.held)

    def row_bytes(self, row: int) -> int:
        """What the tokens of one row take, those in trunks too."""
        shared = sum(view.length for view in self.chains[row])
        return self.bytes_per_token * (self.layout.held[row] + shared)

    def shared_bytes(self, row: int) -> int:
        """What of them lies in trunks."""
        return self.bytes_per_token * sum(view.length for view in self.chains[row])

    @property
    def nbytes_capacity(self) -> int:
        """What the planes occupy."""
        return self.bytes_per_token * self.capacity * self.layout.rows

    def arrays(self) -> list[mx.array]:
        return [p for p in self.planes if p is not None]


def _minus(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a - b for a, b in zip(left, right, strict=True)]
