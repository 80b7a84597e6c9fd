"""One app at what belongs to another: it hears of it what it would hear of nothing at all, byte for byte.

And what it names never becomes a path. With a broker that keeps what it has on disk.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from tests.daemon.conftest import StartBroker
from tests.daemon.rig import Rig

from stateroom.client.limits import Pattern
from stateroom.client.protocol import OPERATIONS
from stateroom.client.wire import field_types, wire_names
from stateroom.daemon.link import Kept

MODEL = "toy"
INPUT = {"tokens": [1, 2, 3]}
# Every operation that names something of an owner's, and what else it needs.
BY_SESSION: dict[str, dict[str, Any]] = {
    "prefill": INPUT,
    "decode": {"max_tokens": 1},
    "trim": {"to": 1},
    "fork": {},
    "publish": {"as": "mine"},
    "sync": INPUT,
    "tokens": {},
    "info": {},
    "close": {},
    "cancel": {},
    "score": INPUT,
    "lease": {"ttl_s": 5.0},
    "park": {},
    "save": {"snapshot": "mine"},
    "verify": {},
    "requests": {},
}
BY_SNAPSHOT: dict[str, dict[str, Any]] = {"restore": {}, "forget": {}, "export": {}}
WITHOUT = {
    "hello", "open", "list", "snapshots", "stats", "watch", "trace", "load", "unload", "import", "unpublish",
}  # fmt: skip

PATHS = (
    "../../etc/passwd", "/etc/passwd", "a/b", "a\\b", "~", "a\x00b", "C:x", "%2e%2e%2f", "x" * 65,
    "", "a b", "é", "a\n",
)  # fmt: skip


@pytest.fixture
def rig(start_broker: StartBroker, tmp_path: Path) -> Rig:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    return start_broker(state_dir=state)


class Bare:
    """A connection whose replies are looked at as bytes. Request ids are given, so that two can be alike."""

    def __init__(self, rig: Rig, app: str) -> None:
        self.socket = rig.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(rig.endpoint)
        self.ask(0, "hello", {"app": app})

    def ask(self, request_id: int, op: str, arguments: dict[str, Any]) -> bytes:
        self.socket.send(msgpack.packb({"v": 1, "id": request_id, "op": op, **arguments}))
        assert self.socket.poll(10_000), f"{op} was not answered"
        reply: bytes = self.socket.recv()
        return reply

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def stranger(rig: Rig) -> Iterator[Bare]:
    made = Bare(rig, "stranger")
    yield made
    made.close()


def code_of(reply: bytes) -> str:
    code: str = msgpack.unpackb(reply)["error"]["code"]
    return code


def test_every_operation_is_looked_at() -> None:
    assert set(BY_SESSION) | set(BY_SNAPSHOT) | WITHOUT == set(OPERATIONS)


@pytest.mark.parametrize("op", BY_SESSION)
def test_a_session_of_another_is_as_none(rig: Rig, stranger: Bare, op: str) -> None:
    """By its id, which nobody could know, and by its name, which anybody may guess; idle or running."""
    owner = rig.client("owner")
    idle, running = owner.open(name="plan"), owner.open()
    stream = owner.send("decode", session=running, max_tokens=100_000, ignore_eos=True)
    owner.begun(stream)
    told = {
        reference: stranger.ask(7, op, {"session": reference, **BY_SESSION[op]})
        for reference in (idle, running, "plan", secrets.token_urlsafe(18), "nobody")
    }
    assert len(set(told.values())) == 1, told
    assert code_of(told["plan"]) == "not_found"
    owner.ask("cancel", request=stream)
    owner.final(stream)
    listed = {info["session"]: info for info in owner.ask("list")["sessions"]}
    assert set(listed) == {idle, running}
    assert listed[idle]["length"] == 3


@pytest.mark.parametrize("op", BY_SNAPSHOT)
def test_a_snapshot_of_another_is_as_none(rig: Rig, stranger: Bare, op: str) -> None:
    def there(broker: Any) -> bool:
        kept = Kept(id="a" * 32, session="gone", owner="owner", name="plan", length=3, nbytes=9, created_ms=1)
        return bool(broker.work._archive.snapshots.kept(MODEL, kept))

    assert rig.look(there)
    owner = rig.client("owner")
    assert [known["snapshot"] for known in owner.ask("snapshots")["snapshots"]] == ["plan"]
    told = {name: stranger.ask(7, op, {"snapshot": name}) for name in ("plan", "nobody", "a" * 32)}
    assert len(set(told.values())) == 1, told
    assert code_of(told["plan"]) == "not_found"
    assert msgpack.unpackb(stranger.ask(8, "snapshots", {}))["snapshots"] == []
    assert [known["snapshot"] for known in owner.ask("snapshots")["snapshots"]] == ["plan"]


def test_a_trunk_of_another_is_as_none_to_who_has_not_its_id(rig: Rig, stranger: Bare) -> None:
    owner = rig.client("owner")
    session = owner.open()
    trunk = owner.ask("publish", session=session, as_="prompt")["trunk"]
    guessed = secrets.token_urlsafe(18)
    forks = {ref: stranger.ask(7, "fork", {"trunk": ref}) for ref in ("prompt", "nobody", session, guessed)}
    assert len(set(forks.values())) == 1, forks
    ends = {ref: stranger.ask(8, "unpublish", {"as": ref}) for ref in ("prompt", "nobody")}
    assert len(set(ends.values())) == 1, ends
    by_id = {ref: stranger.ask(9, "info", {"session": ref}) for ref in (trunk, guessed)}
    assert len(set(by_id.values())) == 1, by_id  # it lets one fork it, and no more
    assert msgpack.unpackb(stranger.ask(10, "fork", {"trunk": trunk}))["kind"] == "result"
    child = msgpack.unpackb(stranger.ask(11, "list", {}))["sessions"][0]
    assert (child["owner"], child["parents"], child["trunk"]) == ("stranger", [], trunk)


def test_a_request_of_another_is_as_none(rig: Rig, stranger: Bare) -> None:
    owner = rig.client("owner")
    running = owner.send("decode", session=owner.open(), max_tokens=100_000, ignore_eos=True)
    owner.begun(running)
    told = {number: stranger.ask(7, "cancel", {"request": number}) for number in (running, 10**9)}
    assert len(set(told.values())) == 1, told
    assert owner.ask("cancel", request=running)["cancelled"]


def test_what_a_client_asked_for_before_it_left_is_never_anothers(rig: Rig) -> None:
    """Its last requests are read when the connection is gone, some a burst later: whose they are stays."""
    other = rig.client()  # says nothing of who it is
    for _ in range(10):
        leaving = rig.client("secretive")
        for _ in range(150):
            leaving.send("open", tokens=[1, 2, 3])
        leaving.close()
        assert other.ask("list")["sessions"] == []
    rig.until(lambda broker: len(broker.peers) == 1, 30)
    assert {session.owner for session in rig.look(lambda broker: list(broker.catalog))} <= {"secretive"}
    rig.until(lambda broker: len(broker.tickets) == 0)


def test_names_of_others_are_free(rig: Rig, stranger: Bare) -> None:
    """`exists` is said of own names only."""
    owner = rig.client("owner")
    session = owner.open(name="plan")
    owner.ask("publish", session=session, as_="prompt")
    opened = msgpack.unpackb(stranger.ask(7, "open", {"tokens": [1], "name": "plan"}))
    assert opened["kind"] == "result"
    published = stranger.ask(8, "publish", {"session": "plan", "as": "prompt"})
    assert msgpack.unpackb(published)["kind"] == "result"


# ---------------------------------------------------------------- paths


def files_of(rig: Rig, state: Path) -> set[str]:
    """What is in the broker's places, but for what its database does."""
    found = [*rig.folder.rglob("*"), *state.rglob("*")]
    return {str(path) for path in found if not path.name.startswith("catalog.db")}


