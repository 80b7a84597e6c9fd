"""What happens to sessions, drawn at random, and beside it in plain Python what must be on disk then."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field, replace

from stateroom.client.protocol import KV, Message
from stateroom.daemon.link import ChatTurn
from stateroom.daemon.store.pending import Pending
from stateroom.daemon.store.rows import Everything, ModelRow, Row, SessionRow, SnapshotRow

TOKEN_MAX = 2**32 - 1
MESSAGES = ("open", "change", "trim", "chat", "row", "close", "other")
OFTEN = (2, 9, 2, 1, 2, 1, 2)
NEW_MAX = 1_500  # tokens at once: some edits take several pieces


@dataclass
class Held:
    row: SessionRow
    tokens: list[int] = field(default_factory=list)
    chat: list[ChatTurn] = field(default_factory=list)


@dataclass
class World:
    """`held`: sessions by id, `rows`: the others by type and key."""

    held: dict[str, Held] = field(default_factory=dict)
    rows: dict[tuple[type[Row], str], Row] = field(default_factory=dict)
    count: int = 0

    def copy(self) -> World:
        held = {each: Held(h.row, list(h.tokens), list(h.chat)) for each, h in self.held.items()}
        return World(held, dict(self.rows), self.count)

    def step(self, drawn: random.Random, pending: Pending) -> None:
        """One message, here and there."""
        (what,) = drawn.choices(MESSAGES, OFTEN)
        if what == "open" or not self.held:
            self._open(drawn, pending)
        elif what == "other":
            self._other(drawn, pending)
        else:
            session = drawn.choice(sorted(self.held))
            getattr(self, f"_{what}")(session, drawn, pending)

    def _open(self, drawn: random.Random, pending: Pending) -> None:
        self.count += 1
        row = SessionRow(
            id=f"session-{self.count}-ü",
            owner=drawn.choice(("one", "two")),
            model="model",
            session_class=drawn.choice(("interactive", "background")),
            created_ms=self.count,
            used_ms=self.count,
            name=drawn.choice((None, f"new-{self.count}")),
            ttl_s=drawn.choice((None, 60, 0.5)),
            kv=drawn.choice((None, KV(scheme="affine4", group_size=32, quantise_after=7))),
            parents=[f"parent-{n}" for n in range(drawn.randrange(3))],
        )
        self.held[row.id] = Held(row)
        pending.session(row)

    def _change(self, session: str, drawn: random.Random, pending: Pending) -> None:
        held = self.held[session]
        count = drawn.choice((1, 1, 3, 30, drawn.randrange(NEW_MAX)))
        new = [drawn.randrange(TOKEN_MAX + 1) for _ in range(count)]
        pending.changed(session, len(held.tokens), new)
        held.tokens += new

    def _trim(self, session: str, drawn: random.Random, pending: Pending) -> None:
        held = self.held[session]
        keep = drawn.randint(0, len(held.tokens))
        new = [drawn.randrange(9) for _ in range(drawn.randrange(3))]
        pending.changed(session, keep, new)
        held.tokens = held.tokens[:keep] + new

    def _chat(self, session: str, drawn: random.Random, pending: Pending) -> None:
        held = self.held[session]
        held.chat = [
            ChatTurn([Message(role="user", content="ü" * drawn.randrange(9))], n + 1, n)
            for n in range(drawn.randrange(4))
        ]
        pending.chat(session, held.chat)

    def _row(self, session: str, drawn: random.Random, pending: Pending) -> None:
        held = self.held[session]
        free = [None, f"name-{drawn.randrange(5)}"]
        taken = {(other.row.owner, other.row.name) for other in self.held.values() if other is not held}
        name = drawn.choice([n for n in free if n is None or (held.row.owner, n) not in taken])
        held.row = replace(held.row, name=name, used_ms=held.row.used_ms + 1)
        pending.session(held.row)

    def _close(self, session: str, drawn: random.Random, pending: Pending) -> None:
        del self.held[session]
        pending.closed(session)

    def _other(self, drawn: random.Random, pending: Pending) -> None:
        key = f"key-{drawn.randrange(4)}"
        flag = drawn.random() < 0.5
        row: Row = drawn.choice(
            (
                SnapshotRow(key, "one", "model", drawn.randrange(9), 7, 3, "a name", None, flag),
                ModelRow(key, "/a/path", {"weights": str(drawn.randrange(9))}, 5),
            )
        )
        if drawn.random() < 0.3:
            self.rows.pop((type(row), key), None)
            pending.drop(type(row), key)
        else:
            self.rows[type(row), key] = row
            pending.put(row)


def assert_same(loaded: Everything, world: World) -> None:
    found = {each.row.id: (each.row, each.tokens, each.chat) for each in loaded.sessions}
    expected = {
        session: (_real(held.row), array("I", held.tokens), held.chat) for session, held in world.held.items()
    }
    assert found == expected
    others = [*loaded.snapshots, *loaded.models]
    assert {(type(row), row.key): row for row in others} == world.rows
    assert len(others) == len(world.rows)


def _real(row: SessionRow) -> SessionRow:
    return row if row.ttl_s is None else replace(row, ttl_s=float(row.ttl_s))
