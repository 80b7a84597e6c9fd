"""All layers of one session, or of the sessions that decode together, as one object.

A session's rows are either one (a lone session) or several (a group). All layers hold the same number of
tokens per row, always: every operation changes all layers or none.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import mlx.core as mx

from stateroom.caches.blueprint import Blueprint, Geometry, Kind, Store
from stateroom.caches.checkpoints import Checkpoint
from stateroom.caches.codecs.scheme import Scheme
from stateroom.caches.errors import CannotTrim, Mismatch, NotShared
from stateroom.caches.layers.state import StateRows
from stateroom.caches.layout import capacity_for
from stateroom.caches.reach import FULL, Chunk, Full, Window
from stateroom.caches.rows import FORGET_MIN, PackedRows
from stateroom.caches.stored_rows import SHARED_MIN, TRIM_BACK
from stateroom.caches.trunk import Chain, Trunk

Model = Callable[..., mx.array]
Kept = tuple[Blueprint | None, list[Store], tuple[int, ...]]  # a session as it was, see `SessionCache._kept`


class SessionCache:
    """The keys, values and states of `rows` sessions of one model."""

    __slots__ = ("_dense", "_offsets", "_unquantised", "blueprint", "layers", "stores")

    def __init__(
        self, blueprint: Blueprint, stores: Sequence[Store], offsets: tuple[int, ...] = (0,)
    ) -> None:
        self.blueprint = blueprint
        self._dense: Blueprint | None = None  # until the rows are quantised, later than from the first token
        self._unquantised: Kept | None = None  # what they were then, while a round of that time is open
        self._offsets = offsets
        self._hold(stores)

    def _hold(self, stores: Sequence[Store]) -> None:
        self.stores = list(stores)
        self.layers = (self._dense or self.blueprint).layers(stores)

    @classmethod
    def create(cls, model: Any, scheme: Scheme | None = None) -> SessionCache:
        """One empty row.

        Raises `UnknownKind` when a layer's cache isn't understood, `CannotQuantise` when the scheme doesn't
        fit.
        """
        dense = Blueprint.of(model)
        if scheme is None or scheme.name == "dense":
            return cls.empty(dense)
        probe = cls.empty(dense)
        probe.forward(model, mx.array([[0]]))
        return cls.empty(dense.with_scheme(scheme, probe.geometry()), dense)

    @classmethod
    def empty(cls, blueprint: Blueprint, dense: Blueprint | None = None) -> SessionCache:
        """One empty row. `dense`: the blueprint of the rows until a scheme's `quantise_after`."""
        later = dense if blueprint.scheme.quantise_after else None
        made = cls(later or blueprint, (later or blueprint).stores())
        made.blueprint, made._dense = blueprint, later
        return made

    # ------------------------------------------------------------ what it is

    @property
    def rows(self) -> int:
        return len(self._offsets)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Tokens stored per row."""
        return self._offsets

    @property
    def columns(self) -> tuple[int, ...]:
        """Tokens per row that a group would be padded to: those that are in no trunk."""
        full = next((s for s in self.stores if isinstance(s, PackedRows) and s.reach is FULL), None)
        return self._offsets if full is None else full.layout.held

    def kinds(self) -> list[Kind]:
        """The layers by kind, as they are stored now."""
        return list((self._dense or self.blueprint).kinds)

    @property
    def batchable(self) -> bool:
        """Rows of this model may share a group."""
        return self.blueprint.batchable

    @property
    def trimmable(self) -> bool:
        """Any row can be trimmed by any amount at any time."""
        return self.blueprint.trimmable and not self.blueprint.scheme.quantise_after

    @property
    def checkpointed(self) -> bool:
        """Some layers can go back only to checkpoints."""
        return not self.blueprint.trimmable

    @property
    def speculative(self) -> bool:
        """A round of any model can be rolled back to any token of it."""
        return not self.blueprint.states

    @property
    def signature(self) -> Hashable:
        """Sessions with equal signatures may be merged."""
        # A recurrent state that was never used is not, in every model, a state of zeros.
        unused = any(isinstance(store, StateRows) and store.unused for store in self.stores)
        return (self.blueprint.signature, self._dense is not None, bool(self.blueprint.states) and unused)

    def geometry(self) -> Geometry:
        """Key and value width and dtype of every attention layer; None where a layer has stored nothing."""
        found: Geometry = {}
        for store in self.stores:
            if isinstance(store, PackedRows):
                planes = [(store.plane(i, False), store.plane(i, True)) for i in range(len(store.codecs))]
                found[store.reach] = [
                    None if k is None or v is None else (k.shape[3], v.shape[3], k.dtype) for k, v in planes
                ]
        return found

    # ------------------------------------------------------------ one forward

    def forward(self, model: Model, inputs: mx.array) -> mx.array:
        """Feeds tokens [B, N] behind the rows; logits [B, N, V], not evaluated.

        When the model raises, the rows are as they were. A session that is quantised after some length is
        converted exactly there, whatever the pieces it is fed in; a piece that ends there saves a copy of the
        dense rows, which are held until the conversion is done.
        """
        rows, tokens = inputs.shape
        if rows != self.rows or tokens < 1:
            raise ValueError(f"inputs {inputs.shape} for {self.rows} rows")
        if self._dense is None:
            return self._pass(model, inputs)
        left = self.tokens_left_dense
        if left >= tokens:
            return self._pass(model, inputs)
        if rows != 1:
            raise RuntimeError("a row of a group is due to be quantised: it must leave first")
        before = self._kept()
        try:
            first = [self._pass(model, inputs[:, :left])] if left else []
            self.quantise()
            return mx.concatenate([*first, self._pass(model, inputs[:, left:])], axis=1)
        except BaseException:
            self._restore(before)
            raise

    def _pass(self, model: Model, inputs: mx.array) -> mx.array:
        try:
            return self._fed(model, inputs)
        except NotShared:  # such as under a mask that this model makes for some lengths only
            self._hold([store.whole() for store in self.stores])
            return self._fed(model, inputs)

    def _fed(self, model: Model, inputs: mx.array) -> mx.array:
        tokens = inputs.shape[1]
        self.begin(tokens)
        try:
            logits = model(inputs, cache=self.layers)
        except BaseException:
            self.rollback()
            raise
        self.commit(tokens)
        return logits

    def begin(self, tokens: int) -> None:
        """Opens a forward of so many tokens a row, in all layers or none; see `Group` for why by itself."""
        position = self._position()
        opened: list[Store] = []
        try:
            for store in self.stores:
                store.begin(tokens, position)
                opened.append(store)
        except BaseException:
            for store in opened:
                store.rollback()
            raise

    def commit(self, tokens: int) -> None:
        """Ends it: every row holds the tokens."""
        for store in self.stores:
            store.commit()
        self.advanced(tokens)

    def rollback(self) -> None:
        """Ends it: every row is as it was."""
        for store in self.stores:
            store.rollback()

    def advanced(self, tokens: int) -> None:
        """Every store has taken so many tokens a row, outside of `forward`."""
        self._offsets = tuple(offset + tokens for offset in self._offsets)

    def _position(self) -> int | mx.array:
        return self._offsets[0] if self.rows == 1 else mx.array(self._offsets, dtype=mx.int32)

    def arrays(self) -> list[mx.array]:
        """Everything to evaluate at a chunk boundary; what is left lazy would grow the graph for ever."""
        return [array for store in self.stores for array in store.arrays()]

    # ------------------------------------------------------------ quantising late

    @property
    def tokens_left_dense(self) -> int:
        """Tokens that can be fed before the rows are quantised; no limit when they are, or never will be."""
        if self._dense is None:
            return 2**62
        return max(self.blueprint.scheme.quantise_after - max(self._offsets, default=0), 0)

    @property
    def quantised(self) -> bool:
        """The rows are stored by their scheme; until `quantise_after` they may not be."""
        return self._dense is None

    def piece(self, tokens: int) -> int:
        """How many of so many tokens to feed at once: up to the point of conversion."""
        left = self.tokens_left_dense
        return min(tokens, left) if left else tokens

    def quantise(self) -> None:
        """Re-codes the rows to their scheme, now."""
        if self._dense is None:
            return
        kept = self._kept()
        stores = [
            store.recoded(self.blueprint.attention[store.reach]) if isinstance(store, PackedRows) else store
            for store in self.stores
        ]
        self._unquantised = kept if self.in_round else None
        self._dense = None
        self._hold(stores)

    def _kept(self) -> Kept:
        return self._dense, [store.sharing() for store in self.stores], self._offsets

    def _restore(self, kept: Kept) -> None:
        self._dense, stores, self._offsets = kept
        self._unquantised = None
        self._hold(stores)

    # ------------------------------------------------------------ trim

    def trim_floor(self, row: int) -> int:
        """The shortest length that `trim` can reach now, exactly, in every layer."""
        floors = [store.trim_floor(row) for store in self.stores]
        return max([min(self._exact_from, self._offsets[row]), *floors])

    @property
    def _exact_from(self) -> int:
        """Rows aren't taken back to before they were quantised: those tokens were computed dense."""
        return self.blueprint.scheme.quantise_after if self.quantised else 0

    def can_trim(self, row: int, n: int) -> bool:
        """`trim(row, n)` would succeed now."""
        if not 0 <= n <= self._offsets[row]:
            return False
        return self._offsets[row] - n >= self.trim_floor(row) or (
            not self.blueprint.scheme.quantise_after and all(store.can_trim(row, n) for store in self.stores)
        )

    def trim(self, row: int, n: int) -> None:
        """`row` forgets its last `n` tokens in every layer, or `CannotTrim` and nothing changes."""
        self._refuse_in_round()
        held = self._offsets[row]
        if not self.can_trim(row, n):
            least = self.trim_floor(row)
            raise CannotTrim(f"can't trim {n} tokens of {held}: the shortest length within reach is {least}")
        self._stage(lambda store: store.trim(row, n))
        self._offsets = (*self._offsets[:row], held - n, *self._offsets[row + 1 :])

    # ------------------------------------------------------------ checkpoints

    def checkpoint(self, row: int) -> Checkpoint | None:
        """`row` as it is now, for the layers that can't be trimmed; None when all can."""
        if not self.checkpointed:
            return None
        parts: list[Store | None] = []
        for store in self.stores:
            if isinstance(store, PackedRows) and store.reach is FULL:
                parts.append(None)
            else:
                part = store.extract_row(row)
                part.forget_unseen()
                parts.append(part)
        return Checkpoint(self._offsets[row], self._checkpoint_signature(), tuple(parts))

    def can_restore(self, checkpoint: Checkpoint) -> bool:
        """`restore(checkpoint)` would succeed now."""
        if self.rows != 1 or checkpoint.signature != self._checkpoint_signature():
            return False
        return self._exact_from <= checkpoint.length <= self._offsets[0]

    def restore(self, checkpoint: Checkpoint) -> None:
        """A lone session goes back to a checkpoint of its own tokens."""
        self._refuse_in_round()
        if not self.can_restore(checkpoint):
            raise CannotTrim(f"can't go back to {checkpoint.length} tokens from {self._offsets}")
        restored: list[Store] = []
        for store, part in zip(self.stores, checkpoint.stores, strict=True):
            new = (store if part is None else part).sharing()
            if part is None:
                new.trim(0, self._offsets[0] - checkpoint.length)
            restored.append(new)
        self._restore((self._dense, restored, (checkpoint.length,)))

    def _checkpoint_signature(self) -> Hashable:
        return (self.blueprint.signature, self._dense is not None)

    # ------------------------------------------------------------ row surgery

    @classmethod
    def merge_rows(cls, sources: Sequence[SessionCache]) -> SessionCache:
        """One group of all rows of the sources, in order; `Mismatch` when they can't share one.

        The sources stay as they are and share nothing with the group; but when only one of them has rows,
        it is returned itself.
        """
        if not sources:
            raise ValueError("nothing to merge")
        for source in sources:
            source._refuse_in_round()
        used = [source for source in sources if source.rows]
        if len(used) <= 1:
            return used[0] if used else sources[0]
        if len({source.signature for source in used}) > 1:
            raise Mismatch("sessions of different models or schemes, or used and unused recurrent states")
        if not used[0].batchable:
            raise Mismatch("this model has layers that run one row at a time")
        stores: list[Store] = []
        for parts in zip(*(source.stores for source in used), strict=True):
            kind = PackedRows if isinstance(parts[0], PackedRows) else StateRows
            stores.append(kind.merge_rows(parts))
        return used[0].holding(stores, tuple(offset for source in used for offset in source._offsets))

    def extract_row(self, row: int) -> SessionCache:
        """A session of its own with what `row` holds, and nothing more."""
        return self.holding([store.extract_row(row) for store in self.stores], (self._offsets[row],))

    def filter_rows(self, keep: Sequence[int]) -> None:
        """Keeps the rows of `keep`, in its order. Keeping none is legal: such a group can be merged into."""
        if list(keep) == list(range(self.rows)):
            return
        kept: list[Store] = [store.filtered(keep) for store in self.stores]
        if self._unquantised is not None:
            dense, stores, offsets = self._unquantised
            fewer: list[Store] = [store.filtered(keep) for store in stores]
            self._unquantised = dense, fewer, tuple(offsets[i] for i in keep)
        self._offsets = tuple(self._offsets[i] for i in keep)
        self._hold(kept)

    def fork(self) -> SessionCache:
        """An independent copy of a lone session."""
        if self.rows != 1:
            raise ValueError(f"only a lone session can be forked, this group has {self.rows} rows")
        return self.extract_row(0)

    def branch(self, shared_min: int = SHARED_MIN) -> SessionCache:
        """A lone session's child, which shares all that it holds. Nothing is copied, whatever the length.

        Fewer than `shared_min` tokens that no trunk holds yet are copied.
        """
        if self.rows != 1:
            raise ValueError(f"only a lone session can be branched, this group has {self.rows} rows")
        stores = [store.sharing() for store in self.stores]
        children: list[Store] = []
        for store in stores:
            if isinstance(store, PackedRows) and store.reach is FULL:
                children.append(store.branch(shared_min))
            else:
                children.append(store.sharing())
        self._hold(stores)
        return self.holding(children, self._offsets)

    def take_back(self) -> None:
        """A lone session goes on in trunks that no other has in view."""
        for store in self.stores:
            if isinstance(store, PackedRows):
                store.take_back()

    @property
    def trunks(self) -> set[Trunk]:
        """What rows share with other sessions, or did."""
        return {trunk for row in range(self.rows) for trunk in self.row_trunks(row)}

    def views(self, row: int) -> Chain:
        """What one row sees of trunks, in order."""
        full = next((s for s in self.stores if isinstance(s, PackedRows) and s.reach is FULL), None)
        return () if full is None else full.chains[row]

    def row_trunks(self, row: int) -> set[Trunk]:
        """Those of one row."""
        packed = [store for store in self.stores if isinstance(store, PackedRows)]
        return {view.trunk for store in packed for view in store.chains[row]}

    def shared_bytes(self, row: int) -> int:
        """What of a row's tokens lies in trunks."""
        return sum(store.shared_bytes(row) for store in self.stores if isinstance(store, PackedRows))

    def branch_bytes(self, shared_min: int = SHARED_MIN) -> int:
        """What `branch` copies, or lets the child share until it writes."""
        total = 0
        for store in self.stores:
            if isinstance(store, PackedRows) and store.reach is FULL:
                total += store.copied_by_branch(shared_min) * store.bytes_per_token
            else:
                total += store.nbytes_capacity
        return total

    def forget_unseen(self) -> None:
        """Drops what windows hold beyond what they show and can be trimmed by."""
        self._stage(lambda store: store.forget_unseen())

    def holding(self, stores: Sequence[Store], offsets: tuple[int, ...]) -> SessionCache:
        """A session of the same model and scheme with other content."""
        made = SessionCache(self._dense or self.blueprint, stores, offsets)
        made.blueprint, made._dense = self.blueprint, self._dense
        return made

    def sharing(self) -> SessionCache:
        """The same rows, an open round and all, over the same arrays; who appends first pays for a copy."""
        made = self.holding([store.sharing() for store in self.stores], self._offsets)
        made._unquantised = self._unquantised
        return made

    def put_back(self, was: SessionCache) -> None:
        """Goes back to what `sharing` gave of these rows."""
        self._dense, self._unquantised, self._offsets = was._dense, was._unquantised, was._offsets
        self._hold(was.stores)

    def _stage(self, change: Callable[[Store], None]) -> None:
        """Changes all stores or, when one of them fails, none."""
        changed = [store.sharing() for store in self.stores]
        for store in changed:
            change(store)
        self._hold(changed)

    # ------------------------------------------------------------ rounds, ragged prefill

    def spec_round_begin(self) -> None:
        """Remembers where the rows end, so that each can keep its own number of the tokens that follow."""
        self._stage(lambda store: store.spec_round_begin())

    def spec_round_commit(self) -> None:
        """Keeps all of the round."""
        self._stage(lambda store: store.spec_round_commit())
        self._unquantised = None

    def spec_round_rollback(self, keep: Sequence[int]) -> None:
        """Row i keeps the first `keep[i]` tokens of the round.

        A recurrent state keeps all of them or none: `CannotTrim` with anything else, and nothing changes.
        Rows that were quantised in the round are dense again when they go back to before that.
        """
        before = self.stores[0].round_offsets
        after = tuple(offset + n for offset, n in zip(before, keep, strict=True))
        stores, dense = self.stores, self._dense
        if self._unquantised is not None and min(after) <= self.blueprint.scheme.quantise_after:
            dense, stores, _ = self._unquantised
        changed = [store.sharing() for store in stores]
        for store in changed:
            store.spec_round_rollback(keep)
        self._restore((dense, changed, after))

    @property
    def in_round(self) -> bool:
        """A speculative round is open."""
        return any(store.in_round for store in self.stores)

    def _refuse_in_round(self) -> None:
        if self.in_round:
            raise RuntimeError("a speculative round is open: commit it or roll it back")

    def prepare_prefill(self, lengths: Sequence[int], probed: bool = False) -> None:
        """Opens a prefill of prompts of different lengths, padded at the right to the longest of them.

        Models differ in whether their recurrent states look at the lengths, and nothing in them tells: with
        such layers the caller says that `probe.prompts_agree(model)` was true, or gets `Mismatch`.
        """
        if len(lengths) != self.rows or min(lengths, default=0) < 0:
            raise ValueError(f"prompts of {list(lengths)} tokens for {self.rows} rows")
        if self.blueprint.states and not probed:
            raise Mismatch("recurrent states may take padding for tokens: see probe.prompts_agree")
        if max(lengths, default=0) > self.tokens_left_dense:
            raise Mismatch("the rows would be quantised in the midst of a ragged prefill")
        self._stage(lambda store: store.prepare_prefill(lengths))

    def finalize_prefill(self) -> None:
        """Ends it: only real tokens are live."""
        pads = self.stores[0].right_pad
        self._stage(lambda store: store.finalize_prefill())
        self._offsets = tuple(o - pad for o, pad in zip(self._offsets, pads or (), strict=True))

    # ------------------------------------------------------------ sizes, from shapes alone

    @property
    def bytes_per_token(self) -> float:
        """What one more token of one row takes, until windows are full; 0 before the first forward."""
        return float(sum(store.bytes_per_token for store in self.stores))

    @property
    def state_bytes(self) -> int:
        """What one row's recurrent states take, at any length; 0 before the first forward."""
        states = sum(store.nbytes_live for store in self.stores if isinstance(store, StateRows))
        return states // max(self.rows, 1)

    def projected_bytes(self, length: int, at_once: int = FORGET_MIN) -> int:
        """What a row of `length` tokens takes, at the most; the session must have been fed once.

        `at_once`: the most tokens of one forward. Windows hold all of them until they have been read.
        """
        total = self.state_bytes if length else 0
        for store in self.stores:
            if isinstance(store, PackedRows):
                columns = capacity_for(length)
                if not isinstance(store.reach, Full):
                    columns = min(columns, capacity_for(_shown(store.reach) + at_once))
                total += columns * store.bytes_per_token
        return total

    def row_bytes(self, row: int) -> int:
        """What the tokens and states of one row take."""
        return sum(store.row_bytes(row) for store in self.stores)

    def checkpoint_bytes(self, row: int) -> int:
        """What a checkpoint of `row` would take, about."""
        total = 0
        for store in self.stores:
            if not isinstance(store, PackedRows):
                total += store.row_bytes(row)
            elif not isinstance(store.reach, Full):
                total += min(store.row_bytes(row), _shown(store.reach) * store.bytes_per_token)
        return total

    @property
    def nbytes_live(self) -> int:
        return sum(store.nbytes_live for store in self.stores)

    @property
    def nbytes_capacity(self) -> int:
        return sum(store.nbytes_capacity for store in self.stores)


def _shown(reach: Window | Chunk) -> int:
    """Columns that a row keeps between forwards, at the most."""
    return reach.size + TRIM_BACK + FORGET_MIN
