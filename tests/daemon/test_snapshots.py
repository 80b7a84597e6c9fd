"""Snapshots in the broker: which are wanted, whatever workers, kills and restarts do; as clients see them."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
from array import array
from io import BytesIO
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.caches.snapshots.material import material, run
from tests.daemon.conftest import Again, StartBroker
from tests.daemon.rig import Raw, Rig

from stateroom.caches.snapshots import carried
from stateroom.caches.snapshots.content import Material
from stateroom.caches.snapshots.library import Library
from stateroom.caches.snapshots.manifest import About
from stateroom.caches.snapshots.places import library_of
from stateroom.client.errors import Busy, Capacity, Exists, NotFound
from stateroom.daemon.archive import Archive
from stateroom.daemon.broker import Broker
from stateroom.daemon.carriage import CARRIED_PER_OWNER_MAX, EXPORT_BYTES
from stateroom.daemon.catalog import Catalog
from stateroom.daemon.lifecycle import SessionEvent
from stateroom.daemon.link import Kept
from stateroom.daemon.recovery import DEATHS_MAX
from stateroom.daemon.snapshots import Snapshots
from stateroom.daemon.store.pending import Message, Pending
from stateroom.daemon.store.rows import SnapshotRow

SLOW = "save_s=0.5"


def saved(client: Raw, session: str, name: str, **options: Any) -> dict[str, Any]:
    reply = client.ask("save", session=session, snapshot=name, **options)
    assert reply["kind"] == "result", reply
    return reply


def names(client: Raw) -> list[str]:
    return [each["snapshot"] for each in client.ask("snapshots")["snapshots"]]


def tokens_of(client: Raw, session: str) -> list[int]:
    tokens: list[int] = client.ask("tokens", session=session)["tokens"]
    return tokens


def kept_files(state: Path, model: str = "toy") -> list[str]:
    return sorted(path.name for path in (library_of(state, model) / "kept").iterdir())


def kill_worker(rig: Rig) -> None:
    pid = rig.look(lambda broker: broker.supervisor.engine("toy").pid)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def ready(broker: Broker) -> bool:
    return broker.supervisor.engine("toy").ready


# ---------------------------------------------------------------- saving and restoring


def test_a_session_is_saved_and_restored(again: Again) -> None:
    client = again().client("editor")
    session = client.open([5, 6, 7], name="mine")
    reply = saved(client, session, "first")
    assert (reply["snapshot"], reply["tokens"]) == ("first", 3)
    client.ask("decode", session=session, max_tokens=2)
    restored = client.ask("restore", snapshot="first", name="again", class_="background", ttl_s=60)
    assert restored["length"] == 3
    assert (restored["receipt"]["reused"], restored["receipt"]["source"]) == (3, "snapshot")
    assert restored["caps"]["trim"] == "any"
    assert tokens_of(client, "again") == [5, 6, 7]
    assert client.ask("decode", session="again", max_tokens=2)["tokens"] == [3, 4]
    info = client.ask("info", session="again")
    assert (info["session"], info["class"], info["ttl_s"]) == (restored["session"], "background", 60)
    (shown,) = client.ask("snapshots")["snapshots"]
    assert (shown["snapshot"], shown["model"], shown["length"]) == ("first", "toy", 3)
    assert (shown["session"], shown["bytes"]) == (session, reply["bytes"])
    assert client.ask("snapshots")["used_bytes"] == reply["bytes"]
    client.ask("close", session=session)
    (shown,) = client.ask("snapshots")["snapshots"]
    assert "session" not in shown
    assert client.ask("restore", snapshot="first")["length"] == 3
    gauges = client.ask("stats")["gauges"]
    assert (gauges["snapshots"], gauges["snapshot_bytes"]) == (1, reply["bytes"])
    assert (gauges["snapshots_automatic"], gauges["snapshot_automatic_bytes"]) == (0, 0)


def test_a_name_is_taken_until_it_is_replaced_or_forgotten(again: Again, state: Path) -> None:
    client = again().client()
    session = client.open([1, 2])
    saved(client, session, "one")
    client.ask("prefill", session=session, tokens=[3])
    error = client.refusal("save", session=session, snapshot="one")
    assert (error["code"], error["field"]) == ("exists", "snapshot")
    assert client.ask("restore", snapshot="one")["length"] == 2, "nothing was changed"
    saved(client, session, "one", replace=True)
    assert client.ask("restore", snapshot="one")["length"] == 3
    assert names(client) == ["one"]
    assert len(kept_files(state)) == 1
    assert client.ask("forget", snapshot="one")["freed_bytes"] > 0
    assert names(client) == []
    for op in ("restore", "forget", "export"):
        assert client.refusal(op, snapshot="one")["code"] == "not_found"
    saved(client, session, "one")
    assert client.ask("info", session=session)["state"] == "idle"


def test_a_name_is_reserved_while_a_save_runs(again: Again) -> None:
    client = again(SLOW).client()
    one, two = client.open([1]), client.open([2])
    first = client.send("save", session=one, snapshot="name")
    assert client.refusal("save", session=two, snapshot="name")["code"] == "busy"
    assert client.refusal("import", snapshot="name", total=1, data=b"x")["code"] == "busy"
    assert client.refusal("forget", snapshot="name")["code"] == "not_found"
    assert client.final(first)["kind"] == "result"
    assert client.refusal("save", session=two, snapshot="name")["code"] == "exists"


def test_owners_know_nothing_of_each_other(again: Again) -> None:
    """Another owner's snapshot, and none at all, sound the same; both may use one name."""
    rig = again()
    one, two = rig.client("one"), rig.client("two")
    saved(one, one.open([1]), "name")
    assert names(two) == []
    assert two.ask("snapshots")["used_bytes"] == 0
    for op in ("restore", "forget", "export"):
        assert two.refusal(op, snapshot="name") == two.refusal(op, snapshot="nothing")
    saved(two, two.open([1, 2]), "name")
    assert [each.ask("restore", snapshot="name")["length"] for each in (one, two)] == [1, 2]
    two.ask("forget", snapshot="name")
    assert names(one) == ["name"]


