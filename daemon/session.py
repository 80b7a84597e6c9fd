"""One session, as the broker knows it; and as it is written and read again. Pure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from stateroom.client.protocol import KV, ErrorBody, KindCaps, SessionClass
from stateroom.daemon.lifecycle import SESSIONS, SessionEvent, SessionState, after
from stateroom.daemon.link import ChatTurn, Part
from stateroom.daemon.store.rows import SessionRow, StoredSession

NO_ENGINE = -1  # generation of a session that is in no worker: it holds tokens only


@dataclass(slots=True, eq=False)
class Session:
    """One session. `generation` is that of the worker that knows it; `running` is the rid that has it."""

    id: str
    owner: str
    name: str | None
    model: str
    session_class: SessionClass
    ttl_s: float | None
    created_ms: int  # of the wall clock; all other times are the catalog's clock
    created_s: float
    used_s: float
    parents: list[str] = field(default_factory=list)
    state: SessionState = SessionState.OPENING
    tokens: array[int] = field(default_factory=lambda: array("I"))
    kv: KV | None = None  # as it was opened
    published_as: str | None = None  # it is a published trunk: nobody's session, forked by who knows its id
    trunk: str | None = None  # the published trunk that it stems from, and how much of it that is
    trunk_length: int = 0
    own_bytes: int = 0
    live_bytes: int = 0
    parts: list[Part] = field(default_factory=list)
    trim_floor: int = 0
    checkpoints: list[int] = field(default_factory=list)
    chat: list[ChatTurn] = field(default_factory=list)
    resident: bool = False
    snapshot: str | None = None  # the automatic one of its KV, and its bytes on disk
    snapshot_bytes: int = 0
    quarantined: str | None = None  # why nothing runs in it
    kinds: list[KindCaps] = field(default_factory=list)
    generation: int = NO_ENGINE
    running: int | None = None
    running_op: str | None = None
    lost: bool = False  # its worker died, and no other has it yet
    refusal: ErrorBody | None = None  # its worker would not take it over, and what asked isn't told yet
    held: int | None = None  # rid of the `sync` or `close` that waits for the running request's end

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def tier(self) -> str:
        if self.resident:
            return "resident"
        return "tokens" if self.snapshot is None else "disk"

    def advance(self, event: SessionEvent) -> None:
        self.state = after(SESSIONS, self.state, event)

    def expires_in_s(self, now_s: float) -> float | None:
        """Until it is closed when nothing touches it."""
        if self.ttl_s is None or self.running is not None:
            return self.ttl_s
        return max(0.0, self.used_s + self.ttl_s - now_s)

    @property
    def capacity_bytes(self) -> int:
        """What is allocated for its tokens; checkpoints are not."""
        if not self.parts:
            return self.own_bytes
        return self.own_bytes + sum([part.bytes for part in self.parts if part.trunk])

    def row(self, now_s: float, now_ms: int) -> SessionRow:
        """What outlives the daemon, but for tokens and chat. `now_s`, `now_ms`: by both clocks."""
        return SessionRow(
            id=self.id,
            owner=self.owner,
            model=self.model,
            session_class=self.session_class,
            created_ms=self.created_ms,
            used_ms=now_ms - round((now_s - self.used_s) * 1000),
            name=self.name,
            ttl_s=self.ttl_s,
            kv=self.kv,
            parents=self.parents,
            published_as=self.published_as,
            trunk=self.trunk,
            trunk_length=self.trunk_length,
            snapshot=self.snapshot,
            quarantined=self.quarantined,
        )


def restored(stored: StoredSession, now_s: float, now_ms: int, snapshot_bytes: int) -> Session:
    """The session that was written. A clock that was set back since makes nothing older than it is."""
    row = stored.row
    return Session(
        id=row.id,
        owner=row.owner,
        name=row.name,
        model=row.model,
        session_class=row.session_class,
        ttl_s=row.ttl_s,
        created_ms=row.created_ms,
        created_s=now_s - max(0, now_ms - row.created_ms) / 1000,
        used_s=now_s - max(0, now_ms - row.used_ms) / 1000,
        parents=row.parents,
        state=SessionState.IDLE,
        tokens=stored.tokens,
        kv=row.kv,
        published_as=row.published_as,
        trunk=row.trunk,
        trunk_length=row.trunk_length,
        chat=stored.chat,
        snapshot=row.snapshot,
        snapshot_bytes=snapshot_bytes,
        quarantined=row.quarantined,
    )
