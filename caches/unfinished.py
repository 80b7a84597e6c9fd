"""What may be open on rows: a forward, a speculative round, a ragged prefill. Rows at rest have none."""

from __future__ import annotations

from typing import Generic, TypeVar

from stateroom.caches.ragged import Ragged

ForwardT = TypeVar("ForwardT")
RoundT = TypeVar("RoundT")


class Unfinished(Generic[ForwardT, RoundT]):
    """The base of stores of every kind, which remember a forward and a round each in their own way."""

    __slots__ = ("_forward", "_ragged", "_round")

    def __init__(self) -> None:
        self._forward: ForwardT | None = None
        self._round: RoundT | None = None  # what the rows were when it began
        self._ragged: Ragged | None = None

    @property
    def in_round(self) -> bool:
        """A speculative round is open."""
        return self._round is not None

    @property
    def right_pad(self) -> tuple[int, ...] | None:
        """The padding behind each row's prompt while a ragged prefill is open."""
        return None if self._ragged is None else self._ragged.right_pad

    def spec_round_commit(self) -> None:
        """Keeps all of the round; RuntimeError when none is open."""
        self._round_open()
        self._round = None

    def _begin_round(self, remembered: RoundT) -> None:
        self._refuse_unfinished()
        if self._round is not None:
            raise RuntimeError("a speculative round is open already")
        self._round = remembered

    def _round_open(self) -> RoundT:
        if self._round is None:
            raise RuntimeError("no speculative round is open")
        return self._round

    def _ragged_open(self) -> Ragged:
        if self._ragged is None:
            raise RuntimeError("no ragged prefill is open")
        return self._ragged

    def _refuse_inside_forward(self) -> None:
        if self._forward is not None:
            raise RuntimeError("rows can't be rearranged inside a forward")

    def _refuse_unfinished(self) -> None:
        self._refuse_inside_forward()
        if self._ragged is not None:
            raise RuntimeError("a ragged prefill is open: its padding would be taken for tokens")