def test_watchers_hear_of_own_snapshots(again: Again) -> None:
    rig = again()
    one, two = rig.client("one"), rig.client("two")
    ids = [client.send("watch") for client in (one, two)]
    other = rig.client("one")
    session = other.open([1, 2])
    reply = saved(other, session, "name")
    other.ask("forget", snapshot="name")
    for client, watch in zip((one, two), ids, strict=True):
        client.ask("cancel", request=watch)
    told = [reply for reply in one.replies(ids[0]) if reply["kind"] == "event"]
    mine = [each for each in told if each["event"].startswith("snapshot")]
    assert [(each["event"], each["details"]["snapshot"]) for each in mine] == [
        ("snapshot_saved", "name"),
        ("snapshot_forgotten", "name"),
    ]
    assert mine[0]["session"] == session
    assert (mine[0]["details"]["length"], mine[0]["details"]["bytes"]) == (2, reply["bytes"])
    assert not [each for each in two.replies(ids[1]) if str(each.get("event")).startswith("snapshot")]


def test_a_daemon_without_a_state_directory_says_so(start_broker: StartBroker) -> None:
    client = start_broker().client()
    session = client.open()
    asked: list[tuple[str, dict[str, Any]]] = [
        ("save", {"session": session, "snapshot": "x"}),
        ("park", {"session": session}),
        ("restore", {"snapshot": "x"}),
        ("export", {"snapshot": "x"}),
        ("import", {"snapshot": "x", "total": 1, "data": b"x"}),
    ]
    for op, arguments in asked:
        error = client.refusal(op, **arguments)
        assert error["code"] == "unsupported"
        assert "--home" in error["message"]
    assert client.ask("snapshots")["snapshots"] == []
    assert client.refusal("forget", snapshot="x")["code"] == "not_found"
    assert client.ask("info", session=session)["state"] == "idle"


# ---------------------------------------------------------------- automatic ones


def test_a_parked_session_is_on_disk_until_it_is_closed(again: Again, state: Path) -> None:
    rig = again()
    client = rig.client()
    watch = client.send("watch")
    session = client.open([1, 2, 3])
    reply = client.ask("park", session=session)
    assert (reply["tier"], reply["length"]) == ("disk", 3)
    info = client.ask("info", session=session)
    assert (info["tier"], info["disk_bytes"]) == ("disk", reply["bytes"])
    assert names(client) == []
    assert client.ask("snapshots")["used_bytes"] == reply["bytes"]
    gauges = client.ask("stats")["gauges"]
    assert (gauges["snapshots_automatic"], gauges["snapshot_automatic_bytes"]) == (1, reply["bytes"])
    again_parked = client.ask("park", session=session)
    assert (again_parked["tier"], again_parked["bytes"], again_parked["freed_bytes"]) == (
        "disk",
        reply["bytes"],
        0,
    )
    client.ask("cancel", request=watch)
    moved = [each for each in client.replies(watch) if each.get("event") == "session_moved"]
    assert [each["details"]["tier"] for each in moved] == ["disk"]
    client.ask("close", session=session)
    rig.until(lambda broker: not kept_files(state))
    assert client.ask("snapshots")["used_bytes"] == 0


