"""What the store knows of each thing, as it is written. Times are of the wall clock: they outlive a boot."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from stateroom.client.protocol import KV, SessionClass
from stateroom.daemon.link import ChatTurn


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session but for its tokens and its chat."""

    id: str
    owner: str
    model: str
    session_class: SessionClass
    created_ms: int
    used_ms: int
    name: str | None = None
    ttl_s: float | None = None
    kv: KV | None = None  # as it was opened
    parents: list[str] = field(default_factory=list)
    published_as: str | None = None  # it is a published trunk
    trunk: str | None = None  # the published trunk that it is, or stems from, and how much of it that is
    trunk_length: int = 0
    snapshot: str | None = None  # the automatic one of its KV
    quarantined: str | None = None  # why nothing runs in it


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """A snapshot on disk. `session`: whose; it may be closed by now. `automatic`: nobody asked for it."""

    id: str
    owner: str
    model: str
    length: int
    nbytes: int
    created_ms: int
    name: str | None = None
    session: str | None = None
    automatic: bool = False
    forgotten: bool = False  # nobody wants it any more, and it isn't removed yet

    @property
    def key(self) -> str:
        return self.id


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model that sessions are of, and what it was when it was last loaded."""

    id: str
    spec: str
    fingerprint: dict[str, str]
    loaded_ms: int

    @property
    def key(self) -> str:
        return self.id


Row = SnapshotRow | ModelRow


@dataclass(frozen=True, slots=True)
class StoredSession:
    row: SessionRow
    tokens: array[int]
    chat: list[ChatTurn]


@dataclass(frozen=True, slots=True)
class Everything:
    """What a daemon begins with."""

    sessions: list[StoredSession] = field(default_factory=list)
    snapshots: list[SnapshotRow] = field(default_factory=list)
    models: list[ModelRow] = field(default_factory=list)
