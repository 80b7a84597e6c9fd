"""Snapshots as files that clients carry: `export` reads a library's, `import` collects one for a worker.

Both move pieces of a file, one message each; a thread reads and writes, the loop waits for no disk. A file
that comes in lies in `incoming/` under a name of ours until its worker has taken it in; what is begun and
not gone on with is dropped. What goes out is read where it lies.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from structlog.typing import FilteringBoundLogger

from stateroom.caches.snapshots import refusals
from stateroom.caches.snapshots.carried import Carried
from stateroom.caches.snapshots.limits import BYTES_MAX, floor_of
from stateroom.caches.snapshots.places import library_of
from stateroom.caches.snapshots.reading import Reader
from stateroom.client.errors import (
    Busy,
    Capacity,
    Corrupt,
    Internal,
    Invalid,
    Mismatch,
    NotFound,
    StateroomError,
)
from stateroom.client.protocol import Body, Export, ExportResult, Import, ImportResult
from stateroom.daemon.clock import Clock
from stateroom.daemon.lifecycle import RequestState
from stateroom.daemon.logs import incident
from stateroom.daemon.peers import Peer
from stateroom.daemon.snapshots import Snapshots
from stateroom.daemon.supervisor import Engine
from stateroom.daemon.tickets import Ticket

EXPORT_BYTES = 2**20  # of one answer: a thousand may wait for a client that doesn't read
IDLE_S = 60.0  # what is begun and not gone on with for so long is dropped
CARRIED_PER_OWNER_MAX = 4  # files under way, in each direction
CARRIED_MAX = 32  # the same of all owners; an export holds a handful of descriptors
RETRY_AFTER_S = 5.0

Key = tuple[Peer, str, str]  # connection, owner and snapshot's name
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Outgoing:
    """A snapshot that is being read. `file` is opened, and its bytes checked, by the thread."""

    library: Reader
    snapshot: str
    used_s: float
    file: Carried | None = None
    asked: int = 0  # pieces that are not answered yet: the first waits for all to be checked

    def read(self, at: int) -> ExportResult:
        """On the thread."""
        if self.file is None:
            self.file = Carried(self.library, self.snapshot)
        if at > self.file.total:
            raise Invalid(f"The file has {self.file.total} bytes.", field="offset", total=self.file.total)
        data = self.file.read(at, EXPORT_BYTES)
        end = at + len(data)
        return ExportResult(data=data, total=self.file.total, next=end if end < self.file.total else None)

    def close(self) -> None:
        """On the thread."""
        if self.file is not None:
            self.file.close()


@dataclass(slots=True, eq=False)
class Incoming:
    """A file that is being collected. `received`: bytes that are there, or are being written."""

    path: Path
    total: int
    engine: Engine  # of the model whose snapshot it is to be
    let_go: Callable[[], None]  # of its name
    used_s: float
    received: int = 0
    writing: bool = False

    def write(self, data: bytes, at: int) -> None:
        """On the thread."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            left = memoryview(data)
            while left:
                written = os.pwrite(descriptor, left, at)
                left, at = left[written:], at + written
        finally:
            os.close(descriptor)