def test_closed_without_its_worker_it_goes_with_the_next(again: Again, state: Path) -> None:
    rig = again()
    client = rig.client()
    session, other = client.open([1, 2, 3]), client.open([4])
    client.ask("park", session=session)
    client.ask("park", session=other)
    client.ask("unload", model="toy")
    assert client.ask("info", session=session)["tier"] == "disk"
    client.ask("close", session=session)
    assert len(kept_files(state)) == 2
    client = again().client()
    assert client.ask("info", session=other)["tier"] == "disk"
    client.ask("load", model="toy")
    rig = again()
    assert len(kept_files(state)) == 1


def test_files_that_are_gone_are_told_as_gone(again: Again, state: Path) -> None:
    """B42: a session whose snapshot has vanished holds its tokens; a named one is no more."""
    rig = again()
    client = rig.client()
    session = client.open([1, 2, 3])
    client.ask("park", session=session)
    saved(client, client.open([4, 5]), "named")
    rig.stop()
    shutil.rmtree(library_of(state, "toy"))
    rig = again()
    client = rig.client()
    rig.until(ready)
    assert client.ask("info", session=session)["tier"] == "tokens"
    assert names(client) == []
    assert tokens_of(client, session) == [1, 2, 3]


# ---------------------------------------------------------------- deaths and restarts


def test_they_outlive_the_daemon(again: Again) -> None:
    client = again().client("editor")
    session = client.open([1, 2, 3])
    saved(client, session, "name")
    before = client.ask("snapshots")
    rig = again()
    client = rig.client("editor")
    after = client.ask("snapshots")
    assert after["used_bytes"] == before["used_bytes"]
    assert {**after["snapshots"][0], "age_s": 0} == {**before["snapshots"][0], "age_s": 0}
    assert after["snapshots"][0]["age_s"] >= before["snapshots"][0]["age_s"]
    assert tokens_of(client, client.ask("restore", snapshot="name")["session"]) == [1, 2, 3]


def test_forgotten_while_no_worker_runs_it_stays_forgotten(again: Again, state: Path) -> None:
    rig = again()
    client = rig.client()
    session = client.open([1])
    for name in ("a", "b"):
        saved(client, session, name)
    client.ask("unload", model="toy")
    assert client.ask("forget", snapshot="a")["freed_bytes"] > 0
    assert names(client) == ["b"]
    assert len(kept_files(state)) == 2
    rig = again()
    client = rig.client()
    assert names(client) == ["b"]
    rig.until(lambda broker: len(kept_files(state)) == 1)
    assert client.ask("restore", snapshot="b")["length"] == 1
    rig.until(lambda broker: len(broker.archive.snapshots._rows) == 1)


def test_what_the_catalog_has_not_heard_of_is_taken_in(again: Again, state: Path) -> None:
    """B44: files are there before the catalog's word; killed between them, what has a name is not lost."""
    rig = again()
    client = rig.client()
    living = client.open([7, 8])
    saved(client, living, "known")
    rig.stop()
    library = Library(library_of(state, "toy"))
    for name, session, at in (
        ("unheard", None, 5),
        (None, living, 6),
        (None, "nobody's", 7),
        ("known", None, 8),  # older than the one that the catalog knows
    ):
        about = About("default", "toy", at, name, session, automatic=name is None)
        library.write(material(at), {"weights": "scripted"}, about)
    library.close()
    rig = again()
    client = rig.client()
    rig.until(lambda broker: len(kept_files(state)) == 3)
    assert names(client) == ["unheard", "known"]
    assert client.ask("info", session=living)["tier"] == "disk"
    assert tokens_of(client, client.ask("restore", snapshot="known")["session"]) == [7, 8]
    assert len(kept_files(state)) == 3


def test_a_save_whose_worker_died_is_there_once(again: Again, state: Path) -> None:
    """The files were there and nobody had heard of them: the next worker does it again, and one remains."""
    rig = again("after_save=die")
    client = rig.client()
    session = client.open([1, 2, 3])
    reply = client.ask("save", session=session, snapshot="name")
    rig.until(ready)
    if reply["kind"] == "error":
        assert reply["error"]["code"] == "engine_lost"
    assert names(client) == ["name"]
    assert len(kept_files(state)) == 1
    assert tokens_of(client, client.ask("restore", snapshot="name")["session"]) == [1, 2, 3]
    assert client.refusal("save", session=session, snapshot="name")["code"] == "exists"
    saved(client, session, "name", replace=True)


