"""Sessions and what belongs to them, written in batches and read once, at the start.

`Pending` collects on the broker's loop; `write` is called with what it gave, by one thread at a time. A flush
is one transaction: whatever ends the process, the file holds the last one that returned, or the next. Writing
a batch again changes nothing, so that one whose end nobody knows may be put back.
"""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stateroom.client.wire import DecodeError, from_wire, to_wire
from stateroom.daemon.link import ChatTurn
from stateroom.daemon.store import schema
from stateroom.daemon.store.database import connect, told
from stateroom.daemon.store.pending import Batch, Delta, Edit
from stateroom.daemon.store.refusals import Corrupt
from stateroom.daemon.store.rows import Everything, StoredSession
from stateroom.daemon.store.schema import PIECE_TOKENS, PIECES_MAX, SESSIONS, TOKEN_BYTES

FREE_PAGES_MAX = 256  # more are given back to the disk, so many with each flush: 1 MiB


@dataclass(frozen=True, slots=True)
class _End:
    """What must be known of a session to write on: `tail` are the tokens of its last piece, unless full."""

    number: int
    length: int = 0
    tail: array[int] = field(default_factory=lambda: array("I"))
    name: str | None = None


class Store:
    """The open file. Raises, when made, what `connect` does and `Corrupt` for rows that are damaged.

    Attributes:
        number: of the last flush that is in the file; attempts are numbered, so that no two are alike.
        loaded: what the file held when it was opened.
    """

    def __init__(self, file: Path, migrations: Sequence[str] = schema.MIGRATIONS) -> None:
        self.file = file
        self._connection = connect(file, migrations)
        self._ends: dict[str, _End] = {}
        self.number = 0
        self._lasting = True  # nothing was written that a loss of power could take
        try:
            self.reload()
        except BaseException:
            self._connection.close()
            raise

    def reload(self) -> None:
        """Reads all of it again; `loaded` and `number` are of now."""
        with told(self.file):
            numbers = self._run("SELECT last FROM flushes").fetchall()
            if len(numbers) != 1:
                raise Corrupt(self.file, "it doesn't tell its last flush")
            ((self.number,),) = numbers
            self.loaded = self._load()

    def close(self) -> None:
        """Everything is in the one file then."""
        self._connection.close()

    # ------------------------------------------------------------ writing

    def write(self, batch: Batch, lasting: bool = False, number: int | None = None) -> None:
        """All of a batch or nothing of it. It outlives this process at once, whatever ends that.

        `lasting`: this batch and all before it outlive a loss of power too, at the price of a sync of the
        disk; of those since the last such one, the later may then be lost, never an earlier one alone.

        Raises `NotWritten` (the disk is full, or fails): put the batch back and try again later.
        """
        number = self.number + 1 if number is None else number
        if not batch and (self._lasting or not lasting):
            return
        ends = dict(self._ends)
        with told(self.file):
            self._run(f"PRAGMA synchronous = {'FULL' if lasting else 'NORMAL'}")
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._write_sessions(batch.sessions, ends)
                for (kind, key), row in batch.rows.items():
                    table = schema.TABLES[kind]
                    if row is None:
                        self._run(f"DELETE FROM {table.name} WHERE {table.key} = ?", key)
                    else:
                        self._run(table.upsert, *table.values(row))
                self._run("UPDATE flushes SET last = ?", number)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            self._ends, self._lasting, self.number = ends, lasting, number
            self._give_back()

    def _write_sessions(self, deltas: dict[str, Delta], ends: dict[str, _End]) -> None:
        # Names first leave those who have them: two sessions may have changed theirs about.
        for session, delta in deltas.items():
            end = ends.get(session)
            if end is None:
                continue
            if delta.closed:
                self._remove(ends.pop(session))
            elif delta.row is not None and delta.row.name != end.name and end.name is not None:
                self._run("UPDATE sessions SET name = NULL WHERE number = ?", end.number)
        for session, delta in deltas.items():
            if delta.closed:
                continue
            end = ends.get(session)
            if delta.row is not None:
                self._run(SESSIONS.upsert, *SESSIONS.values(delta.row))
                if end is None:
                    (number,) = self._run("SELECT number FROM sessions WHERE id = ?", session).fetchone()
                    end = _End(number)
                end = _End(end.number, end.length, end.tail, delta.row.name)
            if end is None:
                raise ValueError(f"tokens or chat of the session {session}, which was never opened")
            if delta.edit is not None:
                end = self._edit(end, delta.edit)
            if delta.chat is not None:
                self._write_chat(end.number, delta.chat)
            ends[session] = end

    def _edit(self, end: _End, edit: Edit) -> _End:
        """Writes the pieces from the one on in which the kept tokens end."""
        if edit.keep > end.length:
            raise ValueError(f"{edit.keep} tokens are to stay of {end.length}")
        first = edit.keep // PIECE_TOKENS
        start, base = first * PIECE_TOKENS, end.number * PIECES_MAX
        if first == end.length // PIECE_TOKENS:
            content = end.tail[: edit.keep - start]
        elif edit.keep > start:
            (blob,) = self._run("SELECT tokens FROM pieces WHERE place = ?", base + first).fetchone()
            content = array("I", blob)[: edit.keep - start]
        else:
            content = array("I")
        content.extend(edit.new)
        pieces = [content[at : at + PIECE_TOKENS].tobytes() for at in range(0, len(content), PIECE_TOKENS)]
        self._connection.executemany(
            "INSERT OR REPLACE INTO pieces (place, tokens, checksum) VALUES (?, ?, ?)",
            [
                (place, piece, schema.piece_checksum(place, piece))
                for place, piece in enumerate(pieces, base + first)
            ],
        )
        gone = first + len(pieces)
        if gone * PIECE_TOKENS < end.length:
            self._run("DELETE FROM pieces WHERE place >= ? AND place < ?", base + gone, base + PIECES_MAX)
        length = start + len(content)
        return _End(end.number, length, content[length // PIECE_TOKENS * PIECE_TOKENS - start :], end.name)

    def _write_chat(self, number: int, chat: list[ChatTurn]) -> None:
        turns = json.dumps(to_wire(chat))
        self._run(
            "INSERT OR REPLACE INTO chats (session, turns, checksum) VALUES (?, ?, ?)",
            number,
            turns,
            schema.checksum(number, turns),
        )

    def _remove(self, end: _End) -> None:
        base = end.number * PIECES_MAX
        self._run("DELETE FROM pieces WHERE place >= ? AND place < ?", base, base + PIECES_MAX)
        self._run("DELETE FROM chats WHERE session = ?", end.number)
        self._run("DELETE FROM sessions WHERE number = ?", end.number)

    def _give_back(self) -> None:
        (free,) = self._run("PRAGMA freelist_count").fetchone()
        if free > FREE_PAGES_MAX:
            # By `execute` only one page would go: the pragma has a row for each, and no columns.
            self._connection.executescript(f"PRAGMA incremental_vacuum({FREE_PAGES_MAX})")

    def _run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    # ------------------------------------------------------------ reading

    def _load(self) -> Everything:
        chats = {number: (turns, told) for number, turns, told in self._run("SELECT * FROM chats")}
        tokens = self._tokens()
        columns = ", ".join(SESSIONS.columns)
        sessions = []
        for number, *values in self._run(f"SELECT number, {columns}, checksum FROM sessions ORDER BY number"):
            row = SESSIONS.built(values)
            if row is None:
                raise Corrupt(self.file, f"the row of the session {values[0]!r} fails its checksum")
            chat = self._chat(number, *chats.pop(number)) if number in chats else []
            held = tokens.pop(number, array("I"))
            sessions.append(StoredSession(row, held, chat))
            length = len(held)
            tail = held[length // PIECE_TOKENS * PIECE_TOKENS :]
            self._ends[row.id] = _End(number, length, tail, row.name)
        if tokens or chats:
            raise Corrupt(self.file, "it holds tokens or chats of no session")
        return Everything(
            sessions,
            self._rows(schema.SNAPSHOTS),
            self._rows(schema.MODELS),
        )

    def _tokens(self) -> dict[int, array[int]]:
        """By session; each piece where it should be, and as it was written."""
        found: dict[int, array[int]] = {}
        for place, blob, checksum in self._run("SELECT * FROM pieces ORDER BY place"):
            number, n = divmod(place, PIECES_MAX)
            held = found.setdefault(number, array("I"))
            whole = isinstance(blob, bytes) and 0 < len(blob) <= PIECE_TOKENS * TOKEN_BYTES
            if not whole or len(blob) % TOKEN_BYTES or checksum != schema.piece_checksum(place, blob):
                raise Corrupt(self.file, f"a piece of tokens fails its checksum ({place})")
            if len(held) != n * PIECE_TOKENS:
                raise Corrupt(self.file, f"a piece of tokens is missing (before {place})")
            held.frombytes(blob)
        return found

    def _chat(self, number: int, turns: str, checksum: int) -> list[ChatTurn]:
        if schema.checksum(number, turns) != checksum:
            raise Corrupt(self.file, f"a chat fails its checksum ({number})")
        try:
            return [from_wire(ChatTurn, turn) for turn in json.loads(turns)]
        except (DecodeError, ValueError) as error:
            raise Corrupt(self.file, f"a chat can't be read ({number})") from error

    def _rows(self, table: schema.Table[Any]) -> list[Any]:
        columns = ", ".join(table.columns)
        found = []
        for values in self._run(f"SELECT {columns}, checksum FROM {table.name} ORDER BY {table.key}"):
            row = table.built(list(values))
            if row is None:
                raise Corrupt(self.file, f"the row {values[0]!r} of {table.name} fails its checksum")
            found.append(row)
        return found
