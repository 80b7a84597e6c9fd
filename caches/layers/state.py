"""Recurrent and convolution states: arrays [B, ...] that a model replaces at every forward.

A state has no columns: it can't be trimmed, only put back as it was at some length. Arrays are replaced,
never written in place, so remembering one is free.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from stateroom.caches.errors import CannotTrim, Mismatch
from stateroom.caches.ragged import Ragged
from stateroom.caches.unfinished import Unfinished

State = mx.array | None  # None until the first forward
Remembered = tuple[tuple[int, ...], list[list[State]]]  # offsets, and the arrays of each layer


class StateLayer(ArraysCache):  # type: ignore[misc]  # models ask isinstance(cache, ArraysCache)
    """The cache that a model sees: `cache[i]` reads and replaces one array of the layer."""

    def __init__(self, arrays: list[State]) -> None:
        super().__init__(len(arrays))
        self.cache = arrays

    def advance(self, n: int) -> None:
        """Nothing: `lengths` are told when a forward begins, to all layers.

        mlx-lm subtracts in place, from an array that others may hold too.
        """


class StateRows(Unfinished[int, Remembered]):
    """The states of some layers for `rows` rows, and how many tokens they have seen."""

    __slots__ = ("_before", "layers", "offset")

    def __init__(self, sizes: Sequence[int], rows: int = 1) -> None:
        super().__init__()  # a forward is the number of its tokens
        self.layers = [StateLayer([None] * size) for size in sizes]
        self.offset = (0,) * rows
        self._before: list[list[State]] = []  # at the open forward's begin

    @property
    def signature(self) -> Hashable:
        return ("state", tuple(len(layer.cache) for layer in self.layers))

    @property
    def unused(self) -> bool:
        """No token was fed yet; that is not, in every model, a state of zeros."""
        return not all(self.offset)

    # ------------------------------------------------------------ one forward

    def begin(self, n: int, position: int | mx.array | None = None) -> None:
        """Opens a forward of `n` tokens a row; RuntimeError inside another."""
        if self._forward is not None:
            raise RuntimeError("a forward is open already")
        self._forward, self._before = n, self._remembered()
        self._tell_lengths()

    def commit(self) -> None:
        """Every row has seen the tokens of the forward; RuntimeError when none is open."""
        tokens = self._open()
        self.offset = tuple(offset + tokens for offset in self.offset)
        self._ended()

    def rollback(self) -> None:
        """Puts the states back as they were at `begin`; RuntimeError when no forward is open."""
        self._open()
        self._put_back(self._before)
        self._ended()

    def _open(self) -> int:
        if self._forward is None:
            raise RuntimeError("no forward is open")
        return self._forward

    def _ended(self) -> None:
        self._forward, self._before = None, []
        self._tell_lengths()

    def _tell_lengths(self) -> None:
        """What models read in a ragged forward: how many of its tokens are real, in each row."""
        lengths = None
        if self._ragged is not None and self._forward is not None:
            left = (end - at for end, at in zip(self._ragged.ends, self.offset, strict=True))
            # mlx-lm's scans would read past the forward's tokens; below 0 they keep the state.
            lengths = mx.array([min(n, self._forward) for n in left], dtype=mx.int32)
        for layer in self.layers:
            layer.lengths = lengths

    def advance(self, arrays: Sequence[mx.array], n: int) -> None:
        """Takes states that have seen `n` more tokens of every row, elsewhere."""
        self._fill(arrays)
        self.offset = tuple(offset + n for offset in self.offset)

    def over(self, arrays: Sequence[mx.array]) -> StateRows:
        """The same layers with other arrays."""
        made = type(self)([len(layer.cache) for layer in self.layers], len(self.offset))
        made._fill(arrays)
        return made

    def restored(self, arrays: Sequence[State], offset: tuple[int, ...]) -> StateRows:
        """These layers with what another process had in them; `Mismatch` when it doesn't fit."""
        sizes = [len(layer.cache) for layer in self.layers]
        rows = {array.shape[0] for array in arrays if array is not None}
        if len(arrays) != sum(sizes) or rows - {len(offset)} or (not any(offset) and rows):
            raise Mismatch(
                f"{len(arrays)} states of {sorted(rows)} rows do not fit {len(offset)} rows of {sizes}"
            )
        held = iter(arrays)
        return self._made([[next(held) for _ in range(size)] for size in sizes], offset)

    def _fill(self, arrays: Sequence[mx.array]) -> None:
        held = iter(arrays)
        for layer in self.layers:
            layer.cache[:] = [next(held) for _ in layer.cache]

    def _remembered(self) -> list[list[State]]:
        return [list(layer.cache) for layer in self.layers]

    def _put_back(self, arrays: list[list[State]]) -> None:
        for layer, held in zip(self.layers, arrays, strict=True):
            layer.cache[:] = held

    # ------------------------------------------------------------ row surgery

    @classmethod
    def merge_rows(cls, sources: Sequence[StateRows]) -> StateRows:
        """All rows in one group, in order; `Mismatch` for used and unused states together."""
        if len({source.signature for source in sources}) != 1:
            raise Mismatch("rows of different states")
        for source in sources:
            source._refuse_unfinished()
        layers = [
            [_stacked(entry) for entry in zip(*(source.layers[i].cache for source in sources), strict=True)]
            for i in range(len(sources[0].layers))
        ]
        return cls._made(layers, tuple(offset for source in sources for offset in source.offset))

    def extract_row(self, row: int) -> StateRows:
        """One row alone; IndexError when there is none of that number."""
        self._refuse_unfinished()
        if not 0 <= row < len(self.offset):
            raise IndexError(f"row {row} of {len(self.offset)}")
        return self._made(
            [[a if a is None else mx.contiguous(a[row : row + 1]) for a in x.cache] for x in self.layers],
            (self.offset[row],),
        )

    def filtered(self, keep: Sequence[int]) -> StateRows:
        """The rows of `keep`, in its order. None is legal: such a group can be merged into."""
        self._refuse_inside_forward()
        if any(not 0 <= row < len(self.offset) for row in keep):
            raise IndexError(f"rows {list(keep)} of {len(self.offset)}")
        index = mx.array(list(keep), dtype=mx.int32)

        def kept(arrays: Sequence[State]) -> list[State]:
            return [a if a is None else mx.take(a, index, axis=0) for a in arrays]

        layers: list[list[State]] = [kept(x.cache) if keep else [None] * len(x.cache) for x in self.layers]
        made = self._made(layers, tuple(self.offset[i] for i in keep))
        if self._round is not None:
            made._round = (
                tuple(self._round[0][i] for i in keep),
                [kept(arrays) for arrays in self._round[1]],
            )
        made._ragged = None if self._ragged is None else self._ragged.filter(keep)
        return made

    def forget_unseen(self) -> None:
        """Nothing: a state holds no tokens."""

    def whole(self) -> StateRows:
        """Itself: no trunk holds a part of a state."""
        return self

    def can_trim(self, row: int, n: int) -> bool:
        """Only by nothing."""
        return n == 0

    def trim_floor(self, row: int) -> int:
        """The row's own length."""
        return self.offset[row]

    def trim(self, row: int, n: int) -> None:
        """`CannotTrim` but for n = 0."""
        if n:
            raise CannotTrim("a recurrent state can't be trimmed")

    def sharing(self) -> StateRows:
        """The same states, an open round and all, over the same arrays, which nobody writes into."""
        self._refuse_inside_forward()
        made = type(self)([len(layer.cache) for layer in self.layers], len(self.offset))
        made._put_back(self._remembered())
        made.offset, made._round, made._ragged = self.offset, self._round, self._ragged
        return made

    @classmethod
    def _made(cls, layers: list[list[State]], offset: tuple[int, ...]) -> StateRows:
        mx.eval([a for layer in layers for a in layer if a is not None])
        made = cls([len(layer) for layer in layers], len(offset))
        made._put_back(layers)
        made.offset = offset
        return made

    # ------------------------------------------------------------ rounds, ragged prefill

    def spec_round_begin(self) -> None:
        """Remembers the states, to go back to them or not."""
        self._begin_round((self.offset, self._remembered()))

    def can_keep(self, keep: Sequence[int]) -> bool:
        """`spec_round_rollback(keep)` would be exact: of each row all of the round stays, or nothing."""
        before, arrays = self._round_open()
        stays = [now - then == n for n, now, then in zip(keep, self.offset, before, strict=True)]
        back = [n == 0 for n in keep]
        if all(stays) or all(back):
            return True
        # A state that was not there yet, or was of another shape, can't stand beside what it became.
        now_shapes = [_shape(array) for layer in self.layers for array in layer.cache]
        alike = now_shapes == [_shape(array) for old in arrays for array in old]
        return alike and all(stay or gone for stay, gone in zip(stays, back, strict=True))

    def spec_round_rollback(self, keep: Sequence[int]) -> None:
        """Row i keeps the first `keep[i]` tokens of the round; `CannotTrim` unless `can_keep`."""
        self._refuse_unfinished()
        if not self.can_keep(keep):
            raise CannotTrim("a recurrent state keeps all of a round or nothing")
        before, arrays = self._round_open()
        stays = [now - then == n for n, now, then in zip(keep, self.offset, before, strict=True)]
        self._put_back(
            [
                [_chosen(stays, now, then) for now, then in zip(layer.cache, old, strict=True)]
                for layer, old in zip(self.layers, arrays, strict=True)
            ]
        )
        self.offset = tuple(then + n for then, n in zip(before, keep, strict=True))
        self._round = None

    @property
    def round_offsets(self) -> tuple[int, ...]:
        """Where the rows ended when the open round began."""
        return self._round_open()[0]

    def prepare_prefill(self, lengths: Sequence[int]) -> None:
        """Opens a ragged prefill: of what is fed, only the first `lengths[row]` tokens are real."""
        self._refuse_unfinished()
        ragged = Ragged.of(self.offset, lengths)
        if 0 in ragged.ends:
            raise ValueError("a recurrent state that has seen no token is none: each prompt needs one")
        self._ragged = ragged

    def finalize_prefill(self) -> None:
        """Ends it: rows count their real tokens. RuntimeError when none is open, or it isn't all fed."""
        ragged = self._ragged_open()
        ragged.check_fed(self.offset)
        self.offset, self._ragged = ragged.ends, None

    # ------------------------------------------------------------ sizes, from shapes alone

    bytes_per_token = 0

    @property
    def nbytes_live(self) -> int:
        return sum(a.size * a.dtype.size for a in self.arrays())

    def row_bytes(self, row: int) -> int:
        """What one row's states take, whichever row."""
        return self.nbytes_live // max(len(self.offset), 1)

    nbytes_capacity = nbytes_live

    def arrays(self) -> list[mx.array]:
        return [a for layer in self.layers for a in layer.cache if a is not None]


def _stacked(entry: tuple[State, ...]) -> State:
    """One array of a state for all rows, [B, ...]."""
    held = [array for array in entry if array is not None]
    if held and len(held) != len(entry):
        raise Mismatch("rows with and without a recurrent state")
    if len({(array.shape[1:], array.dtype) for array in held}) > 1:
        raise Mismatch("recurrent states of different shapes")
    return mx.concatenate(held) if held else None


def _chosen(stays: list[bool], now: State, then: State) -> State:
    if now is None or then is None or len(set(stays)) < 2:
        return now if all(stays) else then
    return mx.where(mx.array(stays).reshape(-1, *[1] * (now.ndim - 1)), now, then)


def _shape(array: State) -> tuple[int, ...] | None:
    return None if array is None else array.shape