def test_a_worker_that_dies_under_a_restore(again: Again) -> None:
    rig = again(SLOW)
    client = rig.client()
    saved(client, client.open([1, 2, 3]), "name")
    asked = client.send("restore", snapshot="name", name="back")
    rig.until(lambda broker: broker.catalog.find("default", "back").generation > 0)
    kill_worker(rig)
    reply = client.final(asked)
    if reply["kind"] == "error":
        assert reply["error"]["code"] == "engine_lost"
        reply = client.ask("restore", snapshot="name", name="back")
    assert tokens_of(client, "back") == [1, 2, 3]
    assert len(client.ask("list")["sessions"]) == 2


def test_a_client_that_vanishes_leaves_no_session_without_a_name(again: Again) -> None:
    rig = again(SLOW)
    client = rig.client()
    saved(client, client.open([1, 2, 3]), "name")
    leaving = rig.client()
    for name in (None, "found"):
        leaving.send("restore", snapshot="name", **({} if name is None else {"name": name}))
    rig.until(lambda broker: len(broker.catalog) == 3)
    leaving.close()
    rig.until(lambda broker: len(broker.catalog) == 2 and not len(broker.tickets))
    assert [each.get("name") for each in client.ask("list")["sessions"]] == [None, "found"]
    assert names(client) == ["name"]


def test_a_snapshot_that_can_not_be_read_is_refused_by_name(again: Again, state: Path) -> None:
    """B42: and it stays listed until it is forgotten, for whoever may still mend it."""
    rig = again()
    client = rig.client()
    session = client.open([1, 2, 3])
    saved(client, session, "bad")
    rig.stop()
    (name,) = kept_files(state)
    manifest = library_of(state, "toy") / "kept" / name / "manifest"
    content = bytearray(manifest.read_bytes())
    content[100] ^= 1
    manifest.write_bytes(content)
    rig = again()
    client = rig.client()
    rig.until(ready)
    assert names(client) == ["bad"]
    assert client.refusal("restore", snapshot="bad")["code"] == "corrupt"
    assert client.refusal("export", snapshot="bad")["code"] == "corrupt"
    assert [each["session"] for each in client.ask("list")["sessions"]] == [session]
    client.ask("forget", snapshot="bad")
    rig.until(lambda broker: kept_files(state) == [])


def test_a_snapshot_whose_model_is_gone_is_listed_and_can_be_forgotten(again: Again) -> None:
    rig = again(more={"other": "step_s=0.001"})
    client = rig.client()
    saved(client, client.open([1], model="other"), "left")
    saved(client, client.open([1, 2]), "here")
    client = again().client()
    assert [(each["snapshot"], each["model"]) for each in client.ask("snapshots")["snapshots"]] == [
        ("left", "other"),
        ("here", "toy"),
    ]
    # Its model is loaded from where it was, though nothing lists it any more.
    assert client.ask("restore", snapshot="left")["length"] == 1
    assert client.ask("forget", snapshot="left")["kind"] == "result"
    assert names(client) == ["here"]


# ---------------------------------------------------------------- carried files


def exported(client: Raw, name: str) -> bytes:
    content, at = b"", 0
    while True:
        reply = client.ask("export", snapshot=name, offset=at)
        assert reply["kind"] == "result", reply
        content += reply["data"]
        assert len(reply["data"]) <= EXPORT_BYTES
        if reply.get("next") is None:
            assert len(content) == reply["total"]
            return content
        assert reply["next"] == len(content)
        at = reply["next"]


def imported(client: Raw, name: str, content: bytes, piece: int) -> dict[str, Any]:
    """Sends all of it and gives the last answer."""
    for at in range(0, len(content), piece):
        data = content[at : at + piece]
        reply = client.ask("import", snapshot=name, total=len(content), offset=at, data=data)
        if reply["kind"] == "error":
            return reply
        assert reply["received"] == at + len(data)
    return reply


def written(state: Path, name: str = "large") -> bytes:
    """A snapshot of a few pieces in the library of `toy`, and the file that it is carried in."""
    library = Library(library_of(state, "toy"))
    whole = material(3, length=60_000, runs=(run(1), run(2, start=11)))
    whole = Material(array("I", [9, 8, 7]), {}, {"length": 3}, whole.tail, whole.runs)
    made = library.write(whole, {"weights": "scripted"}, About("default", "toy", 1, name))
    out = BytesIO()
    carried.export(library, made.id, out)
    library.close()
    return out.getvalue()


def incoming(state: Path) -> list[Path]:
    return list((state / "incoming").iterdir())


