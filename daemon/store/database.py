"""Opening the SQLite file: ours, whole, of a version that is known, and nobody else's; or refused."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stateroom.daemon.store.refusals import Corrupt, Foreign, Locked, Newer, NotWritten
from stateroom.daemon.store.schema import APPLICATION_ID, MIGRATIONS

FILE_MODE = 0o600
LOCK_WAIT_S = 1.0
HEADER = b"SQLite format 3\0"
WAL_BYTES_MAX = 16 * 2**20  # a longer log is cut back to this when it has been copied into the file

# One process at a time, for as long as it has the file open; no shared memory beside it either.
EXCLUSIVE = "locking_mode = EXCLUSIVE"
PRAGMAS = (
    # A flush appends to a log in one go: no page is written in place before it is safe somewhere.
    "journal_mode = WAL",
    # Without syncing in each flush: `Store.write` says when to.
    "synchronous = NORMAL",
    "wal_autocheckpoint = 1000",
    f"journal_size_limit = {WAL_BYTES_MAX}",
    # macOS: fsync alone leaves bytes in the drive's cache.
    "fullfsync = ON",
    "checkpoint_fullfsync = ON",
    # A session that was closed is overwritten, not only unlinked.
    "secure_delete = ON",
    # What is read is checked for what it should be; a file that fails while it is mapped would kill us.
    "cell_size_check = ON",
    "trusted_schema = OFF",
    "mmap_size = 0",
)


def connect(file: Path, migrations: Sequence[str] = MIGRATIONS) -> sqlite3.Connection:
    """The open database, checked from end to end and brought to the last version.

    Raises `Corrupt`, `Newer`, `Foreign`, `Locked`; OSError when the file can't be made, `NotWritten` when the
    disk is full or fails.
    """
    _refuse_what_is_no_database(file)
    os.close(os.open(file, os.O_RDWR | os.O_CREAT, FILE_MODE))
    connection = sqlite3.connect(file, timeout=LOCK_WAIT_S, isolation_level=None, check_same_thread=False)
    try:
        with told(file):
            connection.execute(f"PRAGMA {EXCLUSIVE}")
            if not file.stat().st_size:
                # Free pages are given back bit by bit, see `Store.write`; told before there is a table.
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            _check(connection, file, len(migrations))  # before anything changes it
            for pragma in PRAGMAS:
                connection.execute(f"PRAGMA {pragma}")
        _migrate(connection, migrations)
    except BaseException:
        connection.close()
        raise
    return connection


# Of the disk or of whoever may do what, not of the file's content.
OF_THE_MOMENT = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_INTERRUPT,
)


@contextmanager
def told(file: Path) -> Iterator[None]:
    """SQLite's errors as ours. In a damaged file any of them may come up, of syntax too."""
    try:
        yield
    except sqlite3.IntegrityError:
        raise  # a bug of ours
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", None)
        primary = code & 0xFF if isinstance(code, int) else None
        if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise Locked(file) from error
        if primary in OF_THE_MOMENT:
            raise NotWritten(file, str(error)) from error
        raise Corrupt(file, str(error)) from error


def _refuse_what_is_no_database(file: Path) -> None:
    """SQLite would take some such files for empty ones."""
    try:
        with open(file, "rb") as opened:
            start = opened.read(len(HEADER))
    except FileNotFoundError:
        return
    except IsADirectoryError:
        raise Corrupt(file, "it is a directory") from None
    if start and start != HEADER:
        raise Corrupt(file, "it is no SQLite database")


def _check(connection: sqlite3.Connection, file: Path, known: int) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if application != APPLICATION_ID and (application or version or tables):
        raise Foreign(file)
    if application == APPLICATION_ID and not version:
        raise Corrupt(file, "it tells no version")
    if version > known:
        raise Newer(file, version, known)
    problems = [problem for (problem,) in connection.execute("PRAGMA quick_check(3)")]
    if problems != ["ok"]:
        raise Corrupt(file, "; ".join(problems))


def _migrate(connection: sqlite3.Connection, migrations: Sequence[str]) -> None:
    """All that is missing, or nothing of it."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == len(migrations):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for script in migrations[version:]:
            for statement in script.split(";"):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(migrations)}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
