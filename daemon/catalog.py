"""The sessions that there are: whose they are, what they hold, what has them now. In memory.

The catalog is the owner of a session's tokens between engines: a worker's journal updates them with
every answer, so that the sessions of a dead worker can be handed to the next. What changes in a session that
was opened it tells to `pending`, from where it is written (`keeper`); `restore` is the way back.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

from stateroom.client.errors import Capacity, Exists, NotFound
from stateroom.client.limits import SESSIONS_MAX, TRUNKS_MAX
from stateroom.client.protocol import SessionClass, SessionInfo, TrunkInfo
from stateroom.client.wire import to_wire
from stateroom.daemon.clock import Clock, WallClock, wall_ms
from stateroom.daemon.lifecycle import SessionState
from stateroom.daemon.link import Journal, Part
from stateroom.daemon.parts import Parts
from stateroom.daemon.quotas import Quotas
from stateroom.daemon.session import NO_ENGINE, Session, restored
from stateroom.daemon.shown import plain, shown
from stateroom.daemon.store.pending import Pending, Unkept
from stateroom.daemon.store.rows import Everything, ModelRow

SESSION_ID_BYTES = 18  # 144 random bits: an id can't be guessed
RETRY_AFTER_S = 1.0  # told to whoever meets the limit of sessions


class Catalog:
    """Sessions by id and by name. Names are unique per owner; ids belong to one owner.

    Attributes:
        parts: what of their KV sessions share now.
        pending: takes what is to outlive the daemon.
        quotas: what each owner may have; sessions and KV are counted here.
    """

    def __init__(
        self,
        clock: Clock,
        sessions_max: int = SESSIONS_MAX,
        pending: Pending | None = None,
        wall_ms: WallClock = wall_ms,
        quotas: Quotas | None = None,
    ) -> None:
        self._clock, self._wall_ms = clock, wall_ms
        self._sessions_max = sessions_max
        self.pending = Unkept() if pending is None else pending
        self._sessions: dict[str, Session] = {}
        self._names: dict[tuple[str, str], Session] = {}
        self._published: dict[tuple[str, str], Session] = {}
        self.parts = Parts()
        self.quotas = Quotas() if quotas is None else quotas

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def owned(self, owner: str) -> list[Session]:
        return [s for s in self._sessions.values() if s.owner == owner and s.published_as is None]

    def get(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    def find(self, owner: str, reference: str) -> Session:
        """An own session by its id or name.

        Raises:
            NotFound: none such, or it is another owner's; both sound the same.
        """
        session = self._sessions.get(reference)
        if session is None or session.owner != owner or session.published_as is not None:
            session = self._names.get((owner, reference))
        if session is None:
            raise NotFound(
                "You have no such session; `list` names those you have, as `stateroom ps` does.",
                field="session",
            )
        return session

    def add(
        self,
        owner: str,
        model: str,
        names: list[str | None],
        session_class: SessionClass,
        ttl_s: float | None,
        parents: list[str],
    ) -> list[Session]:
        """New sessions, one for each entry of `names`, all of them or none.

        Raises:
            Exists: the owner has a session of that name.
            Capacity: there are too many sessions, or the owner has as many as it may.
        """
        for name in names:
            if name is not None and (owner, name) in self._names:
                raise Exists(f"You have a session named {name!r} already; close it or take another name.")
        if len(self._sessions) + len(names) > self._sessions_max:
            raise Capacity(
                f"There can be {self._sessions_max} sessions; close some.", retry_after_s=RETRY_AFTER_S
            )
        self.quotas.check(owner, "sessions", len(names))
        self.quotas.add(owner, "sessions", len(names))
        now_s, now_ms = self._clock(), self._wall_ms()
        made = [
            Session(
                id=secrets.token_urlsafe(SESSION_ID_BYTES),
                owner=owner,
                name=name,
                model=model,
                session_class=session_class,
                ttl_s=ttl_s,
                created_ms=now_ms,
                created_s=now_s,
                used_s=now_s,
                parents=list(parents),
            )
            for name in names
        ]
        for session in made:
            self._sessions[session.id] = session
            if session.name is not None:
                self._names[owner, session.name] = session
        return made

    # ------------------------------------------------------------ what outlives the daemon

    def opened(self, session: Session) -> None:
        """It was made: from here on it is kept."""
        self.pending.session(session.row(self._clock(), self._wall_ms()))
        self.pending.changed(session.id, 0, session.tokens)
        self.pending.chat(session.id, session.chat)
        self.pending.hurry()

    def record(self, session: Session) -> None:
        """Something of it changed that isn't its tokens or its chat."""
        if session.state not in (SessionState.OPENING, SessionState.CLOSED):
            self.pending.session(session.row(self._clock(), self._wall_ms()))

    def loaded(self, model: str, spec: str) -> None:
        """A model was loaded: from where, for sessions of it that outlive this daemon."""
        self.pending.put(ModelRow(model, spec, {}, self._wall_ms()))

    def restore(self, kept: Everything) -> None:
        """Takes in what a daemon before left. All of it is in no worker yet."""
        now_s, now_ms = self._clock(), self._wall_ms()
        bytes_of = {row.id: row.nbytes for row in kept.snapshots}
        for stored in kept.sessions:
            nbytes = bytes_of.get(stored.row.snapshot or "", 0)
            session = restored(stored, now_s, now_ms, nbytes)
            self._sessions[session.id] = session
            self.quotas.add(session.owner, "sessions", 1)
            if session.name is not None:
                self._names[session.owner, session.name] = session
            if session.published_as is not None:
                self._published[session.owner, session.published_as] = session

    # ------------------------------------------------------------ published trunks

    def publish(self, session: Session, name: str) -> Session:
        """A trunk of what a session holds: a session that belongs to its publisher and that nobody opens.

        Raises:
            Exists: the owner has published something under that name.
            Capacity: there are too many.
        """
        if (session.owner, name) in self._published:
            raise Exists(
                f"You have published a trunk as {name!r} already; unpublish it or take another name."
            )
        if len(self._published) >= TRUNKS_MAX:
            raise Capacity(
                f"There can be {TRUNKS_MAX} published trunks; unpublish some.", retry_after_s=RETRY_AFTER_S
            )
        (trunk,) = self.add(session.owner, session.model, [None], session.session_class, None, [session.id])
        trunk.published_as, trunk.trunk, trunk.trunk_length = name, trunk.id, session.length
        self._published[session.owner, name] = trunk
        return trunk

    def trunk(self, owner: str, reference: str) -> Session:
        """A published trunk by what lets anyone fork it, or an own one by its name.

        Raises:
            NotFound: none such that could be forked; whose it may be isn't told.
        """
        trunk = self._sessions.get(reference)
        if trunk is None or trunk.published_as is None:
            trunk = self._published.get((owner, reference))
        if trunk is None or trunk.state is not SessionState.IDLE:
            raise NotFound("There is no such trunk, or it is no longer published.", field="trunk")
        return trunk

    def published(self, owner: str, name: str) -> Session:
        """An own trunk by its name; NotFound when there is none, or it isn't published yet or any more."""
        trunk = self._published.get((owner, name))
        if trunk is None or trunk.state is not SessionState.IDLE:
            raise NotFound("You have published no such trunk; `list` tells those you have.", field="as")
        return trunk

    @property
    def trunks(self) -> int:
        """How many are published."""
        return len(self._published)

    def trunks_of(self, sees: Callable[[str], bool]) -> list[TrunkInfo]:
        """What was published by owners that may be seen."""
        now_s = self._clock()
        made = []
        for (of, name), trunk in self._published.items():
            if trunk.state is SessionState.IDLE and sees(of):
                private_bytes, shared_bytes = self.split(trunk)
                made.append(
                    TrunkInfo(
                        name=name,
                        trunk=trunk.id,
                        owner=of,
                        model=trunk.model,
                        length=trunk.length,
                        tier=trunk.tier,
                        private_bytes=private_bytes,
                        shared_bytes=shared_bytes,
                        age_s=now_s - trunk.created_s,
                    )
                )
        return made

    def _names_published(self) -> dict[str, list[str]]:
        """By the session that was published."""
        made: dict[str, list[str]] = {}
        for (_, name), trunk in self._published.items():
            if trunk.state is SessionState.IDLE:
                made.setdefault(trunk.parents[0], []).append(name)
        return made

    # ------------------------------------------------------------ ends

    def remove(self, session: Session) -> None:
        """Takes a closed session out; its name is free again."""
        assert session.state is SessionState.CLOSED
        self._hold(session, [])
        self._weigh(session, 0)
        self.quotas.add(session.owner, "sessions", -1)
        self.pending.closed(session.id)
        self.pending.hurry()
        del self._sessions[session.id]
        if session.name is not None:
            del self._names[session.owner, session.name]
        if session.published_as is not None:
            del self._published[session.owner, session.published_as]

    # ------------------------------------------------------------ what workers tell

    def journal(self, session: Session, change: Journal) -> None:
        """Takes what changed in a session, as the worker of its `generation` tells it."""
        if not 0 <= change.keep <= len(session.tokens):
            raise AssertionError(f"a journal keeps {change.keep} of {len(session.tokens)} tokens")
        before = session.length, session.snapshot, session.trunk_length
        del session.tokens[change.keep :]
        session.trunk_length = min(session.trunk_length, change.keep)  # what follows is no trunk's
        session.tokens.extend(change.tokens)
        self._weigh(session, change.private_bytes)
        session.live_bytes = change.live_bytes
        if change.parts is not None:
            self._hold(session, change.parts)
        if change.kinds is not None:
            session.kinds = change.kinds
        session.resident = change.resident
        if change.trim_floor is not None:
            session.trim_floor, session.checkpoints = change.trim_floor, change.checkpoints or []
        if change.chat is not None:
            session.chat = change.chat
        if change.kv is not None:
            session.kv = change.kv
        if change.snapshot is not None:
            session.snapshot = change.snapshot or None
            session.snapshot_bytes = session.snapshot_bytes if session.snapshot else 0
        if session.state is not SessionState.OPENING:
            self._keep(session, change, before)

    def _keep(self, session: Session, change: Journal, before: tuple[int, str | None, int]) -> None:
        """Tells what outlives the daemon of a change. `before`: length, snapshot, tokens of a trunk."""
        length, *row = before
        if change.tokens or change.keep < length:
            self.pending.changed(session.id, change.keep, change.tokens)
        if change.chat is not None:
            self.pending.chat(session.id, session.chat)
        if row != [session.snapshot, session.trunk_length]:
            self.record(session)

    def forget_engine(self, session: Session) -> None:
        """Its worker is gone: what remains is its tokens."""
        self._hold(session, [])
        session.generation, session.resident = NO_ENGINE, False
        self._weigh(session, 0)
        session.live_bytes = session.trim_floor = 0
        session.checkpoints = []

    def _hold(self, session: Session, parts: list[Part]) -> None:
        self.parts.replace(session.generation, session.parts, parts)
        self.quotas.hold(session.owner, session.generation, session.parts, parts)
        session.parts = parts

    def _weigh(self, session: Session, own_bytes: int) -> None:
        self.quotas.add(session.owner, "own_bytes", own_bytes - session.own_bytes)
        session.own_bytes = own_bytes

    def split(self, session: Session) -> tuple[int, int]:
        """KV bytes that it alone has, and those that other sessions have too."""
        private, shared = self.parts.split(session.generation, session.parts)
        return session.own_bytes + private, shared

    def touch(self, session: Session) -> None:
        session.used_s = self._clock()
        self.record(session)

    def lease(self, session: Session, ttl_s: float | None) -> float | None:
        """Keeps a session for so long after its last use, which this is; None: until it is closed.

        Gives when it would end. Raises `NotFound` for one that is being closed.
        """
        if session.state in (SessionState.ENDING, SessionState.CLOSING):
            raise NotFound("The session is being closed.", field="session")
        session.ttl_s = ttl_s
        self.touch(session)
        return session.expires_in_s(self._clock())

    def expired(self) -> list[Session]:
        """Idle sessions that nobody used for their `ttl_s`."""
        now_s = self._clock()
        return [
            session
            for session in self._sessions.values()
            if session.ttl_s is not None
            and session.state is SessionState.IDLE
            and now_s - session.used_s >= session.ttl_s
        ]

    def listed(self, sees: Callable[[str], bool]) -> list[tuple[Session, dict[str, Any]]]:
        """Each session with its `info` in wire form, of owners that may be seen.

        There may be thousands, and nothing else is done meanwhile: this way takes a quarter of the time.
        """
        now_s = self._clock()
        owners = {owner for owner in {session.owner for session in self._sessions.values()} if sees(owner)}
        sessions = [
            session
            for session in self._sessions.values()
            if session.published_as is None and session.owner in owners
        ]
        kinds_of = {id(s.kinds): s.kinds for s in sessions}
        kinds = {known: to_wire(each) for known, each in kinds_of.items()}
        published = self._names_published()
        return [
            (
                session,
                plain(
                    session,
                    self.split(session),
                    published.get(session.id, []),
                    now_s,
                    kinds[id(session.kinds)],
                ),
            )
            for session in sessions
        ]

    def info(self, session: Session) -> SessionInfo:
        published = self._names_published().get(session.id, [])
        return shown(session, self.split(session), published, self._clock())