def test_a_snapshot_is_carried_away_and_back(again: Again, state: Path) -> None:
    """X4: what comes back is what went, for another owner, too."""
    file = written(state)
    assert len(file) > 2 * EXPORT_BYTES
    rig = again()
    rig.until(ready)
    one, two = rig.client(), rig.client("two")
    assert exported(one, "large") == file
    assert exported(one, "large") == file
    one.ask("forget", snapshot="large")
    reply = imported(two, "theirs", file, 700_001)
    assert (reply["snapshot"]["snapshot"], reply["snapshot"]["length"]) == ("theirs", 3)
    assert tokens_of(two, two.ask("restore", snapshot="theirs")["session"]) == [9, 8, 7]
    assert names(one) == []
    assert exported(two, "theirs") != file, "it has an id of its own"
    rig.until(lambda broker: not incoming(state) and not broker.archive.snapshots._reserved)


def test_an_export_goes_on_though_it_is_forgotten(again: Again, state: Path) -> None:
    file = written(state)
    rig = again()
    client = rig.client()
    rig.until(ready)
    first = client.ask("export", snapshot="large")
    client.ask("forget", snapshot="large")
    rig.until(lambda broker: kept_files(state) == [])
    content = first["data"]
    while len(content) < len(file):
        content += client.ask("export", snapshot="large", offset=len(content))["data"]
    assert content == file
    assert client.refusal("export", snapshot="large")["code"] == "not_found"
    error = client.refusal("export", snapshot="large", offset=5)
    assert error["code"] == "not_found"


def test_an_export_past_the_end_is_refused(again: Again, state: Path) -> None:
    file = written(state)
    rig = again()
    client = rig.client()
    rig.until(ready)
    assert client.ask("export", snapshot="large", offset=len(file))["data"] == b""
    error = client.refusal("export", snapshot="large", offset=len(file) + 1)
    assert (error["code"], error["field"], error["details"]["total"]) == ("invalid", "offset", len(file))
    rig.stop()
    client = again().client()
    tail = client.ask("export", snapshot="large", offset=len(file) - 5)
    assert tail["data"] == file[-5:], "it needs no beginning"


@pytest.mark.parametrize("at", [0, 40, 0.3, 0.6, -1])
def test_files_that_are_not_as_they_were_are_refused(again: Again, state: Path, at: float) -> None:
    """B42: one bit, anywhere."""
    file = bytearray(written(state))
    where = at if isinstance(at, int) else int(len(file) * at)
    file[where] ^= 4
    rig = again()
    client = rig.client()
    before = kept_files(state)
    reply = imported(client, "theirs", bytes(file), 1_000_000)
    assert reply["error"]["code"] == "corrupt"
    assert names(client) == ["large"]
    assert kept_files(state) == before
    rig.until(lambda broker: not incoming(state))
    assert imported(client, "theirs", bytes(written_again(file, where)), 4_000_000)["snapshot"]["length"] == 3


def written_again(file: bytearray, where: int) -> bytearray:
    file[where] ^= 4
    return file


def test_pieces_come_in_order_and_once(again: Again, state: Path) -> None:
    file = written(state)
    rig = again()
    client = rig.client()
    ask: dict[str, Any] = {"snapshot": "theirs", "total": len(file)}
    error = client.refusal("import", offset=10, data=b"x", **ask)
    assert (error["code"], error["field"], error["details"]["received"]) == ("invalid", "offset", 0)
    assert client.ask("import", data=file[:100], **ask)["received"] == 100
    error = client.refusal("import", offset=99, data=b"x", **ask)
    assert (error["code"], error["details"]["received"]) == ("invalid", 100)
    error = client.refusal("import", snapshot="theirs", total=5000, offset=100, data=b"x")
    assert (error["code"], error["field"]) == ("invalid", "total")
    assert client.refusal("import", snapshot="y", total=5, offset=5, data=b"x")["code"] == "invalid"
    assert client.ask("import", data=file[:50], **ask)["received"] == 50, "from 0 on it begins again"
    assert client.ask("import", offset=50, data=file[50:], **ask)["received"] == len(file)
    assert client.refusal("import", data=b"x", **ask)["code"] == "exists"
    rig.until(lambda broker: not incoming(state))


def test_what_is_not_gone_on_with_is_dropped(again: Again, state: Path) -> None:
    rig = again()
    client, leaving = rig.client(), rig.client()
    for each, name in ((client, "idle"), (leaving, "gone")):
        assert each.ask("import", snapshot=name, total=100, data=b"x" * 10)["received"] == 10
    assert len(incoming(state)) == 2
    leaving.close()
    rig.until(lambda broker: len(incoming(state)) == 1)
    assert client.ask("import", snapshot="gone", total=100, data=b"x")["received"] == 1

    def idle(broker: Broker) -> None:
        assert broker.carriage is not None
        for each in broker.carriage._incoming.values():
            each.used_s -= 61
        broker.carriage.expire()

    rig.look(idle)
    rig.until(lambda broker: not incoming(state))
    error = client.refusal("import", snapshot="idle", total=100, offset=10, data=b"x")
    assert (error["code"], error["details"]["received"]) == ("invalid", 0)
    assert client.ask("import", snapshot="idle", total=100, data=b"x")["received"] == 1
    rig.stop()
    assert not (state / "incoming").exists() or not incoming(state)


