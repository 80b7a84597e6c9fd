"""`park`, `save`, `restore` and `import`: checked here, done by the disk, answered exactly once.

A session that is parked or saved is its request's until the answer; a cancel comes too late for both.
`restore` opens a session that begins with the snapshot and with nothing else: what can't be read is refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stateroom.caches.snapshots import carried
from stateroom.caches.snapshots.manifest import About, Manifest
from stateroom.caches.snapshots.materialise import kv_parts
from stateroom.caches.snapshots.reading import check_fingerprint
from stateroom.client import protocol as p
from stateroom.client.errors import Exists, Invalid, ShuttingDown, StateroomError, Unsupported
from stateroom.daemon.engine import inputs, shelf
from stateroom.daemon.engine.disk import Disk, Shelving, Written
from stateroom.daemon.engine.fill import Fill
from stateroom.daemon.engine.kept import kept_of
from stateroom.daemon.engine.session import Session, plan
from stateroom.daemon.link import Command, Discard, Kept

if TYPE_CHECKING:
    from stateroom.daemon.engine.engine import Engine

Beginning = tuple[Manifest, "array[int]", bytes]


class Snapshots:
    """The requests of an engine that have to do with its disk."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: set[int] = set()  # rids that wait for the disk, and have no session yet
        self._cancelled: set[int] = set()  # of those

    def _disk(self) -> Disk:
        if self._engine.disk is None:
            raise Unsupported("Nothing is kept here: this daemon has no disk for it; its log says why.")
        return self._engine.disk

    @property
    def opening(self) -> list[int]:
        """Requests that wait for the disk, and have no session yet."""
        return list(self._open)

    def stop(self) -> None:
        """Whatever waits for the disk is answered now: nobody will wait for that any longer."""
        error = ShuttingDown("The daemon is stopping, and the disk wasn't done with this.")
        waiting = [] if self._engine.disk is None else list(self._engine.disk.shelvings)
        for rid in waiting:
            self._release(rid)
        for rid in [*waiting, *self._open]:
            self._engine.fail(rid, error)
        self._open.clear()

    def cancel(self, rid: int) -> None:
        """Of a restore that has yet to begin; an import is done to its end."""
        if rid in self._open:
            self._cancelled.add(rid)

    def discard(self, message: Discard) -> None:
        if self._engine.disk is not None:
            self._engine.disk.discard(message.snapshots)

    # ------------------------------------------------------------ a session is kept

    def park(self, rid: int, session: Session) -> None:
        disk = self._engine.disk
        if disk is None or session.stored == 0 or disk.covering(session) is not None:
            self._parked(rid, session)
        else:
            self._hold(rid, session)
            disk.keep_held(session, partial(self._kept_to_park, rid, session))

    def _kept_to_park(self, rid: int, session: Session, outcome: Written | Exception) -> None:
        if not self._release(rid):
            return
        if isinstance(outcome, Exception):
            self._engine.fail(rid, outcome)
        else:
            self._parked(rid, session)

    def _parked(self, rid: int, session: Session) -> None:
        engine, entry = self._engine, None
        if engine.disk is not None:
            entry = engine.disk.library.entries.get(session.snapshot or "")
        freed = engine.memory.told(session).private
        engine.decoding.guessers.forget(session)
        session.drop_kv("asked")
        result = p.ParkResult(
            tier="tokens" if entry is None else "disk",
            length=session.length,
            bytes=0 if entry is None else entry.nbytes,
            freed_bytes=freed,
        )
        engine.answer(rid, result, engine.journal(session, session.length))

    def save(
        self, command: Command, request: p.Save, session: Session, begin: Callable[[Fill], None]
    ) -> None:
        """What is missing of its KV is brought back first; a cancelled save keeps what is there by then."""
        self._disk()
        if not session.tokens:
            raise Invalid("An empty session has nothing to save; prefill something first.", field="session")
        if not session.missing:
            self._save(command, request, session)
            return

        def then(_: Fill) -> None:
            self._save(command, request, session)

        now_ms = self._engine.clock_ms()
        begin(Fill(command.rid, session, plan(session, session.length, []), then, now_ms))

    def _save(self, command: Command, request: p.Save, session: Session) -> None:
        self._hold(command.rid, session)
        then = partial(self._saved, command.rid, request, session)
        self._disk().keep_held(session, then, request.snapshot, command.snapshot)

    def _saved(self, rid: int, request: p.Save, session: Session, outcome: Written | Exception) -> None:
        if not self._release(rid):
            return
        if isinstance(outcome, Exception):
            self._engine.fail(rid, outcome)
            return
        kept = outcome.kept
        result = p.SaveResult(
            snapshot=request.snapshot, tokens=kept.length, bytes=kept.nbytes, checksum=outcome.checksum
        )
        self._engine.answer(rid, result, self._engine.journal(session, session.length))

    def _hold(self, rid: int, session: Session) -> None:
        self._engine.requests[rid] = self._disk().shelvings[rid] = Shelving(rid, session)
        self._engine.recorder.wait(rid, "disk", self._engine.clock_ms(), does="write")

    def _release(self, rid: int) -> bool:
        """The session is free again; False when the request was answered already."""
        self._engine.requests.pop(rid, None)
        return self._disk().shelvings.pop(rid, None) is not None

    # ------------------------------------------------------------ a session comes from one

    def restore(self, command: Command, request: p.Restore) -> None:
        disk, snapshot = self._disk(), command.snapshot or ""
        if command.session in self._engine.sessions:
            raise Exists("A session of this id exists.", field="session")

        def read() -> Beginning:
            found, tokens, chat = disk.library.beginning(snapshot)
            stored = {part: found.fingerprint.get(part, "") for part in ("kv", "layers")}
            check_fingerprint(found, {**disk.model(), **stored})
            return found, tokens, chat

        self._open.add(command.rid)
        self._engine.recorder.wait(command.rid, "disk", self._engine.clock_ms(), does="read")
        disk.ask(read, partial(self._begun, command, request))

    def _begun(self, command: Command, request: p.Restore, found: Beginning | Exception) -> None:
        rid = command.rid
        cancelled = rid in self._cancelled
        self._cancelled.discard(rid)
        if rid not in self._open:
            return
        self._open.discard(rid)
        try:
            if isinstance(found, Exception):
                raise found
            fill = self._fill(command, request, *found)
            fill.cancelled = cancelled
        except Exception as error:
            self._engine.fail(rid, shelf.refusal(error))
        else:
            self._engine.sharing.attempt(fill, partial(self._begin, fill, command.snapshot or ""))

    def _begin(self, fill: Fill, snapshot: str) -> None:
        if fill.cancelled:  # before it began
            self._engine.filling.begin(fill)  # which ends it
        else:
            self._disk().fetching.begin(fill, snapshot)

    def _fill(
        self, command: Command, request: p.Restore, found: Manifest, tokens: array[int], chat: bytes
    ) -> Fill:
        """The session is there from here on; without the snapshot's KV it goes again."""
        engine, loaded = self._engine, self._engine.loaded
        kv, turns = shelf.unpacked(chat, "chat")
        served = engine.schemes.of(kv)
        check_fingerprint(found, {**found.fingerprint, **kv_parts(served.blueprint)})
        all_tokens = tokens.tolist()
        inputs.check_tokens(all_tokens, loaded.vocab)
        inputs.check_length(len(all_tokens), loaded.context)
        assert command.session is not None
        session = Session(
            command.session, served, command.owner, background=request.session_class == "background"
        )

        def then(fill: Fill) -> None:
            cancelled = fill.cancelled and not fill.done
            if cancelled:
                fill.end_cancelled()
            else:
                session.chat = turns
            result = p.OpenResult(
                session=session.id,
                length=session.length,
                caps=replace(served.caps, trim_floor=session.trim_floor),
                receipt=fill.receipt(engine.clock_ms()),
                finish="cancelled" if cancelled else "done",
            )
            engine.answer(fill.rid, result, replace(engine.journal(session, 0), kv=kv))

        change = plan(session, 0, all_tokens)
        engine.sharing.enter(session)
        return Fill(command.rid, session, change, then, engine.clock_ms(), opens=True)

    # ------------------------------------------------------------ a file becomes one

    def take_in(self, command: Command, request: p.Import) -> None:
        """`command.snapshot`: the path of the file, which the broker chose."""
        disk, path, name = self._disk(), Path(command.snapshot or ""), request.snapshot
        about = About(command.owner, self._engine.loaded.id, disk.wall_ms(), name)

        def read() -> Kept:
            with open(path, "rb") as file:
                made = carried.take_in(disk.library, file, about)
            return kept_of(disk.library.entries[made.id])

        self._open.add(command.rid)
        self._engine.recorder.wait(command.rid, "disk", self._engine.clock_ms(), does="write")
        disk.change(read, partial(self._taken_in, command.rid, request))

    def _taken_in(self, rid: int, request: p.Import, kept: Kept | Exception) -> None:
        self._cancelled.discard(rid)
        if rid not in self._open:
            return
        self._open.discard(rid)
        if isinstance(kept, Exception):
            refused = shelf.refusal(kept)
            self._engine.fail(rid, refused if isinstance(refused, StateroomError) else kept)
            return
        info = p.SnapshotInfo(
            snapshot=request.snapshot, model=self._engine.loaded.id, length=kept.length, bytes=kept.nbytes
        )
        self._engine.answer(rid, p.ImportResult(received=request.total, snapshot=info))
