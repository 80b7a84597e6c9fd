"""All layers of one session, or of the sessions that decode together, as one object.

A session's rows are either one (a lone session, in plain caches) or several (a group). All layers hold
the same number of tokens per row, always: every operation changes all layers or none. With layers that
mlx-lm implements, the rows of a group always end in the same column, as mlx-lm's batches do: some models
use one layer's mask for all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import mlx.core as mx

from stateroom.caches import foreign
from stateroom.caches.blueprint import Blueprint, Kind
from stateroom.caches.errors import Broken, CannotTrim, Mismatch
from stateroom.caches.layers import FullLayer
from stateroom.caches.rows import PackedRows

Model = Callable[..., mx.array]


class SessionCache:
    """The keys, values and states of `rows` sessions of one model."""

    __slots__ = ("_blueprint", "_full", "broken", "layers")

    def __init__(self, blueprint: Blueprint, full: PackedRows, others: Sequence[Any]) -> None:
        self._blueprint = blueprint
        self._full = full  # its layout counts the tokens of every layer, even where none is ours
        self.layers = blueprint.layers(full, others)
        self.broken = False  # a forward failed half-way in layers that can't be put back

    @classmethod
    def create(cls, model: Any) -> SessionCache:
        """One empty row; `UnknownKind` when a layer's cache isn't understood."""
        blueprint = Blueprint.of(model)
        return cls(blueprint, PackedRows(sum(blueprint.ours)), blueprint.blank_others())

    # ------------------------------------------------------------ what it is

    @property
    def rows(self) -> int:
        return self._full.layout.rows

    @property
    def offsets(self) -> tuple[int, ...]:
        """Tokens stored per row."""
        return self._full.layout.offset

    def kinds(self) -> list[Kind]:
        """The model's layers by kind."""
        return list(self._blueprint.kinds)

    @property
    def batchable(self) -> bool:
        """Rows of this model may share a group."""
        return self._blueprint.batchable

    @property
    def trimmable(self) -> bool:
        """Any row can be trimmed by any amount at any time: there are only full-attention layers."""
        return all(self._blueprint.ours)

    @property
    def signature(self) -> Hashable:
        """Sessions with equal signatures may be merged."""
        # A recurrent state that was never used is not, in every model, a state of zeros.
        unused = self._blueprint.stateful and not all(self.offsets)
        return (self._blueprint.signature, unused)

    # ------------------------------------------------------------ one forward

    def forward(self, model: Model, inputs: mx.array) -> mx.array:
        """Feeds tokens [B, N] behind the rows; logits [B, N, V], not evaluated.

        When the model raises, the rows are as they were; a session with other than full-attention layers
        is marked `broken` instead and must be recomputed.
        """
        self._refuse_broken()
        rows, tokens = inputs.shape
        if rows != self.rows or tokens < 1:
            raise ValueError(f"inputs {inputs.shape} for {self.rows} rows")
        self._full.begin(tokens)
        try:
            for cache in self._others():
                foreign.prepare(cache, tokens)
            logits = model(inputs, cache=self.layers)
        except BaseException:
            self._full.rollback()
            self.broken = not self.trimmable
            raise
        self._full.commit()
        return logits

    def arrays(self) -> list[mx.array]:
        """Everything to evaluate at a chunk boundary; what is left lazy would grow the graph for ever."""
        planes = [plane for plane in self._full.planes if plane is not None]
        return planes + [array for cache in self._others() for array in foreign.arrays(cache.state)]

    # ------------------------------------------------------------ trim

    def trim_floor(self, row: int) -> int:
        """The shortest length that `trim` can reach now, exactly, in every layer."""
        length = self.offsets[row]
        others = self._others() if self.rows == 1 else self._blueprint.blank_others()
        return max((foreign.floor(cache, length) for cache in others), default=0)

    def can_trim(self, row: int, n: int) -> bool:
        """`trim(row, n)` would succeed now."""
        return 0 <= n <= self.offsets[row] - self.trim_floor(row)

    def trim(self, row: int, n: int) -> None:
        """`row` forgets its last `n` tokens in every layer, or `CannotTrim` and nothing changes."""
        self._refuse_broken()
        held = self.offsets[row]
        if not self.can_trim(row, n):
            least = self.trim_floor(row)
            raise CannotTrim(f"can't trim {n} tokens of {held}: the shortest length within reach is {least}")
        if self._others() and self.rows > 1:
            apart = [self.extract_row(i) for i in range(self.rows)]
            apart[row].trim(0, n)
            joined = SessionCache.merge_rows(apart)
            self._full, self.layers = joined._full, joined.layers
            return
        for cache in self._others():
            foreign.trim(cache, n)
        self._full.trim(row, n)

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
            source._refuse_broken()
        used = [source for source in sources if source.rows]
        if len(used) <= 1:
            return used[0] if used else sources[0]
        if len({source.signature for source in used}) > 1:
            raise Mismatch("sessions of different models, or used and unused recurrent states")
        blueprint = used[0]._blueprint
        if not blueprint.batchable:
            raise Mismatch("this model has layers that run one row at a time")
        full = PackedRows.merge_rows([source._full for source in used])
        plain = [source._plain_row(i) for source in used for i in range(source.rows)]
        return cls(blueprint, full, _joined(blueprint, plain))

    def extract_row(self, row: int) -> SessionCache:
        """A session of its own with what `row` holds, and nothing more."""
        self._refuse_broken()
        others = [foreign.duplicate(cache) for cache in self._plain_row(row)]
        mx.eval([array for cache in others for array in foreign.arrays(cache.state)])
        return SessionCache(self._blueprint, self._full.extract_row(row), others)

    def filter_rows(self, keep: Sequence[int]) -> None:
        """Keeps the rows of `keep`, in its order. Keeping none is legal: such a group can be merged into."""
        self._refuse_broken()
        if list(keep) == list(range(self.rows)):
            return
        full = self._full.filtered(keep)
        others = _joined(self._blueprint, [self._plain_row(i) for i in keep])
        self._full, self.layers = full, self._blueprint.layers(full, others)

    def fork(self) -> SessionCache:
        """An independent copy of a lone session."""
        if self.rows != 1:
            raise ValueError(f"only a lone session can be forked, this group has {self.rows} rows")
        return self.extract_row(0)

    # ------------------------------------------------------------ sizes, from shapes alone

    @property
    def bytes_per_token(self) -> float:
        """What one more token of one row takes; 0 before the first forward."""
        return float(self._full.bytes_per_token + sum(map(foreign.bytes_per_token, self._others())))

    @property
    def state_bytes(self) -> int:
        """What one row's recurrent states take, at any length; 0 before the first forward."""
        return sum(map(foreign.state_bytes, self._others())) // max(self.rows, 1)

    @property
    def nbytes_live(self) -> int:
        return self._full.nbytes_live + sum(map(foreign.nbytes, self._others()))

    @property
    def nbytes_capacity(self) -> int:
        return self._full.nbytes_capacity + sum(map(foreign.nbytes, self._others()))

    # ------------------------------------------------------------ inside

    def _others(self) -> list[Any]:
        """The layers that mlx-lm implements, in order."""
        return [layer for layer in self.layers if not isinstance(layer, FullLayer)]

    def _plain_row(self, row: int) -> list[Any]:
        """mlx-lm's plain caches of one row; of a lone row the live ones themselves."""
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
        others = self._others()
        if self.rows == 1 or not others:
            return others
        pairs = zip(others, self._blueprint.blank_others(), strict=True)
        return [foreign.extract(cache, row, self.offsets[row], blank) for cache, blank in pairs]

    def _refuse_broken(self) -> None:
        if self.broken:
            raise Broken("a forward failed half-way: recompute this session from its tokens")


def _joined(blueprint: Blueprint, plain: list[list[Any]]) -> list[Any]:
    """The layers that aren't ours for a group, from the plain caches of each of its rows."""
    blank = blueprint.blank_others()
    if not blank or not plain:
        return blank
    if len(plain) == 1:
        return plain[0]
    joined = [foreign.merge([row[i] for row in plain], unused) for i, unused in enumerate(blank)]
    mx.eval([array for cache in joined for array in foreign.arrays(cache.state)])
    return joined
