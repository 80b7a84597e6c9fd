"""The tables, and how rows become values of theirs. Every row carries a checksum: SQLite has none.

Tokens lie in pieces of `PIECE_TOKENS`, by session and place; all but a session's last one are full. An append
writes the last piece anew, a trim drops what is behind it: nothing has to be compacted, ever.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from stateroom.client.protocol import KV
from stateroom.client.wire import from_wire, to_wire
from stateroom.daemon.store.rows import ModelRow, Row, SessionRow, SnapshotRow

APPLICATION_ID = 0x53544D52  # "STMR", in the file's header: whose database it is
TOKEN_BYTES = 4
PIECE_TOKENS = 480  # two pieces fill a page of 4 KiB
PIECES_MAX = 2**20  # of a session: half a billion tokens

Value = str | int | float | None
R = TypeVar("R")

# One script for each version, from nothing or from the version before. Never edit one that was released.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE sessions (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        model TEXT NOT NULL,
        session_class TEXT NOT NULL,
        created_ms INTEGER NOT NULL,
        used_ms INTEGER NOT NULL,
        name TEXT,
        ttl_s REAL,
        kv TEXT,
        parents TEXT NOT NULL,
        published_as TEXT,
        trunk TEXT,
        trunk_length INTEGER NOT NULL,
        snapshot TEXT,
        quarantined TEXT,
        checksum INTEGER NOT NULL
    );
    CREATE UNIQUE INDEX names ON sessions (owner, name) WHERE name IS NOT NULL;
    CREATE TABLE pieces (
        place INTEGER PRIMARY KEY,
        tokens BLOB NOT NULL,
        checksum INTEGER NOT NULL
    );
    CREATE TABLE chats (
        session INTEGER PRIMARY KEY,
        turns TEXT NOT NULL,
        checksum INTEGER NOT NULL
    );
    CREATE TABLE snapshots (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        model TEXT NOT NULL,
        length INTEGER NOT NULL,
        nbytes INTEGER NOT NULL,
        created_ms INTEGER NOT NULL,
        name TEXT,
        session TEXT,
        automatic INTEGER NOT NULL,
        forgotten INTEGER NOT NULL,
        checksum INTEGER NOT NULL
    );
    CREATE TABLE models (
        id TEXT PRIMARY KEY,
        spec TEXT NOT NULL,
        fingerprint TEXT NOT NULL,
        loaded_ms INTEGER NOT NULL,
        checksum INTEGER NOT NULL
    );
    CREATE TABLE flushes (last INTEGER NOT NULL);
    INSERT INTO flushes VALUES (0);
    """,
)

_JSON = {"kv", "parents", "fingerprint"}


@dataclass(frozen=True, slots=True)
class Table(Generic[R]):
    """`row`'s fields are the table's columns, in order; the first but for a session's number is the key."""

    name: str
    row: type[R]

    @property
    def columns(self) -> list[str]:
        return [each.name for each in fields(self.row)]  # type: ignore[arg-type]  # all are dataclasses

    @property
    def key(self) -> str:
        return self.columns[0]

    @property
    def upsert(self) -> str:
        columns = [*self.columns, "checksum"]
        changed = ", ".join(f"{column} = excluded.{column}" for column in columns[1:])
        places = ", ".join("?" * len(columns))
        return (
            f"INSERT INTO {self.name} ({', '.join(columns)}) VALUES ({places}) "
            f"ON CONFLICT ({self.key}) DO UPDATE SET {changed}"
        )

    def values(self, row: R) -> list[Value]:
        """What is written, its checksum last."""
        plain = [_plain(column, getattr(row, column)) for column in self.columns]
        return [*plain, checksum(self.name, *plain)]

    def built(self, values: list[Any]) -> R | None:
        """The row of what `values` gave; None when it isn't that any more."""
        *plain, told = values
        if checksum(self.name, *plain) != told:
            return None
        columns = zip(self.columns, plain, strict=True)
        return self.row(**{column: _value(column, value) for column, value in columns})


SESSIONS = Table("sessions", SessionRow)
SNAPSHOTS = Table("snapshots", SnapshotRow)
MODELS = Table("models", ModelRow)
TABLES: dict[type[Row], Table[Any]] = {table.row: table for table in (SNAPSHOTS, MODELS)}


def checksum(*values: Value) -> int:
    return zlib.crc32(json.dumps(values, default=repr).encode())


def piece_checksum(place: int, tokens: bytes) -> int:
    return zlib.crc32(tokens, zlib.crc32(str(place).encode()))


def _plain(column: str, value: Any) -> Value:
    if value is None:
        return None
    if column in _JSON:
        return json.dumps(to_wire(value))
    if column == "ttl_s":
        return float(value)
    return int(value) if isinstance(value, bool) else value


def _value(column: str, value: Any) -> Any:
    if column == "kv" and value is not None:
        return from_wire(KV, json.loads(value))
    if column in _JSON and value is not None:
        return json.loads(value)
    return bool(value) if column in ("automatic", "forgotten") else value
