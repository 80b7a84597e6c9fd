"""What was told since the last flush, so that a kill doesn't take it along: a file beside the catalog.

A flush waits for a quarter of a second, and a client is told of a token at once. Here a message costs one
write to the system's memory, which outlives the process. Nothing is synced: for a loss of power there are
flushes.

    MARK 7   message   message   MARK 8   message   message
             └── taken by flush 8 ──┘     └─ by the next ─┘

A mark is written when a flush takes what waits; the catalog holds the number of the last flush that it has.
So whichever that is, what lies behind its mark is what it lacks, neither more nor less. A file without that
mark belongs to another state of the catalog (an older copy, say), and isn't used.

A record is the length and the CRC-32 of its payload, then that: a line of JSON, and tokens as in memory.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path

from stateroom.client.wire import from_wire, to_wire
from stateroom.daemon.link import ChatTurn
from stateroom.daemon.store.pending import Message, Pending
from stateroom.daemon.store.schema import SESSIONS, TABLES

FILE_MODE = 0o600
BEHIND_BYTES = 256 * 2**10  # when so much lies before the last flush's mark, the file is begun anew
BYTES_MAX = 64 * 2**20  # while nothing can be flushed; with more, the file ends
MARK = "mark"
_HEAD = struct.Struct("<II")
_KINDS = {table.name: kind for kind, table in TABLES.items()}


class Tail:
    """The open file. What fails here is no harm to the catalog.

    Attributes:
        lost: why nothing is written to it, until a flush is on disk; None: all is well.
        number: the last mark that `after` found.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.lost: str | None = None
        self.number = 0
        self._descriptor: int | None = None
        self._bytes = self._mark_at = 0
        self._behind: bytearray | None = None  # while it is lost: the last mark and all since, if not much

    def after(self, number: int) -> list[Message]:
        """The messages behind the mark of a flush; none when there is no such mark."""
        messages: list[Message] | None = None
        for message in _read(self.file):
            if message[0] == MARK:
                self.number = message[1]
                messages = [] if self.number == number else messages
            elif messages is not None:
                messages.append(message)
        return messages or []

    def begin(self, number: int) -> None:
        """Starts the file anew, behind the mark of a flush."""
        self._replace([(MARK, number)], b"")

    def add(self, message: Message) -> None:
        """One message, before anybody hears of what it says."""
        if self._descriptor is None:
            self._keep(message)
            return
        record = _encoded(message)
        if self._bytes + len(record) > BYTES_MAX:
            self._lose("there is too much of it")
            return
        try:
            written = os.write(self._descriptor, record)
        except OSError as error:
            self._lose(error.strerror or str(error))
            return
        if written < len(record):
            self._lose("the disk is full")
            return
        self._bytes += written

    def mark(self, number: int) -> None:
        """A flush takes all that was added."""
        if self._descriptor is None:
            self._behind = bytearray(_encoded((MARK, number)))  # not begun before that flush is on disk
            return
        self._mark_at = self._bytes
        self.add((MARK, number))

    def flushed(self) -> None:
        """The last mark's flush is on disk: what lies before the mark isn't needed any more."""
        if self._descriptor is None:
            if self._behind is not None:
                self._replace([], bytes(self._behind))
        elif self._mark_at > BEHIND_BYTES:
            self._replace([], os.pread(self._descriptor, self._bytes - self._mark_at, self._mark_at))

    def _keep(self, message: Message) -> None:
        """For when it is begun anew."""
        if self._behind is not None:
            self._behind += _encoded(message)
            if len(self._behind) > BEHIND_BYTES:
                self._behind = None

    def close(self, remove: bool) -> None:
        """`remove`: all of it is in the catalog."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if remove:
            self.file.unlink(missing_ok=True)

    def _replace(self, messages: list[Message], content: bytes) -> None:
        """A file with this and nothing else takes the place of the one there is, at once."""
        new = self.file.with_name(f"{self.file.name}.new")
        content = b"".join(map(_encoded, messages)) + content
        try:
            new.unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            descriptor = os.open(new, flags, FILE_MODE)
            try:
                if os.write(descriptor, content) < len(content):
                    raise OSError("the disk is full")
                new.rename(self.file)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            self._lose(error.strerror or str(error))
            return
        self.close(remove=False)
        self._descriptor, self._bytes, self._mark_at, self.lost = descriptor, len(content), 0, None
        self._behind = None

    def _lose(self, why: str) -> None:
        """Nothing follows a gap: what came before it can still be read."""
        self.close(remove=False)
        self.lost = why


def replay(messages: list[Message], pending: Pending) -> None:
    """Tells `pending` what it was told before."""
    for what, *arguments in messages:
        getattr(pending, what)(*arguments)


def _encoded(message: Message) -> bytes:
    what, *given = message
    tokens = b""
    if what == "session":
        given = SESSIONS.values(given[0])
    elif what == "changed":
        tokens = array("I", given.pop()).tobytes()
    elif what == "chat":
        given = [given[0], to_wire(given[1])]
    elif what == "put":
        given = [TABLES[type(given[0])].name, *TABLES[type(given[0])].values(given[0])]
    elif what == "drop":
        given = [TABLES[given[0]].name, given[1]]
    payload = json.dumps([what, *given]).encode() + b"\n" + tokens
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def _decoded(payload: bytes) -> Message:
    line, _, tokens = payload.partition(b"\n")
    what, *told = json.loads(line)
    if what == "session":
        return what, SESSIONS.built(told)
    if what == "changed":
        return what, *told, array("I", tokens)
    if what == "chat":
        return what, told[0], [from_wire(ChatTurn, turn) for turn in told[1]]
    if what == "put":
        return what, TABLES[_KINDS[told[0]]].built(told[1:])
    if what == "drop":
        return what, _KINDS[told[0]], told[1]
    return what, *told


def _read(file: Path) -> Iterator[Message]:
    """Messages from the first to the last that is whole."""
    try:
        content = memoryview(file.read_bytes())
    except FileNotFoundError:
        return
    at = 0
    while at + _HEAD.size <= len(content):
        size, checksum = _HEAD.unpack_from(content, at)
        payload = bytes(content[at + _HEAD.size : at + _HEAD.size + size])
        if not size or len(payload) < size or zlib.crc32(payload) != checksum:
            return
        yield _decoded(payload)
        at += _HEAD.size + size