def test_the_minute_begins_with_the_answer(again: Again, state: Path) -> None:
    """A large file may take longer than that to check, or a piece wait behind another's check."""
    file, now_s = written(state), [0.0]
    rig = again()
    rig.until(ready)
    client = rig.client()

    def behind_a_long_check(broker: Broker) -> Event:
        assert broker.carriage is not None
        go_on = Event()
        broker.carriage._clock = lambda: now_s[0]
        broker.carriage._thread.submit(go_on.wait, 30)
        return go_on

    def expire(broker: Broker) -> None:
        assert broker.carriage is not None
        broker.carriage.expire()

    go_on = rig.look(behind_a_long_check)
    leaves = client.send("export", snapshot="large")
    comes = client.send("import", snapshot="new", total=len(file), data=file[:10])
    client.ask("hello")  # both were read
    now_s[0] = 61.0
    rig.look(expire)
    go_on.set()
    content = client.final(leaves)["data"]
    assert client.final(comes)["received"] == 10
    assert client.ask("forget", snapshot="large")["kind"] == "result"
    now_s[0] = 120.0
    rig.look(expire)
    while len(content) < len(file):
        reply = client.ask("export", snapshot="large", offset=len(content))
        assert reply["kind"] == "result", reply
        content += reply["data"]
    assert content == file
    reply = client.ask("import", snapshot="new", total=len(file), offset=10, data=file[10:])
    assert reply["snapshot"]["snapshot"] == "new"


def test_a_worker_that_dies_under_an_import(again: Again, state: Path) -> None:
    """The next one takes the file in; it is there once, and what it came in is not left behind."""
    file = written(state)
    rig = again(SLOW)
    client = rig.client()
    rig.until(ready)
    asked = client.send("import", snapshot="theirs", total=len(file), data=file)
    rig.until(lambda broker: any(t.op == "import" and t.generation is not None for t in broker.tickets))
    kill_worker(rig)
    reply = client.final(asked)
    assert reply["snapshot"]["length"] == 3
    assert names(client) == ["large", "theirs"]
    assert len(kept_files(state)) == 2
    rig.until(lambda broker: not incoming(state) and not broker.archive.snapshots._reserved)


def test_a_session_beside_an_import_does_not_pay_for_it(again: Again, state: Path) -> None:
    """An import that kills has no session that could be found; the one beside it isn't taken for it."""
    file = written(state)
    rig = again("save_s=60,step_s=60")
    client = rig.client()
    session = client.open()
    client.send("decode", session=session, max_tokens=5)
    client.send("import", snapshot="theirs", total=len(file), data=file)
    for deaths in range(DEATHS_MAX):
        rig.until(
            lambda broker: len(broker.tickets) == 2 and all(t.generation is not None for t in broker.tickets)
        )
        kill_worker(rig)
        rig.until(lambda broker, deaths=deaths: broker.supervisor.engine("toy").deaths > deaths)
    assert "quarantined" not in client.ask("info", session=session)


def test_a_client_that_leaves_while_its_file_is_taken_in(again: Again, state: Path) -> None:
    file = written(state)
    rig = again(SLOW)
    rig.until(ready)
    leaving, client = rig.client(), rig.client()
    leaving.send("import", snapshot="theirs", total=len(file), data=file)
    rig.until(lambda broker: any(t.op == "import" and t.generation is not None for t in broker.tickets))
    leaving.close()
    rig.until(lambda broker: not len(broker.tickets))
    assert names(client) == ["large", "theirs"]
    rig.until(lambda broker: not incoming(state) and not broker.archive.snapshots._reserved)


def test_imports_are_bounded(again: Again) -> None:
    rig = again()
    client = rig.client()
    for number in range(CARRIED_PER_OWNER_MAX):
        assert client.ask("import", snapshot=f"n{number}", total=9, data=b"x")["received"] == 1
    assert client.refusal("import", snapshot="more", total=9, data=b"x")["code"] == "capacity"
    assert rig.client("another").ask("import", snapshot="more", total=9, data=b"x")["received"] == 1
    error = rig.client("third").refusal("import", snapshot="vast", total=2**39, data=b"x")
    assert error["code"] == "capacity"
    assert error["details"]["needed_bytes"] == 2**39
    assert error["details"]["free_bytes"] < 2**39