def named_fields(op: str) -> list[str]:
    """Wire names of an operation's arguments that are names, or lists of them."""
    request = OPERATIONS[op].request
    wire = wire_names(request)
    return [wire[name] for name, kind in field_types(request).items() if "Pattern(" in str(kind)]


@pytest.mark.parametrize("path", PATHS)
def test_no_name_becomes_a_path(rig: Rig, stranger: Bare, tmp_path: Path, path: str) -> None:
    """Each name of each operation is refused as such; what is looked up isn't found, and no file appears."""
    needs = {**BY_SESSION, **BY_SNAPSHOT, "import": {"total": 1, "data": b"x"}}
    session = msgpack.unpackb(stranger.ask(1, "open", {"tokens": [1]}))["session"]
    before = files_of(rig, tmp_path)
    tried = 0
    for op in OPERATIONS:
        for field in named_fields(op):
            value: Any = [path] if field == "names" else path
            arguments = {"session": session} if op in BY_SESSION else {}
            if op in BY_SNAPSHOT or op == "import":
                arguments["snapshot"] = "fine"
            reply = stranger.ask(2, op, {**needs.get(op, {}), **arguments, field: value})
            assert code_of(reply) == "invalid", (op, field)
            assert msgpack.unpackb(reply)["error"]["field"].split(".")[0] == field
            tried += 1
    assert tried >= 10
    if path:
        for op, more in BY_SESSION.items():
            assert code_of(stranger.ask(3, op, {"session": path, **more})) in ("not_found", "invalid")
        for op in ("open", "load", "unload"):
            reply = stranger.ask(4, op, {"model": path})
            assert code_of(reply) == "not_found", op
        reply = stranger.ask(5, "import", {"snapshot": "s", "total": 1, "data": b"x", "model": path})
        assert code_of(reply) == "not_found"
    new = files_of(rig, tmp_path) - before
    assert new == set()


