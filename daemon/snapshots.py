"""The snapshots that are wanted: whose, of which model, under which name. Pure; kept through `pending`.

A worker's library knows which snapshots are there. Where the two differ (a kill between the one's word and
the other's), `reconcile` decides: files that nobody remembers are adopted if they have a name or their
session lives, and what was forgotten goes. A row that is forgotten stays until its files are gone: it says
that they are to go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from stateroom.client.errors import Busy, Capacity, Exists, NotFound
from stateroom.client.limits import SNAPSHOTS_MAX
from stateroom.client.protocol import SnapshotInfo
from stateroom.daemon.clock import WallClock
from stateroom.daemon.link import Kept
from stateroom.daemon.quotas import Quotas
from stateroom.daemon.store.pending import Pending
from stateroom.daemon.store.rows import SnapshotRow

RETRY_AFTER_S = 1.0  # told to whoever meets the limit of snapshots


class Snapshots:
    """By id; those that were asked for by owner and name, too.

    `lives(session)`: whether there is such a session. `discard(model, ids)`: called with what its worker is
    to remove; one that isn't there is told at its next start.
    """

    def __init__(
        self,
        pending: Pending,
        wall_ms: WallClock,
        lives: Callable[[str], bool],
        discard: Callable[[str, list[str]], None],
        most: int = SNAPSHOTS_MAX,
        quotas: Quotas | None = None,
    ) -> None:
        self._quotas = Quotas() if quotas is None else quotas
        self._pending, self._wall_ms, self._lives, self.discard = pending, wall_ms, lives, discard
        self._most = most
        self._rows: dict[str, SnapshotRow] = {}
        self._named: dict[tuple[str, str], str] = {}
        self._automatic: dict[str, str] = {}  # by session
        self._reserved: set[tuple[str, str]] = set()
        self._bytes: Counter[str] = Counter()  # by owner
        self._automatic_bytes = 0

    def load(self, rows: Iterable[SnapshotRow]) -> None:
        """What a daemon before left, once its sessions are known."""
        for row in rows:
            self._rows[row.id] = row
            if not row.forgotten:
                self._want(row)
        for row in list(self._rows.values()):
            if row.automatic and not row.forgotten and not self._lives(row.session or ""):
                self.forget(row)

    # ------------------------------------------------------------ what clients ask

    def find(self, owner: str, name: str) -> SnapshotRow:
        """Raises NotFound: the owner has none of that name."""
        known = self._named.get((owner, name))
        if known is None:
            raise NotFound("You have no such snapshot; `snapshots` tells those you have.", field="snapshot")
        return self._rows[known]

    def id_of(self, owner: str, name: str) -> str | None:
        return self._named.get((owner, name))

    def reserve(self, owner: str, name: str, replace: bool = False) -> Callable[[], None]:
        """Keeps a name for a snapshot that is being made; what this gives lets go of it.

        Raises:
            Exists: it is taken, and not to be replaced.
            Busy: another snapshot of that name is being made.
            Capacity: there are too many.
        """
        key = owner, name
        if key in self._named and not replace:
            raise Exists(
                f"You have a snapshot named {name!r} already; forget it, replace it or take another name.",
                field="snapshot",
            )
        if key in self._reserved:
            raise Busy(f"A snapshot named {name!r} is being made; wait for its end.", field="snapshot")
        if key not in self._named and len(self._named) + len(self._reserved) >= self._most:
            raise Capacity(f"There can be {self._most} snapshots; forget some.", retry_after_s=RETRY_AFTER_S)
        self._reserved.add(key)
        return lambda: self._reserved.discard(key)

    def is_wanted(self, snapshot: str) -> bool:
        row = self._rows.get(snapshot)
        return row is not None and not row.forgotten

    def listed(self, owner: str) -> list[SnapshotInfo]:
        """Those that an owner asked for, the oldest first."""
        rows = [self._rows[known] for (of, _), known in self._named.items() if of == owner]
        return [self.info(row) for row in sorted(rows, key=lambda row: (row.created_ms, row.id))]

    def info(self, row: SnapshotRow) -> SnapshotInfo:
        return SnapshotInfo(
            snapshot=row.name or "",
            model=row.model,
            length=row.length,
            bytes=row.nbytes,
            age_s=max(0.0, (self._wall_ms() - row.created_ms) / 1000),
            session=row.session if row.session is not None and self._lives(row.session) else None,
        )

    def used_bytes(self, owner: str) -> int:
        """What all of an owner's snapshots take, automatic ones too."""
        return self._bytes[owner]

    def gauges(self) -> dict[str, float]:
        total = sum(self._bytes.values())
        return {
            "snapshots": len(self._named),
            "snapshot_bytes": total - self._automatic_bytes,
            "snapshots_automatic": len(self._automatic),
            "snapshot_automatic_bytes": self._automatic_bytes,
        }

    # ------------------------------------------------------------ what is no longer wanted

    def forget(self, row: SnapshotRow) -> None:
        """Nobody wants it any more. Its worker removes it now, or when it starts."""
        self._unwant(row)
        self._put(replace(row, forgotten=True))
        self.discard(row.model, [row.id])

    def closed(self, session: str) -> None:
        """What the daemon kept of the session by itself has no use any more."""
        known = self._automatic.get(session)
        if known is not None:
            self.forget(self._rows[known])

    # ------------------------------------------------------------ what workers tell

    def kept(self, model: str, told: Kept, new: bool = True) -> bool:
        """A snapshot is on disk. False: nobody wants it, and it is to be discarded.

        `new`: it was just written, whatever the clock says; else it was found beside others.
        """
        row = _row(model, told)
        before = self._rows.get(told.id)
        if before is not None:
            return not before.forgotten
        if row.automatic and not self._lives(row.session or ""):
            return False
        other = self._rows.get(self._rival(row) or "")
        if other is not None:
            if not new and other.created_ms > row.created_ms:
                return False
            self._replaced(other, row)
        self._want(row)
        self._put(row)
        return True

    def gone(self, snapshot: str) -> SnapshotRow | None:
        """It isn't on disk any more. Gives what was known of it."""
        row = self._rows.pop(snapshot, None)
        if row is not None:
            if not row.forgotten:
                self._unwant(row)
            self._pending.drop(SnapshotRow, snapshot)
        return row

    def reconcile(self, model: str, kept: Iterable[Kept], broken: Iterable[str]) -> None:
        """What is there of a model when its worker starts, all of it.

        What can't be read stays while somebody may want it: to restore it says what is wrong.
        """
        told = {each.id: each for each in kept}
        there = set(told).union(broken)
        for row in list(self._rows.values()):
            if row.model == model and row.id not in there:
                self.gone(row.id)
        for each in sorted(told.values(), key=lambda each: each.created_ms):
            self.kept(model, each, new=False)
        unwanted = [known for known in there if self._unwanted(known, known in told)]
        if unwanted:
            self.discard(model, sorted(unwanted))

    def _unwanted(self, snapshot: str, readable: bool) -> bool:
        row = self._rows.get(snapshot)
        return readable if row is None else row.forgotten

    # ------------------------------------------------------------ inside

    def _rival(self, row: SnapshotRow) -> str | None:
        """The one that has its place."""
        if row.name is not None:
            return self._named.get((row.owner, row.name))
        return self._automatic.get(row.session or "")

    def _replaced(self, other: SnapshotRow, by: SnapshotRow) -> None:
        if other.model != by.model:
            self.forget(other)
            return
        self.gone(other.id)  # its library removes it with the arrival of the new one
        self.discard(other.model, [other.id])  # and if it doesn't, now

    def _want(self, row: SnapshotRow) -> None:
        self._bytes[row.owner] += row.nbytes
        if row.automatic:
            self._automatic_bytes += row.nbytes
            self._automatic[row.session or ""] = row.id
        elif row.name is not None:
            self._named[row.owner, row.name] = row.id
            self._quotas.add(row.owner, "disk", row.nbytes)

    def _unwant(self, row: SnapshotRow) -> None:
        self._bytes[row.owner] -= row.nbytes
        if not self._bytes[row.owner]:
            del self._bytes[row.owner]
        if row.automatic:
            self._automatic_bytes -= row.nbytes
            del self._automatic[row.session or ""]
        elif row.name is not None:
            del self._named[row.owner, row.name]
            self._quotas.add(row.owner, "disk", -row.nbytes)

    def _put(self, row: SnapshotRow) -> None:
        self._rows[row.id] = row
        self._pending.put(row)


def _row(model: str, told: Kept) -> SnapshotRow:
    return SnapshotRow(
        id=told.id,
        owner=told.owner,
        model=model,
        length=told.length,
        nbytes=told.nbytes,
        created_ms=told.created_ms,
        name=told.name,
        session=told.session or None,
        automatic=told.name is None,
    )