def test_an_import_into_a_model_that_is_not_there(again: Again, state: Path) -> None:
    rig = again()
    client = rig.client()
    error = client.refusal("import", snapshot="x", total=9, data=b"x", model="nothing")
    assert (error["code"], error["field"]) == ("not_found", "model")
    assert incoming(state) == []
    assert rig.look(lambda broker: broker.archive.snapshots._reserved) == set()


# ---------------------------------------------------------------- pure


OWNERS, NAMES, SESSIONS, MODELS = ("one", "two"), ("a", "b"), ("s", "t", "u"), ("m", "n")


class World:
    """Libraries as they are, the catalog's table as it is written, and the broker's view of both."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, Kept]] = {model: {} for model in MODELS}
        self.up = set(MODELS)
        self.table: dict[str, SnapshotRow] = {}
        self.alive = set(SESSIONS)
        self.clock = itertools.count(1)
        self.forgotten: set[str] = set()
        self.removed: list[str] = []  # by workers, and not yet told
        self.made_as: dict[str, tuple[str, str] | None] = {}  # owner and name of each, the oldest first
        self.told: set[str] = set()
        self.begin()

    def begin(self) -> None:
        self.pending = Pending()
        self.snapshots = Snapshots(self.pending, lambda: 0, self.alive.__contains__, self.discard)
        self.snapshots.load(self.table.values())

    def flush(self) -> None:
        for (_, key), row in self.pending.take().rows.items():
            if row is None:
                self.table.pop(key, None)
            else:
                assert isinstance(row, SnapshotRow)
                self.table[key] = row

    def discard(self, model: str, ids: list[str]) -> None:
        if model in self.up:
            for each in ids:
                self.files[model].pop(each, None)
                self.removed.append(each)

    def check(self) -> None:
        for each in self.removed:
            self.snapshots.gone(each)
        self.removed.clear()
        rows = [row for row in self.snapshots._rows.values() if not row.forgotten]
        for owner in OWNERS:
            assert self.snapshots.used_bytes(owner) == sum(r.nbytes for r in rows if r.owner == owner)
            listed = self.snapshots.listed(owner)
            assert len({each.snapshot for each in listed}) == len(listed)
        gauges = self.snapshots.gauges()
        assert gauges["snapshots"] + gauges["snapshots_automatic"] == len(rows)
        assert gauges["snapshot_bytes"] + gauges["snapshot_automatic_bytes"] == sum(r.nbytes for r in rows)
        wanted = {row.id for row in rows}
        assert not self.forgotten & wanted
        assert {row.session for row in rows if row.automatic} <= self.alive
        last = {key: known for known, key in self.made_as.items() if key is not None}
        assert {known for known in last.values() if known in self.told - self.forgotten} <= wanted

    def made(self, drawn: random.Random) -> None:
        """A worker wrote one; the broker hears of it, or the worker is killed before."""
        if not self.up:
            return
        model = drawn.choice(sorted(self.up))
        session, owner, at = drawn.choice(SESSIONS), drawn.choice(OWNERS), next(self.clock)
        name = drawn.choice([*NAMES, None])
        if name is None:
            owner, model = OWNERS[0], MODELS[SESSIONS.index(session) % 2]
            if model not in self.up or session not in self.alive:
                return
        kept = Kept(f"{at:032x}", owner, session, name, at, at, at)
        rival = next(
            (
                each.id
                for each in self.files[model].values()
                if (each.owner, each.name) == (owner, name) and (name or each.session == session)
            ),
            None,
        )
        self.files[model][kept.id] = kept
        self.made_as[kept.id] = None if name is None else (owner, name)
        self.files[model].pop(rival or "", None)
        if drawn.random() < 0.7:
            self.told.add(kept.id)
            if not self.snapshots.kept(model, kept):
                self.discard(model, [kept.id])
        else:
            self.restart(model)

    def restart(self, model: str) -> None:
        self.up.add(model)
        broken = [each for each in self.files[model] if int(each, 16) % 7 == 0]
        kept = [each for each in self.files[model].values() if each.id not in broken]
        self.snapshots.reconcile(model, kept, broken)
        self.check()
        rows = {row.id: row for row in self.snapshots._rows.values() if row.model == model}
        assert rows.keys() <= set(self.files[model]), "what is gone isn't remembered"
        assert not any(row.forgotten for row in rows.values()), "what was forgotten is gone"
        assert set(self.files[model]) <= rows.keys() | set(broken), "what nobody wants is gone"


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_the_books_agree_with_the_files(seed: int, steps: int) -> None:
    """Whatever is saved, forgotten, closed, killed and started again, in whatever order."""
    drawn, world = random.Random(seed), World()
    for _ in range(steps):
        step = drawn.randrange(7)
        if step < 3:
            world.made(drawn)
        elif step == 3:
            owner, name = drawn.choice(OWNERS), drawn.choice(NAMES)
            known = world.snapshots.id_of(owner, name)
            if known is not None:
                world.snapshots.forget(world.snapshots.find(owner, name))
                world.forgotten.add(known)
        elif step == 4:
            session = drawn.choice(SESSIONS)
            world.alive.discard(session)
            world.snapshots.closed(session)
        elif step == 5:
            model = drawn.choice(MODELS)
            if model in world.up:
                world.up.remove(model)
            else:
                world.restart(model)
        else:
            world.flush()
            world.begin()  # the daemon, killed after a flush
        world.check()
    world.flush()
    world.begin()
    for model in MODELS:
        world.restart(model)


def test_what_is_as_it_was_is_not_written_again() -> None:
    """A worker's start tells of all that is there, and there may be thousands."""
    told: list[Message] = []
    catalog = Catalog(lambda: 0.0, pending=Pending(told.append))
    archive = Archive(catalog, lambda event, owner: None, lambda model, ids: None, keeps=True)
    sessions = catalog.add("app", "m", [None] * 3, "interactive", None, [])
    for session in sessions:
        session.advance(SessionEvent.OPENED)
        catalog.opened(session)
    kept = [Kept(f"{n:032x}", "app", session.id, None, 5, 50, 1) for n, session in enumerate(sessions)]
    archive.on_kept("m", kept, [])
    assert [session.tier for session in sessions] == ["disk"] * 3
    told.clear()
    archive.on_kept("m", kept, [])
    assert told == []
    archive.on_kept("m", kept[:2], [])
    assert [what for what, *_ in told] == ["drop", "session"]
    assert [session.tier for session in sessions] == ["disk", "disk", "tokens"]