class Carriage:
    """Files on their way in and out. Make it inside a running event loop; `close` it.

    `end(ticket, body)`: gives a request its final reply. `take_in(ticket, engine)`: has a worker take in the
    file of `Ticket.snapshot`. `bytes_max`, `free_bytes`: of all files that come in, as they will be, and what
    they leave free; None: what is usual for snapshots on that disk.
    """

    def __init__(
        self,
        state_dir: Path,
        snapshots: Snapshots,
        end: Callable[[Ticket, Body], None],
        take_in: Callable[[Ticket, Engine], None],
        clock: Clock,
        log: FilteringBoundLogger,
        bytes_max: int | None = None,
        free_bytes: int | None = None,
    ) -> None:
        self._state_dir, self._snapshots = state_dir, snapshots
        self._bytes_max, self._free_bytes = bytes_max or BYTES_MAX, free_bytes
        self._end, self._take_in, self._clock, self._log = end, take_in, clock, log
        self._folder = state_dir / "incoming"
        shutil.rmtree(self._folder, ignore_errors=True)  # what a daemon before left
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="carriage")
        self._incoming: dict[Key, Incoming] = {}
        self._outgoing: dict[Key, Outgoing] = {}

    # ------------------------------------------------------------ out

    def export(self, ticket: Ticket, request: Export) -> None:
        """Answers with the next piece.

        Raises:
            NotFound: the owner has no such snapshot.
            Capacity: too many files are under way.
        """
        assert ticket.peer is not None
        key = ticket.peer, ticket.owner, request.snapshot
        if request.offset == 0 or key not in self._outgoing:
            self._drop_outgoing(key)
            row = self._snapshots.find(ticket.owner, request.snapshot)
            self._room(self._outgoing, ticket.owner)
            library = Reader(library_of(self._state_dir, row.model))
            self._outgoing[key] = Outgoing(library, row.id, self._clock())
        going = self._outgoing[key]
        going.asked += 1

        def over(last: bool) -> None:
            going.asked, going.used_s = going.asked - 1, self._clock()
            if last and self._outgoing.get(key) is going:
                self._drop_outgoing(key)

        def then(result: ExportResult) -> None:
            over(result.next is None)
            self._reply(ticket, result)

        self._on_thread(ticket, lambda: going.read(request.offset), then, lambda: over(True))

    def _drop_outgoing(self, key: Key) -> None:
        going = self._outgoing.pop(key, None)
        if going is not None:
            self._thread.submit(going.close)

    # ------------------------------------------------------------ in

    def receive(self, ticket: Ticket, request: Import, find: Callable[[], Engine]) -> None:
        """Takes the next piece; with the last one the file goes to the engine that `find` gives.

        Raises:
            Exists, Busy: of the name; or the piece before is still being written.
            Invalid: the piece isn't the next one.
            Capacity: too many files are under way, or the disk has no room for this one.
            NotFound: no such model.
        """
        assert ticket.peer is not None
        key = ticket.peer, ticket.owner, request.snapshot
        coming = self._incoming.get(key)
        if coming is not None and coming.writing:
            raise Busy("The piece before is still being written; await its answer.", field="snapshot")
        if request.offset == 0:
            coming = self._begin(ticket, request, find, key)
        self._check(coming, request)
        assert coming is not None
        coming.writing, coming.used_s = True, self._clock()
        data, at = request.data, coming.received
        ticket.request = replace(request, data=b"")  # it may wait for its worker
        piece = coming

        def written() -> bool:
            """Whether it is still wanted: its client may have gone meanwhile."""
            piece.writing, piece.used_s = False, self._clock()
            if self._incoming.get(key) is not piece:
                self._remove(piece)
            return self._incoming.get(key) is piece

        def then(_: None) -> None:
            if not written():
                return
            piece.received += len(data)
            if piece.received < piece.total:
                self._reply(ticket, ImportResult(received=piece.received))
            else:
                self._complete(ticket, key)

        def failed() -> None:
            if written():
                self._drop_incoming(key)

        self._on_thread(ticket, lambda: piece.write(data, at), then, failed)

    def _begin(self, ticket: Ticket, request: Import, find: Callable[[], Engine], key: Key) -> Incoming:
        engine = find()
        self._drop_incoming(key)
        self._room(self._incoming, ticket.owner)
        self._room_on_disk(request.total)
        let_go = self._snapshots.reserve(ticket.owner, request.snapshot)
        path = self._folder / secrets.token_hex(16)
        self._incoming[key] = Incoming(path, request.total, engine, let_go, self._clock())
        return self._incoming[key]

    @staticmethod
    def _check(coming: Incoming | None, request: Import) -> None:
        received = 0 if coming is None else coming.received
        if coming is None or request.offset != received:
            raise Invalid(
                f"The next piece begins at {received}; a file that isn't gone on with for {IDLE_S:g} s is "
                "dropped.",
                field="offset",
                received=received,
            )
        if request.total != coming.total:
            raise Invalid(f"The file was to have {coming.total} bytes.", field="total")

    def _room_on_disk(self, needed: int) -> None:
        promised = sum(each.total for each in self._incoming.values())
        to_come = promised - sum(each.received for each in self._incoming.values())
        disk = shutil.disk_usage(self._folder)
        floor = floor_of(disk.total) if self._free_bytes is None else self._free_bytes
        room = min(disk.free - floor - to_come, self._bytes_max - promised)
        if needed > room:
            raise Capacity(
                f"The file needs {needed} bytes on the daemon's disk, and there is room for {max(room, 0)}.",
                needed_bytes=needed,
                free_bytes=max(room, 0),
                retry_after_s=RETRY_AFTER_S,
            )

    def _complete(self, ticket: Ticket, key: Key) -> None:
        """All of a file is there; its name and the file are the request's from here on."""
        coming = self._incoming.pop(key)

        def over() -> None:
            coming.let_go()
            self._remove(coming)

        if ticket.state is RequestState.DONE:
            over()
            return
        ticket.snapshot, ticket.on_end = str(coming.path), over
        try:
            self._take_in(ticket, coming.engine)
        except StateroomError as error:
            self._end(ticket, error.body())

    def _drop_incoming(self, key: Key) -> None:
        coming = self._incoming.pop(key, None)
        if coming is None:
            return
        coming.let_go()
        if not coming.writing:
            self._remove(coming)

    def _remove(self, coming: Incoming) -> None:
        with contextlib.suppress(RuntimeError):  # closed: all of it was removed
            self._thread.submit(coming.path.unlink, missing_ok=True)

    # ------------------------------------------------------------ both

    def _room(self, under_way: dict[Key, T], owner: str) -> None:
        own = sum(of == owner for _, of, _ in under_way)
        if own >= CARRIED_PER_OWNER_MAX or len(under_way) >= CARRIED_MAX:
            most = CARRIED_PER_OWNER_MAX if own >= CARRIED_PER_OWNER_MAX else CARRIED_MAX
            raise Capacity(
                f"{most} files are under way; wait for the end of one.", retry_after_s=RETRY_AFTER_S
            )

    def _on_thread(
        self, ticket: Ticket, do: Callable[[], T], then: Callable[[T], None], failed: Callable[[], None]
    ) -> None:
        """`then` with what `do` gave, in the loop; or `failed`, and the request ends with the error."""

        def over(done: asyncio.Future[T]) -> None:
            if done.cancelled():
                return
            try:
                result = done.result()
            except Exception as error:
                failed()
                self._reply(ticket, self._refusal(error, ticket.rid).body())
            else:
                then(result)

        asyncio.get_running_loop().run_in_executor(self._thread, do).add_done_callback(over)

    def _reply(self, ticket: Ticket, body: Body) -> None:
        if ticket.state is not RequestState.DONE:  # its client may have gone
            self._end(ticket, body)

    def _refusal(self, error: BaseException, rid: int) -> StateroomError:
        if isinstance(error, StateroomError):
            return error
        if isinstance(error, refusals.Missing):
            return NotFound("The snapshot is no more.", field="snapshot")
        if isinstance(error, refusals.Corrupt):
            return Corrupt(f"The snapshot can't be carried: a file of it {error.why}.", field="snapshot")
        if isinstance(error, refusals.Mismatch):
            return Mismatch(
                f"The snapshot can't be carried: {error}.",
                field="snapshot",
                part=error.part,
                here=error.here,
                there=error.there,
            )
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return Capacity("The daemon's disk is full.", free_bytes=0, retry_after_s=RETRY_AFTER_S)
        name = incident()
        self._log.error("internal error", incident=name, rid=rid, exc_info=error)
        message = f"A file could not be moved; the daemon's log tells more at {name}."
        return Internal(message, incident=name, rid=rid)

    def vanish(self, peer: Peer) -> None:
        """A client is gone, and what it had under way."""
        for key in [key for key in self._incoming if key[0] is peer]:
            self._drop_incoming(key)
        for key in [key for key in self._outgoing if key[0] is peer]:
            self._drop_outgoing(key)

    def expire(self) -> None:
        """Drops what nobody goes on with."""
        before_s = self._clock() - IDLE_S
        for key in [k for k, each in self._incoming.items() if each.used_s < before_s and not each.writing]:
            self._drop_incoming(key)
        for key in [k for k, each in self._outgoing.items() if each.used_s < before_s and not each.asked]:
            self._drop_outgoing(key)

    def close(self) -> None:
        """The daemon ends."""
        for key in list(self._outgoing):
            self._drop_outgoing(key)
        self._thread.shutdown(wait=False)
        shutil.rmtree(self._folder, ignore_errors=True)
