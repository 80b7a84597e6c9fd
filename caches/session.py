"""All layers of one session, or of the sessions that decode together, as one object.

A session's rows are either one (a lone session, in plain caches) or several (a group). All layers hold
the same number of tokens per row, always: every operation changes all layers or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from stateroom.caches import foreign
from stateroom.caches.errors import Broken, CannotTrim, Mismatch, UnknownKind
from stateroom.caches.layers import FullLayer
from stateroom.caches.rows import PackedRows

Model = Callable[..., mx.array]


@dataclass(frozen=True, slots=True)
class Kind:
    """How many layers of a model are of one kind, and how they store keys and values."""

    kind: str
    scheme: str
    layers: int


class SessionCache:
    """The keys, values and states of `rows` sessions of one model."""

    __slots__ = ("_full", "_make", "_offsets", "broken", "layers")

    def __init__(
        self, make: Callable[[], list[Any]], full: PackedRows, layers: list[Any], offsets: Sequence[int]
    ):
        self._make = make  # makes the model's own caches, unused
        self._full = full
        self._offsets = tuple(offsets)
        self.layers = layers
        self.broken = False  # a forward failed half-way in layers that can't be put back

    @classmethod
    def create(cls, model: Any) -> SessionCache:
        """One empty row; `UnknownKind` when a layer's cache isn't understood."""

        def make() -> list[Any]:
            made: list[Any] = make_prompt_cache(model)
            return made

        blank = make()
        names = sorted({name for cache in blank for name in foreign.unknown(cache)})
        if names:
            raise UnknownKind(names)
        full = PackedRows(sum(type(cache) is KVCache for cache in blank))
        return cls(make, full, _views(blank, full), (0,))

    # ------------------------------------------------------------ what it is

    @property
    def rows(self) -> int:
        return len(self._offsets)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Tokens stored per row."""
        return self._offsets

    def kinds(self) -> list[Kind]:
        """The model's layers by kind, full attention first."""
        counts = Counter("full" if type(cache) is KVCache else foreign.kind(cache) for cache in self._make())
        return [
            Kind(name, "dense", count)
            for name, count in sorted(counts.items(), key=lambda c: (c[0] != "full", c))
        ]

    @property
    def batchable(self) -> bool:
        """Rows of this model may share a group."""
        return all(foreign.batches(cache) for cache in self._make())

    @property
    def trimmable(self) -> bool:
        """Any row can be trimmed by any amount at any time: there are only full-attention layers."""
        return all(isinstance(layer, FullLayer) for layer in self.layers)

    @property
    def signature(self) -> Hashable:
        """Sessions with equal signatures may be merged."""
        blank = self._make()
        # A recurrent state that was never used is not a state of zeros for every model.
        unused = any(map(foreign.holds_state, blank)) and not all(self._offsets)
        return (unused, *(foreign.signature(cache) for cache in blank))

    # ------------------------------------------------------------ one forward

    def forward(self, model: Model, inputs: mx.array) -> mx.array:
        """Feeds tokens [B, N] behind the rows; logits [B, N, V], not evaluated.

        When the model raises, the rows are as they were; a session with other than full-attention layers
        is marked `broken` instead and must be recomputed.
        """
        if self.broken:
            raise Broken("a forward failed half-way: recompute this session from its tokens")
        rows, tokens = inputs.shape
        if rows != self.rows or tokens < 1:
            raise ValueError(f"inputs {inputs.shape} for {self.rows} rows")
        self._full.begin(tokens)
        try:
            logits = model(inputs, cache=self.layers)
        except BaseException:
            self._full.rollback()
            self.broken = not self.trimmable
            raise
        self._full.commit()
        self._offsets = tuple(offset + tokens for offset in self._offsets)
        return logits

    def arrays(self) -> list[mx.array]:
        """Everything to evaluate at a chunk boundary; what is left lazy would grow the graph for ever."""
        planes = [plane for plane in self._full.planes if plane is not None]
        return planes + [array for cache in self._others() for array in foreign.arrays(cache.state)]

    # ------------------------------------------------------------ trim

    def trim_floor(self, row: int) -> int:
        """The shortest length that `trim` can reach now, exactly, in every layer."""
        length = self._offsets[row]
        return max((foreign.floor(cache, length) for cache in self._plain_row(row)), default=0)

    def can_trim(self, row: int, n: int) -> bool:
        """`trim(row, n)` would succeed now."""
        return 0 <= n <= self._offsets[row] and self._offsets[row] - n >= self.trim_floor(row)

    def trim(self, row: int, n: int) -> None:
        """`row` forgets its last `n` tokens in every layer, or `CannotTrim` and nothing changes."""
        self._refuse_broken()
        held = self._offsets[row]
        if not self.can_trim(row, n):
            raise CannotTrim(
                f"can't trim {n} tokens of {held}: the least length reachable is {self.trim_floor(row)}"
            )
        offsets = (*self._offsets[:row], held - n, *self._offsets[row + 1 :])
        others = self._others()
        if others and n:
            plain = [
                self._plain_row(i) if i != row else self._plain_row(i, own=True) for i in range(self.rows)
            ]
            for cache in plain[row]:
                foreign.trim(cache, n)
            others = self._joined(plain, offsets)
        self._full.trim(row, n)
        self._publish(self._full, others, offsets)

    # ------------------------------------------------------------ row surgery

    @classmethod
    def merge_rows(cls, sources: Sequence[SessionCache]) -> SessionCache:
        """One group of all rows of the sources, in order; `Mismatch` when they can't share one.

        The sources keep their rows; a lone source (of any number of rows) is returned as it is.
        """
        if not sources:
            raise ValueError("nothing to merge")
        for source in sources:
            source._refuse_broken()
        if len({source.signature for source in sources if source.rows}) > 1:
            raise Mismatch("sessions of different models or layer kinds")
        used = [source for source in sources if source.rows]
        if len(used) <= 1:
            return used[0] if used else sources[0]
        if not used[0].batchable:
            raise Mismatch("this model has layers that run one row at a time")
        full = PackedRows.merge_rows([source._full for source in used])
        offsets = tuple(offset for source in used for offset in source._offsets)
        merged = cls(used[0]._make, full, [], offsets)
        plain = [source._plain_row(i) for source in used for i in range(source.rows)]
        merged._publish(full, merged._joined(plain, offsets), offsets)
        return merged

    def extract_row(self, row: int) -> SessionCache:
        """A session of its own with what `row` holds, and nothing more."""
        self._refuse_broken()
        full = self._full.extract_row(row)
        only = SessionCache(self._make, full, [], self._offsets[row : row + 1])
        others = self._plain_row(row, own=True)
        mx.eval([a for cache in others for a in foreign.arrays(cache.state)])
        only._publish(full, others, only._offsets)
        return only

    def filter_rows(self, keep: Sequence[int]) -> None:
        """Keeps the rows of `keep`, in its order. Keeping none is legal: the group can be merged into."""
        self._refuse_broken()
        self._full.layout.filter(keep)  # refuses before anything is made
        if list(keep) == list(range(self.rows)):
            return
        offsets = tuple(self._offsets[i] for i in keep)
        others = self._joined([self._plain_row(i) for i in keep], offsets)
        self._full.filter_rows(keep)
        self._publish(self._full, others, offsets)

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
    def nbytes_live(self) -> int:
        return self._full.nbytes_live + sum(map(foreign.nbytes, self._others()))

    @property
    def nbytes_capacity(self) -> int:
        return self._full.nbytes_capacity + sum(map(foreign.nbytes, self._others()))

    # ------------------------------------------------------------ inside

    def _others(self) -> list[Any]:
        """The layers that mlx-lm implements, in order."""
        return [layer for layer in self.layers if not isinstance(layer, FullLayer)]

    def _blank_others(self) -> list[Any]:
        return [cache for cache in self._make() if type(cache) is not KVCache]

    def _plain_row(self, row: int, own: bool = False) -> list[Any]:
        """mlx-lm's plain caches of one row; of a lone row the live ones themselves, unless `own`."""
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
        others = self._others()
        if not others:
            return []
        if self.rows == 1:
            return [foreign.duplicate(cache) for cache in others] if own else others
        length = self._offsets[row]
        return [
            foreign.extract(cache, row, length, blank)
            for cache, blank in zip(others, self._blank_others(), strict=True)
        ]

    def _joined(self, plain: list[list[Any]], lengths: Sequence[int]) -> list[Any]:
        """The layers of a group, from the plain caches of each of its rows."""
        blank = self._blank_others()
        if not blank or not plain:
            return blank
        if len(plain) == 1:
            return plain[0]
        joined = [foreign.merge([row[i] for row in plain], lengths, unused) for i, unused in enumerate(blank)]
        mx.eval([a for cache in joined for a in foreign.arrays(cache.state)])
        return joined

    def _publish(self, full: PackedRows, others: Sequence[Any], offsets: tuple[int, ...]) -> None:
        rest = iter(others)
        blank = self._make()
        views = iter(FullLayer(full, i) for i in range(len(full.planes) // 2))
        self.layers = [next(views) if type(cache) is KVCache else next(rest) for cache in blank]
        self._full, self._offsets = full, offsets

    def _refuse_broken(self) -> None:
        if self.broken:
            raise Broken("a forward failed half-way: recompute this session from its tokens")


def _views(blank: list[Any], full: PackedRows) -> list[Any]:
    views = iter(FullLayer(full, i) for i in range(len(full.planes) // 2))
    return [next(views) if type(cache) is KVCache else cache for cache in blank]