@pytest.mark.parametrize("dots", [".", "..", "..."])
def test_dots_are_names_and_no_directories(rig: Rig, stranger: Bare, tmp_path: Path, dots: str) -> None:
    session = msgpack.unpackb(stranger.ask(1, "open", {"tokens": [1], "name": dots}))["session"]
    before = files_of(rig, tmp_path)
    for op, more in (("save", {"snapshot": dots}), ("info", {}), ("publish", {"as": dots})):
        assert msgpack.unpackb(stranger.ask(2, op, {"session": dots, **more}))["kind"] == "result"
    assert msgpack.unpackb(stranger.ask(3, "restore", {"snapshot": dots, "name": "b"}))["length"] == 1
    assert code_of(stranger.ask(4, "info", {"session": f"{dots}/{session}"})) == "not_found"
    piece = {"snapshot": f"{dots}x", "total": 2, "data": b"x"}
    assert msgpack.unpackb(stranger.ask(5, "import", piece))["received"] == 1
    for path in (Path(name) for name in files_of(rig, tmp_path) - before):
        assert (tmp_path / "state") in path.parents
        assert not path.name.startswith(".")


def test_the_form_of_names_has_no_separators() -> None:
    patterns = {
        mark.regex
        for op in OPERATIONS.values()
        for kind in field_types(op.request).values()
        for mark in marks_of(kind)
        if isinstance(mark, Pattern)
    }
    assert patterns == {"[A-Za-z0-9._-]{1,64}"}


def marks_of(kind: Any) -> Iterator[object]:
    yield from getattr(kind, "__metadata__", ())
    for inner in getattr(kind, "__args__", ()):
        yield from marks_of(inner)
    if hasattr(kind, "__origin__") and getattr(kind, "__metadata__", None):
        yield from marks_of(kind.__origin__)
