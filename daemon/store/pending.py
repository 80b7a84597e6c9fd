"""What has happened since the last flush, in the least that has to be written. Pure: no SQLite, no clock.

Messages may come at any rate: what waits is bounded by what there is, since only the last of each thing and
one edit of each session's tokens is kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from stateroom.daemon.link import ChatTurn
from stateroom.daemon.store.rows import Row, SessionRow


@dataclass(slots=True)
class Edit:
    """The first `keep` tokens stay, `new` follow."""

    keep: int
    new: array[int]

    def then(self, later: Edit) -> Edit:
        """Both, one after the other, as one. `self` is used up."""
        if later.keep < self.keep:
            return later
        del self.new[later.keep - self.keep :]
        self.new.extend(later.new)
        return self


@dataclass(slots=True)
class Delta:
    """What is new of one session. None: nothing."""

    row: SessionRow | None = None
    edit: Edit | None = None
    chat: list[ChatTurn] | None = None
    closed: bool = False

    def then(self, later: Delta) -> Delta:
        """Both, one after the other. `self` is used up."""
        if later.closed:
            return Delta(closed=True)
        if later.edit is not None:
            self.edit = later.edit if self.edit is None else self.edit.then(later.edit)
        self.row = later.row or self.row
        self.chat = self.chat if later.chat is None else later.chat
        return self


@dataclass(slots=True)
class Batch:
    """What one flush writes. `rows`: by type and key; None: it is gone."""

    sessions: dict[str, Delta] = field(default_factory=dict)
    rows: dict[tuple[type[Row], str], Row | None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sessions) + len(self.rows)


Message = tuple[Any, ...]  # the name of one of `Pending`'s methods, and its arguments


class Pending:
    """Takes messages in the order of time. Cheap: nothing is written here.

    `told` is called with each message, before it is taken, and `news(urgent)` after it.
    """

    def __init__(
        self,
        told: Callable[[Message], None] = lambda message: None,
        news: Callable[[bool], None] = lambda urgent: None,
    ) -> None:
        self._batch = Batch()
        self._told, self._news = told, news

    def __len__(self) -> int:
        """How many sessions and rows wait to be written."""
        return len(self._batch)

    def session(self, row: SessionRow) -> None:
        """It was opened, named, used: the whole row as it is now. The first message of a session."""
        self._told(("session", row))
        self._add(row.id, Delta(row=row))

    def changed(self, session: str, keep: int, tokens: Iterable[int]) -> None:
        """The first `keep` tokens stay, `tokens` follow: as a worker's journal says."""
        new = array("I", tokens)
        self._told(("changed", session, keep, new))
        self._add(session, Delta(edit=Edit(keep, new)))

    def chat(self, session: str, turns: list[ChatTurn]) -> None:
        """All turns, as they are now."""
        self._told(("chat", session, turns))
        self._add(session, Delta(chat=list(turns)))

    def closed(self, session: str) -> None:
        """The last message of a session; all of it goes."""
        self._told(("closed", session))
        self._add(session, Delta(closed=True))

    def put(self, row: Row) -> None:
        """A snapshot or model, new or as it is now."""
        self._told(("put", row))
        self._batch.rows[type(row), row.key] = row
        self._news(False)

    def drop(self, kind: type[Row], key: str) -> None:
        """It is gone."""
        self._told(("drop", kind, key))
        self._batch.rows[kind, key] = None
        self._news(False)

    def hurry(self) -> None:
        """What has come so far is to outlive even a loss of power as soon as can be."""
        self._news(True)

    def take(self) -> Batch:
        """All that waits, to be written now; what comes from here on waits for the next time."""
        taken, self._batch = self._batch, Batch()
        return taken

    def put_back(self, batch: Batch) -> None:
        """What `take` gave could not be written: it waits again, before what has come since."""
        since, self._batch = self._batch, batch
        for session, delta in since.sessions.items():
            self._add(session, delta)
        self._batch.rows |= since.rows

    def _add(self, session: str, delta: Delta) -> None:
        before = self._batch.sessions.get(session)
        self._batch.sessions[session] = delta if before is None else before.then(delta)
        self._news(False)


class Unkept(Pending):
    """Of a daemon that keeps nothing: what comes is let go."""

    def put(self, row: Row) -> None:
        pass

    def drop(self, kind: type[Row], key: str) -> None:
        pass

    def _add(self, session: str, delta: Delta) -> None:
        pass
