"""Rows that share a pass of the model, each part of them stored apart.

The model's linear layers see all rows side by side; each part, a `SessionCache` of one row or of several,
appends to planes of its own and reads them by itself. So a row joins and leaves without a byte moved, rows of
different lengths and schemes don't pad each other, and a part of rows over one trunk reads it once.

A group owns its parts. They change in place, all or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import mlx.core as mx

from stateroom.caches.errors import Mismatch, NotShared
from stateroom.caches.layers.attention_layer import AttentionLayer
from stateroom.caches.layers.group_layer import GroupLayer, Rows
from stateroom.caches.session import Model, SessionCache
from stateroom.caches.trunk import Trunk

Changed = TypeVar("Changed")


class Group:
    """Sessions of one model that are fed together: rows in the order of their parts.

    Args:
        apart: the model can serve several parts in one pass, as `probe.groups_agree` tells. Else rows are
            merged into one part as they join, and what can't be merged is fed part by part. It is given up
            when a model turns out to do something of its own, such as with masks of some lengths.
    """

    __slots__ = ("apart", "parts")

    def __init__(self, parts: Sequence[SessionCache] = (), apart: bool = True) -> None:
        self.parts: list[SessionCache] = []
        self.apart = apart
        self.add(parts)

    # ------------------------------------------------------------ what it is

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Tokens stored per row."""
        return tuple(offset for part in self.parts for offset in part.offsets)

    @property
    def columns(self) -> tuple[int, ...]:
        """Tokens per row that are in no trunk: those that a merge with others moves, and may pad."""
        return tuple(columns for part in self.parts for columns in part.columns)

    def places(self) -> list[tuple[SessionCache, int]]:
        """The part that holds each row, and which row of it that is."""
        return [(part, row) for part in self.parts for row in range(part.rows)]

    def place(self, row: int) -> tuple[SessionCache, int]:
        """Of one row; IndexError when there is none of that number."""
        self._check([row])
        return self.places()[row]

    @property
    def speculative(self) -> bool:
        """A round can be rolled back to any token of it."""
        return all(part.speculative for part in self.parts)

    @property
    def checkpointed(self) -> bool:
        """Some layers can go back only to checkpoints."""
        return any(part.checkpointed for part in self.parts)

    @property
    def trunks(self) -> set[Trunk]:
        """What rows share with other sessions, or did."""
        return {trunk for part in self.parts for trunk in part.trunks}

    @property
    def nbytes_live(self) -> int:
        return sum(part.nbytes_live for part in self.parts)

    @property
    def nbytes_capacity(self) -> int:
        return sum(part.nbytes_capacity for part in self.parts)

    def arrays(self) -> list[mx.array]:
        """Everything to evaluate at a chunk boundary."""
        return [array for part in self.parts for array in part.arrays()]

    def _numbered(self) -> Iterator[tuple[SessionCache, range]]:
        start = 0
        for part in self.parts:
            yield part, range(start, start + part.rows)
            start += part.rows

    def _cuts(self) -> list[int]:
        return [rows.start for _, rows in self._numbered()][1:]

    # ------------------------------------------------------------ one forward

    def forward(self, model: Model, inputs: mx.array) -> mx.array:
        """Feeds tokens [B, N] behind the rows; logits [B, N, V], not evaluated.

        When anything raises, all rows are as they were. A row that is quantised after some length is
        converted exactly there; as a part of its own, else RuntimeError.
        """
        rows, tokens = inputs.shape
        if rows != self.rows or tokens < 1:
            raise ValueError(f"inputs {inputs.shape} for {self.rows} rows")
        if len(self.parts) == 1:
            return self.parts[0].forward(model, inputs)
        left = min(part.tokens_left_dense for part in self.parts)
        if left >= tokens:
            return self._pass(model, inputs)

        def pieces() -> mx.array:
            first = [self._pass(model, inputs[:, :left])] if left else []
            for part in self.parts:
                if not part.tokens_left_dense:
                    if part.rows != 1:
                        raise RuntimeError("a row is due to be quantised: it must leave its part first")
                    part.quantise()
            return mx.concatenate([*first, self.forward(model, inputs[:, left:])], axis=1)

        return self._whole(pieces)

    def _pass(self, model: Model, inputs: mx.array) -> mx.array:
        if self.apart:
            try:
                return self._together(model, inputs)
            except NotShared:
                self.apart = False
        of_parts = list(zip(self.parts, mx.split(inputs, self._cuts()), strict=True))
        return self._whole(lambda: mx.concatenate([part.forward(model, own) for part, own in of_parts]))

    def _together(self, model: Model, inputs: mx.array) -> mx.array:
        tokens = inputs.shape[1]
        opened: list[SessionCache] = []
        try:
            for part in self.parts:
                part.begin(tokens)
                opened.append(part)
            logits = self._answer(model, inputs)
        except BaseException:
            for part in opened:
                part.rollback()
            raise
        for part in self.parts:
            part.commit(tokens)
        return logits

    def _answer(self, model: Model, inputs: mx.array) -> mx.array:
        rows = Rows(self._cuts(), mx.array(self.offsets, dtype=mx.int32))
        layers: list[Any] = []
        for of_parts in zip(*(part.layers for part in self.parts), strict=True):
            if not all(isinstance(layer, AttentionLayer) for layer in of_parts):
                raise NotShared("only layers of attention can be fed apart")
            layers.append(GroupLayer(of_parts, rows))
        try:
            return model(inputs, cache=layers)
        except (TypeError, AttributeError) as error:  # what it was given is no array, nor a whole cache
            raise NotShared(f"the model does something of its own: {error}") from error

    # ------------------------------------------------------------ joining and leaving

    def add(self, caches: Sequence[SessionCache]) -> None:
        """Takes sessions in, behind the other rows, and owns them. Nothing is copied when rows are apart.

        Raises `Mismatch` for sessions of another model, RuntimeError within a round.
        """
        new = [cache for cache in caches if cache.rows]
        parts = [*self.parts, *new]
        if len({part.blueprint.model for part in parts}) > 1:
            raise Mismatch("sessions of different models")
        self._refuse_in_round(parts)
        alike = len({part.signature for part in parts}) == 1
        if new and not self.apart and len(parts) > 1 and alike and parts[0].batchable:
            parts = [_merged(parts)]
        self.parts = parts

    def remove(self, rows: Sequence[int]) -> list[SessionCache]:
        """The sessions of these rows, in this order. One that is a part of its own is handed out itself.

        Raises IndexError for a row that isn't there, RuntimeError within a round.
        """
        self._refuse_in_round(self.parts)
        self._check(rows)
        gone: dict[int, SessionCache] = {}
        kept: list[SessionCache] = []
        for part, numbers in self._numbered():
            out = [row for row in numbers if row in rows]
            if len(out) < len(numbers):
                stays = [row for row in numbers if row not in rows]
                kept.append(part if not out else _filtered(part, [row - numbers.start for row in stays]))
            for row in out:
                gone[row] = part if len(numbers) == 1 else part.extract_row(row - numbers.start)
        self.parts = kept
        return [gone[row] for row in rows]

    def pack(self, rows: Sequence[int]) -> list[int]:
        """These rows become one part, left-padded to the longest, behind the others; one row stands alone.

        Returns the order that all rows have now, as the numbers they had. Moves the own columns of these rows
        and of those that shared a part with some of them. `Mismatch` for rows that can't be merged.
        """
        self._refuse_in_round(self.parts)
        self._check(rows)
        sources: list[SessionCache] = []
        kept: list[SessionCache] = []
        stays: list[int] = []
        moved: list[int] = []
        for part, numbers in self._numbered():
            taken = [row for row in numbers if row in rows]
            left = [row for row in numbers if row not in rows]
            stays, moved = stays + left, moved + taken
            if not left:
                sources.append(part)
            elif not taken:
                kept.append(part)
            else:
                sources += [part.extract_row(row - numbers.start) for row in taken]
                kept.append(_filtered(part, [row - numbers.start for row in left]))
        self.parts = [*kept, *([_merged(sources)] if sources else [])]
        return stays + moved

    def _check(self, rows: Sequence[int]) -> None:
        if any(not 0 <= row < self.rows for row in rows) or len(set(rows)) != len(rows):
            raise IndexError(f"rows {list(rows)} of {self.rows}")

    # ------------------------------------------------------------ rounds

    def spec_round_begin(self) -> None:
        """Remembers where the rows end, so that each can keep its own number of the tokens that follow."""
        self._each(lambda part: part.spec_round_begin())

    def spec_round_commit(self) -> None:
        """Keeps all of the round."""
        self._each(lambda part: part.spec_round_commit())

    def spec_round_rollback(self, keep: Sequence[int]) -> None:
        """Row i keeps the first `keep[i]` tokens of the round; else `CannotTrim`, and nothing changes."""
        if len(keep) != self.rows:
            raise ValueError(f"{len(keep)} numbers for {self.rows} rows")
        kept = {id(part): keep[rows.start : rows.stop] for part, rows in self._numbered()}
        self._each(lambda part: part.spec_round_rollback(kept[id(part)]))

    def _each(self, change: Callable[[SessionCache], None]) -> None:
        def changes() -> None:
            for part in self.parts:
                change(part)

        self._whole(changes)

    def _whole(self, change: Callable[[], Changed]) -> Changed:
        """What changes all parts or, when it fails, none."""
        before = [part.sharing() for part in self.parts]
        try:
            return change()
        except BaseException:
            for part, was in zip(self.parts, before, strict=True):
                part.put_back(was)
            raise

    @staticmethod
    def _refuse_in_round(parts: Sequence[SessionCache]) -> None:
        if any(part.in_round for part in parts):
            raise RuntimeError("a speculative round is open: commit it or roll it back")


def _merged(parts: Sequence[SessionCache]) -> SessionCache:
    if len(parts) == 1:
        return parts[0]
    sources = [part.sharing() for part in parts]
    for source in sources:
        source.forget_unseen()  # what one row's window no longer shows would pad the others
    return SessionCache.merge_rows(sources)


def _filtered(part: SessionCache, keep: Sequence[int]) -> SessionCache:
    fewer = part.sharing()
    fewer.filter_rows(keep)
    return fewer
