"""Which trunks of this process are which runs on disk, so that neither is there twice.

Of mlx's thread. A trunk that is on disk isn't copied to be saved again; a run whose trunk is alive isn't
loaded again, and sessions that are restored share it as they did.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from weakref import WeakKeyDictionary, WeakValueDictionary

from stateroom.caches.snapshots.content import Material
from stateroom.caches.snapshots.manifest import Manifest, Run
from stateroom.caches.snapshots.tensors import Told, name_of
from stateroom.caches.trunk import Trunk


class Trunks:
    """Holds no trunk alive."""

    def __init__(self) -> None:
        self._next = count(1).__next__
        self._keys: WeakKeyDictionary[Trunk, int] = WeakKeyDictionary()
        self._by_key: WeakValueDictionary[int, Trunk] = WeakValueDictionary()
        self._by_digest: WeakValueDictionary[str, Trunk] = WeakValueDictionary()
        self._told: WeakKeyDictionary[Trunk, dict[int, tuple[Told, ...]]] = WeakKeyDictionary()

    def key(self, trunk: Trunk) -> int:
        """A number that no other trunk of this process has."""
        if trunk not in self._keys:
            self._keys[trunk] = self._next()
            self._by_key[self._keys[trunk]] = trunk
        return self._keys[trunk]

    def told(self, trunk: Trunk, length: int) -> tuple[Told, ...] | None:
        """The run on disk of its first `length` tokens, if there is one."""
        return self._told.get(trunk, {}).get(length)

    def note(self, trunk: Trunk, length: int, tensors: tuple[Told, ...]) -> None:
        """The first `length` tokens are on disk, or came from there."""
        self._told.setdefault(trunk, {})[length] = tensors
        self._by_digest[name_of(tensors)] = trunk

    def written(self, material: Material, made: Manifest) -> None:
        """What `Library.write` made of `material`: its runs are on disk now."""
        for plain, run in zip(material.runs, made.runs, strict=True):
            trunk = self._by_key.get(plain.key)
            if trunk is not None:
                self.note(trunk, plain.length, run.tensors)

    def gone(self, digest: str) -> None:
        """The run is no longer on disk: see `RunGone`."""
        for told in self._told.values():
            for length in [length for length, tensors in told.items() if name_of(tensors) == digest]:
                del told[length]

    def alive(self, runs: Iterable[Run]) -> dict[str, Trunk]:
        """Trunks for those of the runs that needn't be loaded, held for as long as the answer is."""
        found: dict[str, Trunk] = {}
        for run in runs:
            trunk = self._by_digest.get(run.digest)
            if trunk is not None and trunk.start == run.start and trunk.end >= run.start + run.length:
                found[run.digest] = trunk
        return found
