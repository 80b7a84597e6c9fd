"""What outlives a worker and a daemon, from the client's side: snapshots, files, leases, verifications."""

from __future__ import annotations

import asyncio
import io
import stat
from pathlib import Path
from typing import Any

import pytest
from tests.client.peer import Call, Peer

from stateroom.client import Progress, Room, SnapshotInfo, VerifyResult, connect_async
from stateroom.client.carrying import Reading, Writing
from stateroom.client.errors import Capacity, Corrupt, Exists, Invalid, Mismatch, NotFound, StreamBroken
from stateroom.client.limits import CHUNK_BYTES_MAX
from stateroom.client.protocol import Export, ExportResult, Import, ImportResult


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """For files alone; the peer's socket is beside it."""
    (made := tmp_path / "files").mkdir()
    return made


# ---------------------------------------------------------------- blocking


def test_a_session_is_parked_leased_and_verified(client_room: Room, client_peer: Peer) -> None:
    session = client_room.open(text="hello")
    session.length = 0  # as one that another handle has changed
    assert session.park().tier == "disk"
    assert session.length == 5
    assert session.lease(60.0).expires_in_s == 60.0
    assert session.lease(None).expires_in_s is None
    assert [call.args for call in client_peer.asked("lease")] == [
        {"session": session.id, "ttl_s": 60.0},
        {"session": session.id},
    ]
    assert (
        session.verify()
        == client_room.verify()
        == VerifyResult(max_abs_logit_error=0.25, max_abs_logit=9.0, argmax_agree=True, length=3)
    )
    assert [call.args for call in client_peer.asked("verify")] == [{"session": session.id}, {}]


def test_what_a_verification_says_is_within_its_bound_or_not() -> None:
    def found(error: float, **more: Any) -> VerifyResult:
        figures = {"max_abs_logit": 10.0, "argmax_agree": True, "length": 3, "bound": 0.1}
        return VerifyResult(max_abs_logit_error=error, **{**figures, **more})

    assert found(0.99).healthy
    assert not found(1.01).healthy
    assert not found(0.0, finish="cancelled").healthy


def test_what_is_saved_is_restored_listed_and_forgotten(client_room: Room, client_peer: Peer) -> None:
    session = client_room.open(text="hello")
    saved = session.save("one")
    assert (saved.snapshot, saved.tokens, saved.checksum) == ("one", 5, "c0ffee")
    with pytest.raises(Exists):
        session.save("one")
    session.save("one", replace=True)
    assert client_room.snapshots() == [SnapshotInfo(snapshot="one", length=5)]
    restored = client_room.restore("one", name="again", session_class="background", ttl_s=9.0)
    assert (restored.name, restored.length, restored.tokens().text) == ("again", 5, "hello")
    assert restored.caps is not None
    assert restored.receipt is not None
    assert (restored.receipt.source, restored.receipt.reused) == ("snapshot", 5)
    asked = client_peer.asked("restore")[0].args
    assert asked == {"snapshot": "one", "name": "again", "class": "background", "ttl_s": 9.0}
    assert client_room.forget("one").freed_bytes == 5
    assert client_room.snapshots() == []
    for gone in (client_room.forget, client_room.restore):
        with pytest.raises(NotFound):
            gone("one")


@pytest.mark.parametrize(
    ("code", "kind"), [("mismatch", Mismatch), ("corrupt", Corrupt), ("capacity", Capacity)]
)
def test_refusals_have_their_class_and_details(
    client_room: Room, client_peer: Peer, code: str, kind: type[Exception]
) -> None:
    client_peer.on["restore"] = lambda call: call.error(code, part="weights", here="a", there="b")
    with pytest.raises(kind) as caught:
        client_room.restore("one")
    assert caught.value.details == {"part": "weights", "here": "a", "there": "b"}  # type: ignore[attr-defined]


