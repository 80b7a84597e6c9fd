"""A session as plain bytes: made of it on mlx's thread, or read back for that thread. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from stateroom.caches.snapshots.manifest import Fact, Manifest
from stateroom.caches.snapshots.tensors import Plain, Told


@dataclass(frozen=True, slots=True)
class PlainRun:
    """Tokens that sessions share. `told`: the run is on disk, and `tensors` is empty; see `Trunks`.

    `key` and `length` name the trunk in this process.
    """

    store: int
    start: int
    length: int
    key: int
    tensors: tuple[Plain, ...] = ()
    told: tuple[Told, ...] | None = None


@dataclass(frozen=True, slots=True)
class Material:
    """What a snapshot is written from: evaluated, copied, nothing of mlx in it.

    Attributes:
        tokens: all of the session, uint32; KV is of the first `facts["length"]`.
        fingerprint: how the KV is stored, by part.
        facts: the cache's scalars.
        tail: the arrays that no other session has.
        chat: whatever else belongs to the session; kept as it is.
    """

    tokens: array[int]
    fingerprint: Mapping[str, str]
    facts: Mapping[str, Fact]
    tail: tuple[Plain, ...]
    runs: tuple[PlainRun, ...] = ()
    chat: bytes = b""

    @property
    def nbytes(self) -> int:
        tensors = [*self.tail, *(tensor for run in self.runs for tensor in run.tensors)]
        return sum(len(memoryview(tensor.content).cast("B")) for tensor in tensors)


@dataclass(frozen=True, slots=True)
class Content:
    """What was read of a snapshot, every byte of it as its manifest tells.

    `runs`, one for each of the manifest's; None: the reader said that it holds that run.
    """

    manifest: Manifest
    tokens: array[int]
    chat: bytes
    tail: tuple[Plain, ...]
    runs: tuple[tuple[Plain, ...] | None, ...] = field(default=())
