"""What layers that can't be trimmed were at earlier lengths, so that a session can go back there.

A checkpoint holds the states and windows of a lone row at one length; full-attention layers need none, they
are trimmed. Its arrays are never written, so that forks share them. A trail keeps a bounded number of them,
closer to each other near the end, where edits and rejected branches are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

from stateroom.caches.blueprint import Store
from stateroom.caches.trunk import numbered

CHECKPOINTS_MAX = 8  # a session
CHECKPOINT_BYTES_MAX = 64 * 2**20  # a session


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Checkpoint:
    """A row at `length` tokens: for each store of its cache what must be put back, or None."""

    length: int
    signature: Hashable
    stores: tuple[Store | None, ...]
    trails: WeakSet[Trail] = field(default_factory=WeakSet, repr=False)  # those that hold it
    number: int = field(default_factory=numbered, repr=False)

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes_capacity for store in self.stores if store is not None)


class Trail:
    """The checkpoints of one session, by length."""

    __slots__ = ("__weakref__", "_held", "bytes_max", "count_max", "last")

    def __init__(
        self,
        held: Sequence[Checkpoint] = (),
        count_max: int = CHECKPOINTS_MAX,
        bytes_max: int = CHECKPOINT_BYTES_MAX,
    ) -> None:
        self._held: list[Checkpoint] = []
        self.count_max = count_max
        self.bytes_max = bytes_max
        self.last = 0  # the length at which one was last taken, or found too large
        self._hold(held)

    def _hold(self, held: Sequence[Checkpoint]) -> None:
        for checkpoint in self._held:
            checkpoint.trails.discard(self)
        self._held = list(held)
        for checkpoint in self._held:
            checkpoint.trails.add(self)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def lengths(self) -> list[int]:
        return [checkpoint.length for checkpoint in self._held]

    @property
    def nbytes(self) -> int:
        return sum(checkpoint.nbytes for checkpoint in self._held)

    @property
    def shared_nbytes(self) -> int:
        """Of that, what other trails hold too."""
        return sum(checkpoint.nbytes for checkpoint in self._held if len(checkpoint.trails) > 1)

    def add(self, checkpoint: Checkpoint) -> None:
        """Takes one in, in place of another of the same length; then drops what the bounds don't allow."""
        self.last = checkpoint.length
        # One of before the rows were quantised can't be gone back to any more.
        others = [
            other
            for other in self._held
            if other.length != checkpoint.length and other.signature == checkpoint.signature
        ]
        held = sorted([*others, checkpoint], key=lambda each: each.length)
        while len(held) > self.count_max or sum(each.nbytes for each in held) > self.bytes_max:
            del held[_least_missed([each.length for each in held])]
        self._hold(held)

    def nearest(self, length: int) -> Checkpoint | None:
        """The longest that isn't longer than `length`."""
        return max(
            (each for each in self._held if each.length <= length), key=lambda each: each.length, default=None
        )

    def cut(self, length: int) -> None:
        """Forgets those beyond `length`: the tokens there are no longer the session's."""
        self._hold([each for each in self._held if each.length <= length])
        self.last = min(self.last, max(length, 0))

    def copy(self) -> Trail:
        """For a fork: the same checkpoints."""
        twin = Trail(self._held, self.count_max, self.bytes_max)
        twin.last = self.last
        return twin


def _least_missed(lengths: list[int]) -> int:
    """The one whose loss adds the least to what must be computed again, for its distance from the end."""
    if len(lengths) == 1:
        return 0
    end = lengths[-1]
    # Going back to between a checkpoint and the next, without it, begins at the one before.
    missed = [(at - before) / (end - at + 1) for before, at in zip([0, *lengths[:-1]], lengths, strict=True)]
    return missed.index(min(missed[:-1]))