def test_names_are_reserved_counted_and_let_go() -> None:
    snapshots = Snapshots(Pending(), lambda: 0, lambda session: True, lambda model, ids: None, most=2)
    let_go = snapshots.reserve("one", "a")
    with pytest.raises(Busy):
        snapshots.reserve("one", "a")
    other = snapshots.reserve("two", "a")
    with pytest.raises(Capacity):
        snapshots.reserve("one", "b")
    other()
    snapshots.reserve("one", "b")()
    assert snapshots.kept("m", Kept("1" * 32, "one", "s", "a", 1, 1, 1))
    let_go()
    with pytest.raises(Exists):
        snapshots.reserve("one", "a")
    again = snapshots.reserve("one", "a", replace=True)
    with pytest.raises(Busy):
        snapshots.reserve("one", "a", replace=True)
    again()
    with pytest.raises(NotFound):
        snapshots.find("two", "a")
    snapshots.reserve("two", "x")
    with pytest.raises(Capacity):
        snapshots.reserve("two", "y")
    snapshots.reserve("one", "a", replace=True)  # not one more


def test_what_arrives_replaces_though_the_clock_was_set_back() -> None:
    """Its library has removed the other one already. At a start, when both are there, the newer one stays."""
    discarded: list[str] = []
    snapshots = Snapshots(
        Pending(), lambda: 0, lambda session: True, lambda model, ids: discarded.extend(ids)
    )
    before, after = (Kept(f"{n:032x}", "one", "s", "a", 1, 1, created_ms=9 - n) for n in range(2))
    assert snapshots.kept("m", before)
    assert snapshots.kept("m", after)
    assert snapshots.find("one", "a").id == after.id
    assert discarded == [before.id]
    snapshots.reconcile("m", [after, before], [])
    assert snapshots.find("one", "a").id == before.id


def test_one_of_another_model_takes_the_name_over() -> None:
    """Its worker can't remove the one that it replaces."""
    told: list[tuple[str, list[str]]] = []
    snapshots = Snapshots(
        Pending(), lambda: 0, lambda session: True, lambda model, ids: told.append((model, ids))
    )
    for number, model in ((1, "m"), (2, "n")):
        assert snapshots.kept(model, Kept(str(number) * 32, "one", "s", "a", 1, number, number))
    assert snapshots.find("one", "a").model == "n"
    assert told == [("m", ["1" * 32])]
    assert snapshots.used_bytes("one") == 2
    snapshots.reconcile("m", [Kept("1" * 32, "one", "s", "a", 1, 1, 1)], [])
    assert told[1:] == [("m", ["1" * 32])]
    assert snapshots.find("one", "a").id == "2" * 32
