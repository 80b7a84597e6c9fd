"""What requests, sessions and workers mean for snapshots, and the other way about."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stateroom.client.errors import Unsupported
from stateroom.client.protocol import Event, ForgetResult, Save, SnapshotsResult
from stateroom.daemon.catalog import Catalog
from stateroom.daemon.clock import WallClock, wall_ms
from stateroom.daemon.link import Kept, Shelved
from stateroom.daemon.session import Session
from stateroom.daemon.snapshots import Snapshots
from stateroom.daemon.store.rows import SnapshotRow


class Archive:
    """Snapshots between the catalog and the workers.

    `publish(event, owner)`: tells watchers. `discard(model, ids)`: tells a worker that is there. `keeps`:
    this daemon has a state directory.
    """

    def __init__(
        self,
        catalog: Catalog,
        publish: Callable[[Event, str | None], None],
        discard: Callable[[str, list[str]], None],
        keeps: bool,
        clock_ms: WallClock = wall_ms,
    ) -> None:
        self._catalog, self._publish, self.keeps = catalog, publish, keeps
        self.snapshots = Snapshots(
            catalog.pending,
            clock_ms,
            lambda session: catalog.get(session) is not None,
            discard,
            quotas=catalog.quotas,
        )

    def need(self) -> None:
        """Raises Unsupported: nothing is kept here."""
        if not self.keeps:
            raise Unsupported(
                "This daemon keeps nothing on disk; start it with a home: `stateroom serve --home DIR`."
            )

    # ------------------------------------------------------------ clients ask

    def listed(self, owner: str) -> SnapshotsResult:
        return SnapshotsResult(
            snapshots=self.snapshots.listed(owner), used_bytes=self.snapshots.used_bytes(owner)
        )

    def forget(self, owner: str, name: str) -> ForgetResult:
        """At once, also while no worker could remove it. Raises NotFound."""
        row = self.snapshots.find(owner, name)
        self.snapshots.forget(row)
        self._catalog.pending.hurry()
        details = {"snapshot": name}
        self._publish(Event(event="snapshot_forgotten", model=row.model, details=details), owner)
        return ForgetResult(freed_bytes=row.nbytes)

    def reserve(self, owner: str, request: Save) -> Callable[[], None]:
        """The name of a `save`, until that has ended. Raises as `Snapshots.reserve` does."""
        return self.snapshots.reserve(owner, request.snapshot, request.replace)

    # ------------------------------------------------------------ sessions and workers tell

    def closed(self, session: Session) -> None:
        """What was kept of a session by itself goes with it."""
        self.snapshots.closed(session.id)

    def on_kept(self, model: str, kept: Sequence[Kept], broken: Sequence[str]) -> None:
        """All that is there of a model, now that its worker has started."""
        self.snapshots.reconcile(model, kept, broken)
        there = {each.id for each in kept}.union(broken)
        for session in self._catalog:
            if session.model == model and session.snapshot is not None and session.snapshot not in there:
                self._changed(session, None, 0)
        for each in kept:
            if each.name is None and self.snapshots.is_wanted(each.id):
                self._hold(each)

    def on_shelved(self, model: str, shelved: Shelved) -> None:
        unwanted = [each.id for each in shelved.kept if not self._arrived(model, each)]
        if unwanted:
            self.snapshots.discard(model, unwanted)
        for snapshot in shelved.gone:
            row = self.snapshots.gone(snapshot)
            if row is not None:
                self._lost(row)

    def _arrived(self, model: str, kept: Kept) -> bool:
        if not self.snapshots.kept(model, kept):
            return False
        if kept.name is None:
            self._hold(kept)
        else:
            self._catalog.pending.hurry()
            session = self._catalog.get(kept.session)
            details = {"snapshot": kept.name, "length": kept.length, "bytes": kept.nbytes}
            whose = None if session is None else session.id
            self._publish(
                Event(event="snapshot_saved", session=whose, model=model, details=details), kept.owner
            )
        return True

    def _hold(self, kept: Kept) -> None:
        session = self._catalog.get(kept.session)
        if session is not None:
            self._changed(session, kept.id, kept.nbytes)

    def _lost(self, row: SnapshotRow) -> None:
        session = self._catalog.get(row.session or "")
        if session is not None and session.snapshot == row.id:
            self._changed(session, None, 0)

    def _changed(self, session: Session, snapshot: str | None, nbytes: int) -> None:
        if (session.snapshot, session.snapshot_bytes) == (snapshot, nbytes):
            return
        tier = session.tier
        session.snapshot, session.snapshot_bytes = snapshot, nbytes
        self._catalog.record(session)
        if session.tier != tier:
            event = Event(
                event="session_moved",
                session=session.id,
                model=session.model,
                details={"tier": session.tier},
            )
            self._publish(event, session.owner)