def test_a_snapshot_is_carried_in_a_file(client_room: Room, client_peer: Peer, folder: Path) -> None:
    client_room.open(text="hello there").save("one")
    path = folder / "one.stateroom"
    path.write_text("what was there before")
    seen: list[Progress] = []
    assert client_room.export("one", path, on_progress=seen.append) == 11
    assert path.read_bytes() == b"hello there"
    assert seen == [Progress(done=n, total=11) for n in (4, 8, 11)]
    assert [call.args.get("offset", 0) for call in client_peer.asked("export")] == [0, 4, 8]
    assert list(folder.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    seen.clear()
    made = client_room.import_("two", path, model="toy", on_progress=seen.append)
    assert made == SnapshotInfo(snapshot="two", length=11)
    assert seen == [Progress(done=11, total=11)]
    assert client_peer.asked("import")[0].args["model"] == "toy"
    with pytest.raises(Exists):
        client_room.import_("two", path)


def test_open_files_are_used_from_where_they_stand_and_stay_open(client_room: Room) -> None:
    client_room.open(text="hello").save("one")
    file = io.BytesIO(b"before ")
    file.seek(7)
    assert client_room.export("one", file) == 5
    assert file.getvalue() == b"before hello"
    file.seek(7)
    assert client_room.import_("two", file).length == 5
    assert not file.closed


def test_an_export_that_fails_leaves_nothing_behind(
    client_room: Room, client_peer: Peer, folder: Path
) -> None:
    client_room.open(text="hello").save("one")
    path = folder / "file"
    with pytest.raises(NotFound):
        client_room.export("nothing", path)

    def interrupted(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client_room.export("one", path, on_progress=interrupted)

    def changes(call: Call) -> None:
        client_peer.snapshots["one"] += b"x"
        client_peer._export(call)

    client_peer.on["export"] = changes
    with pytest.raises(StreamBroken, match="changed"):
        client_room.export("one", path)
    assert list(folder.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        client_room.export("one", folder / "nowhere" / "file")


def test_an_import_says_what_is_wrong_with_its_file(
    client_room: Room, client_peer: Peer, folder: Path
) -> None:
    path = folder / "file"
    with pytest.raises(FileNotFoundError):
        client_room.import_("two", path)
    path.write_bytes(b"")
    with pytest.raises(Invalid, match="empty"):
        client_room.import_("two", path)
    assert not client_peer.asked("import")
    path.write_bytes(b"damaged!")
    with pytest.raises(Corrupt):
        client_room.import_("two", path)
    client_peer.on["import"] = lambda call: call.result(received=3)
    with pytest.raises(StreamBroken):
        client_room.import_("two", path)


# ---------------------------------------------------------------- asyncio


def test_the_same_for_asyncio(client_peer: Peer, folder: Path) -> None:
    asyncio.run(_everything(client_peer, folder))
    assert list(folder.iterdir()) == [folder / "file"]


async def _everything(client_peer: Peer, folder: Path) -> None:
    path = folder / "file"
    seen: list[Progress] = []
    async with connect_async(client_peer.endpoint) as room:
        session = await room.open(text="hello there")
        assert (await session.park()).length == 11
        assert (await session.lease(5.0)).expires_in_s == 5.0
        assert (await session.verify()).argmax_agree
        assert (await room.verify()).length == 3
        assert (await session.save("one")).tokens == 11
        assert await room.export("one", path, on_progress=seen.append) == 11
        assert len(seen) == 3
        made = await room.import_("two", path, on_progress=seen.append)
        assert (made.snapshot, len(seen)) == ("two", 4)
        assert [info.snapshot for info in await room.snapshots()] == ["one", "two"]
        restored = await room.restore("two", name="again")
        assert (restored.name, restored.length) == ("again", 11)
        assert restored.receipt is not None
        assert restored.receipt.source == "snapshot"
        assert (await room.forget("two")).freed_bytes == 11
        with pytest.raises(Exists):
            await session.save("one")
        with pytest.raises(NotFound):
            await room.export("two", folder / "other")


# ---------------------------------------------------------------- files, in pieces


def test_large_files_go_in_pieces_that_messages_have_room_for(folder: Path) -> None:
    path, content = folder / "file", bytes(range(256)) * (CHUNK_BYTES_MAX // 256 * 2 + 7)
    path.write_bytes(content)
    got = b""
    with Reading("one", path, None) as reading:
        while len(got) < len(content):
            piece = reading.next()
            assert len(piece.data) <= CHUNK_BYTES_MAX
            assert piece.problem() is None
            got += piece.data
            whole = len(got) == len(content)
            answer = ImportResult(received=len(got), snapshot=SnapshotInfo(snapshot="one") if whole else None)
            assert reading.sent(piece, answer).done == len(got)
    assert got == content


@pytest.mark.parametrize(
    "part",
    [
        ExportResult(data=b"", total=3),
        ExportResult(data=b"abc", total=4),  # not all, and says that it is
        ExportResult(data=b"abc", total=3, next=3),
        ExportResult(data=b"abcd", total=3),
    ],
)
def test_pieces_that_do_not_fit_are_refused(part: ExportResult, folder: Path) -> None:
    with Writing("one", folder / "file") as writing:
        assert writing.next == Export(snapshot="one", offset=0)
        with pytest.raises(StreamBroken):
            writing.take(part)
    assert list(folder.iterdir()) == []


def test_an_answer_that_does_not_fit_is_refused() -> None:
    reading = Reading("one", io.BytesIO(b"abc"), None)
    piece = reading.next()
    for wrong in (ImportResult(received=2), ImportResult(received=3)):
        with pytest.raises(StreamBroken):
            reading.sent(piece, wrong)


def test_bulk_stays_out_of_reprs() -> None:
    bulk = b"x" * 10_000
    shown = [repr(ExportResult(data=bulk, total=10_000)), repr(Import(snapshot="s", total=10_000, data=bulk))]
    assert all(len(text) < 200 for text in shown)
