"""Snapshots as files of this side: written beside their place and named when complete, read in pieces."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from types import TracebackType
from typing import BinaryIO, Self

from stateroom.client.errors import Invalid, StreamBroken
from stateroom.client.limits import CHUNK_BYTES_MAX
from stateroom.client.protocol import Export, ExportResult, Import, ImportResult, Progress

File = str | os.PathLike[str] | BinaryIO  # a path, or a file opened for bytes

CHANGED = "The snapshot was changed while it was read; what was read is of no use."


class Writing:
    """An export on its way into a file. Use it as a context: what isn't `finish`ed leaves nothing behind.

    A path gets its name once all bytes are there and synced, readable for its owner alone. An open file is
    written from where it stands, and stays open.
    """

    def __init__(self, snapshot: str, to: File) -> None:
        self._snapshot = snapshot
        self._total: int | None = None
        self._written = 0
        self._path = self._beside = None
        if isinstance(to, str | os.PathLike):
            self._path = os.path.abspath(to)
            folder, name = os.path.split(self._path)
            self._beside = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.part")
            descriptor = os.open(self._beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._file: BinaryIO = os.fdopen(descriptor, "wb")
        else:
            self._file = to

    @property
    def next(self) -> Export | None:
        """What to ask for now; None: all is there."""
        if self._written == self._total:
            return None
        return Export(snapshot=self._snapshot, offset=self._written)

    def take(self, part: ExportResult) -> Progress:
        """Writes what came.

        Raises:
            StreamBroken: it isn't what was asked for, or of another file than before.
        """
        end = self._written + len(part.data)
        whole = end == part.total
        fits = part.data and (part.next is None if whole else part.next == end < part.total)
        if not fits or self._total not in (None, part.total):
            raise StreamBroken(CHANGED)
        self._file.write(part.data)
        self._total, self._written = part.total, end
        return Progress(done=end, total=part.total)

    def finish(self) -> int:
        """Gives the file its name, and how many bytes it has."""
        self._file.flush()
        if self._path is not None and self._beside is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._beside, self._path)
            self._beside = None
        return self._written

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._beside is not None:
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                os.unlink(self._beside)


class Reading:
    """An import on its way out of a file, from where it stands to its end. Use it as a context."""

    def __init__(self, snapshot: str, file: File, model: str | None) -> None:
        self._snapshot, self._model = snapshot, model
        self._opened = isinstance(file, str | os.PathLike)
        self._file: BinaryIO = (
            open(file, "rb")  # noqa: SIM115  (closed by `__exit__`)
            if isinstance(file, str | os.PathLike)
            else file
        )
        begin = self._file.tell()
        self._total = self._file.seek(0, os.SEEK_END) - begin
        self._file.seek(begin)
        self._sent = 0

    def next(self) -> Import:
        """The next piece, read now.

        Raises:
            Invalid: the file is empty, or has become shorter.
        """
        data = self._file.read(min(CHUNK_BYTES_MAX, self._total - self._sent))
        if not data:
            raise Invalid("The file is empty, or has become shorter while it was read.", field="data")
        return Import(
            snapshot=self._snapshot, total=self._total, offset=self._sent, data=data, model=self._model
        )

    def sent(self, piece: Import, answer: ImportResult) -> Progress:
        """Takes what the daemon said to a piece.

        Raises:
            StreamBroken: it has another part of the file than it was sent.
        """
        self._sent = piece.offset + len(piece.data)
        if answer.received != self._sent or (answer.snapshot is None) is (self._sent == self._total):
            raise StreamBroken("The daemon has another part of the file than it was sent; begin again.")
        return Progress(done=self._sent, total=self._total)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened:
            self._file.close()
