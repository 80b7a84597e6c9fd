"""Fills that begin with a snapshot: they wait for it outside the queues, and are told what came of it.

A fill is admitted by the budget before anything is read, and stands among the engine's requests while it
waits, so that nobody else is given its room. What was read is believed when every byte was checked; its
tokens are compared with the session's, and KV of those that both have is what the fill begins with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stateroom.caches.snapshots.content import Content
from stateroom.caches.snapshots.manifest import Manifest
from stateroom.caches.snapshots.materialise import kv_parts
from stateroom.caches.snapshots.rebuild import rebuilding
from stateroom.caches.snapshots.refusals import Corrupt, Mismatch, Missing
from stateroom.caches.trunk import Trunk
from stateroom.daemon.engine import shelf
from stateroom.daemon.engine.fill import Fill
from stateroom.daemon.engine.session import Session, common_prefix, reachable
from stateroom.daemon.engine.sharing import SHARE_MIN

if TYPE_CHECKING:
    from stateroom.daemon.engine.disk import Disk
    from stateroom.daemon.engine.engine import Engine


READ_MAX = 2  # snapshots that are read, or to become arrays: they are in memory besides the budget


@dataclass(frozen=True, slots=True, eq=False)
class _Fetch:
    """`must`: the snapshot was asked for by name, so that without it there is no answer."""

    fill: Fill
    snapshot: str
    must: bool


class Fetching:
    """Of one engine and its disk."""

    def __init__(self, engine: Engine, disk: Disk) -> None:
        self._engine = engine
        self._disk = disk
        self._waiting: dict[int, _Fetch] = {}  # by rid
        self._known: deque[tuple[_Fetch, Manifest]] = deque()  # to be read
        self._reading = 0
        self._building: dict[_Fetch, Generator[None, None, None]] = {}  # of those, what was read

    @property
    def waiting(self) -> int:
        """Fills that wait for the disk."""
        return len(self._waiting)

    def waits(self, fill: Fill) -> bool:
        return fill.rid in self._waiting

    def covers(self, fill: Fill) -> int:
        """How many of a fill's tokens the session's own snapshot may have KV of."""
        session = fill.session
        if fill.fetched or session.snapshot is None:
            return 0
        kept = session.length if fill.applied else fill.change.keep
        length = min(session.snapshot_length, session.snapshot_stored, kept, fill.change.length - 1)
        # States go back to where they were kept and nowhere else; windows a little, which is tried.
        if session.served.blueprint.states and length < session.snapshot_stored:
            return 0
        return max(length, 0)

    def begin(self, fill: Fill, snapshot: str | None = None) -> None:
        """Has the session's own snapshot read for a fill, or the one that is given, without which it fails.

        Raises `Capacity`, and nothing has changed.
        """
        wanted = snapshot or fill.session.snapshot
        assert wanted is not None
        self._engine.memory.admit_fill(fill)
        fill.fetched = True
        fetch = _Fetch(fill, wanted, snapshot is not None)
        self._engine.requests[fill.rid] = fill
        self._waiting[fill.rid] = fetch
        self._engine.recorder.wait(fill.rid, "disk", self._engine.clock_ms(), does="read")
        self._disk.ask(lambda: self._disk.library.manifest(wanted), lambda found: self._found(fetch, found))

    @property
    def pressing(self) -> bool:
        """Something was read, and is to become arrays."""
        return bool(self._building)

    def turn(self) -> None:
        """Once a turn of the loop: makes an array of what was read; who was cancelled waits no longer."""
        for fetch in [each for each in self._waiting.values() if each.fill.cancelled]:
            self._leave(fetch)
            self._engine.filling.begin(fetch.fill)  # which ends it
        if self._building:
            fetch, steps = next(iter(self._building.items()))
            try:
                next(steps, None)
            except Exception as error:
                if not self.waits(fetch.fill):
                    raise  # it was handed on
                self._unread(fetch, error)
        self._read_on()

    def _leave(self, fetch: _Fetch) -> None:
        self._building.pop(fetch, None)
        del self._waiting[fetch.fill.rid], self._engine.requests[fetch.fill.rid]

    def _found(self, fetch: _Fetch, found: Manifest | Exception) -> None:
        """The manifest is read: the rest follows."""
        if self._waiting.get(fetch.fill.rid) is not fetch:
            return
        if isinstance(found, Exception):
            self._unread(fetch, found)
            return
        self._known.append((fetch, found))

    def _read_on(self) -> None:
        while self._known and self._reading + len(self._building) < READ_MAX:
            fetch, found = self._known.popleft()
            if self._waiting.get(fetch.fill.rid) is fetch:
                self._begin_read(fetch, found)

    def _begin_read(self, fetch: _Fetch, found: Manifest) -> None:
        """All of it but for runs that are in memory."""
        alive = self._disk.trunks.alive(found.runs)
        stored = kv_parts(fetch.fill.session.served.blueprint)

        def read() -> Content:
            expected = {**self._disk.model(), **stored}
            return self._disk.library.read(fetch.snapshot, expected, frozenset(alive))

        self._reading += 1
        self._disk.ask(read, lambda content: self._read(fetch, alive, content))

    def _read(self, fetch: _Fetch, alive: Mapping[str, Trunk], content: Content | Exception) -> None:
        self._reading -= 1
        if self._waiting.get(fetch.fill.rid) is not fetch:
            return
        if isinstance(content, Exception):
            self._unread(fetch, content)
            return
        self._building[fetch] = self._build(fetch, alive, content)

    def _build(
        self, fetch: _Fetch, alive: Mapping[str, Trunk], content: Content
    ) -> Generator[None, None, None]:
        """Arrays of what was read, a step each; then the fill begins with KV of the tokens that both have."""
        fill, told = fetch.fill, content.manifest
        length = min(told.stored, common_prefix(content.tokens.tolist(), fill.tokens), fill.change.length - 1)
        if not fetch.must and 0 < length < self._engine.sharing.lendable(fill) + SHARE_MIN:
            self._leave(fetch)  # meanwhile somebody has them, such as another fork of the same trunk
            self._engine.sharing.begin_again(fill)
            return
        if fill.session.cache is not None:  # else both would be held
            fill.apply()
            fill.session.drop_kv()
            fill.change = replace(fill.change, kv_keep=0)
        alive = {**self._disk.trunks.alive(told.runs), **alive}
        left = tuple(
            None if run.digest in alive else plain for run, plain in zip(told.runs, content.runs, strict=True)
        )
        served = fill.session.served
        cache = yield from rebuilding(
            replace(content, runs=left), served.empty(), self._disk.trunks, alive, served.samples
        )
        loan = Session("", served, cache=cache)
        loan.go_back(reachable(cache, 0, loan.trail, length))
        if not loan.stored and not fetch.must:
            why = f"the snapshot's KV of {told.stored} tokens can't go back to those that are kept"
            self._compute(fetch, why)
            return
        fill.borrow(loan, read=True)
        self._note(fetch, content)
        if fill.session.cache is not None:  # while it is still known what the fill has yet to take
            self._engine.memory.mark(fill.session, fill.session.cache, 0, every=1)
        self._leave(fetch)
        self._engine.sharing.go_on(fill)

    def _note(self, fetch: _Fetch, content: Content) -> None:
        """What the snapshot covers of its session's tokens is known now."""
        session = fetch.fill.session
        if session.snapshot == fetch.snapshot:
            stored = content.manifest.stored
            session.snapshot_sure, session.snapshot_stored = True, stored
            session.snapshot_length = common_prefix(content.tokens.tolist(), session.tokens)

    def _unread(self, fetch: _Fetch, error: Exception) -> None:
        """It can't be used: computed instead, unless it was asked for."""
        if isinstance(error, Corrupt):
            self._disk.doubt(error)
        if fetch.must:
            fill = fetch.fill
            self._leave(fetch)
            if fill.opens:
                self._engine.sharing.leave(fill.session)
            self._engine.fail(fill.rid, shelf.refusal(error))
            return
        known = isinstance(error, Corrupt | Mismatch | Missing)
        if known:
            self._disk.drop(fetch.fill.session)
        else:
            self._engine.report(error, fetch.fill.rid)
        self._compute(fetch, f"the snapshot couldn't be used: {shelf.words(error)}")

    def _compute(self, fetch: _Fetch, why: str) -> None:
        fill = fetch.fill
        self._leave(fetch)
        fill.change = replace(fill.change, why=why)
        self._engine.sharing.begin_again(fill)
