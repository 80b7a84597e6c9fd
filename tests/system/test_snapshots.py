"""Snapshots of a real daemon: saved, restored, carried, damaged, forgotten: same tokens, or a refusal."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import RunningDaemon, StartDaemon
from tests.system.conftest import LONG_CONTEXT, ConnectTo, Restart, Tell, await_model
from tests.system.test_streams import PROMPT, greedy
from tests.tiny import write_tiny_model

from stateroom.caches.snapshots.places import library_of
from stateroom.client import Room
from stateroom.client.errors import ClientError, Corrupt, Exists, Mismatch, NotFound, StateroomError
from stateroom.client.protocol import KV
from stateroom.client.session import Session

pytestmark = pytest.mark.system

TIMEOUT_S = 60.0
CONTENT = PROMPT * 30
KILLS = int(os.environ.get("STATEROOM_KILLS", "3"))
WAIT_S = 15.0


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads that are wide enough to be quantised."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "wide", width=128, context=LONG_CONTEXT)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    folder = tmp_path_factory.mktemp("models") / "other"
    return write_tiny_model(folder, width=128, context=LONG_CONTEXT, seed=1)


@pytest.fixture(scope="module")
def shared(start_shared_daemon: StartDaemon, wide_folder: Path, other_folder: Path) -> RunningDaemon:
    daemon = start_shared_daemon("--model", other_folder, model=wide_folder)
    await_model(daemon)
    return daemon


@pytest.fixture
def room(shared: RunningDaemon, connect_to: ConnectTo, request: pytest.FixtureRequest) -> Iterator[Room]:
    """An app for each test."""
    room = connect_to(shared, request.node.name[:100], timeout_s=TIMEOUT_S)
    yield room
    for session in room.list():
        room.session(session.session).close()
    for each in room.snapshots():
        room.forget(each.snapshot)


def state_of(daemon: RunningDaemon) -> Path:
    return Path(daemon.env["STATEROOM_HOME"]) / "state"


def kept(daemon: RunningDaemon, model: str = "wide") -> list[Path]:
    return sorted((library_of(state_of(daemon), model) / "kept").iterdir())


def until(condition: object, what: str) -> None:
    """Polls: what a worker does after its answer has no reply to wait for."""
    assert callable(condition)
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def goes_on_as_fresh(session: Session, room: Room) -> None:
    tokens = session.tokens().tokens
    assert session.decode(8, ignore_eos=True).wait().tokens == greedy(room, tokens)


# ---------------------------------------------------------------- saved and restored


@pytest.mark.parametrize("scheme", ["dense", "affine8"])
def test_what_was_acknowledged_outlives_a_kill_of_everything(
    start_daemon: StartDaemon, restart: Restart, connect_to: ConnectTo, wide_folder: Path, scheme: str
) -> None:
    """Saved, and killed the moment that is told: restored as it was, with nothing computed, in its scheme."""
    daemon = start_daemon(model=wide_folder)
    await_model(daemon)
    kv = KV(scheme=scheme)  # type: ignore[arg-type]
    room = connect_to(daemon, "saver", timeout_s=TIMEOUT_S)
    session = room.open(tokens=CONTENT, kv=kv)
    session.decode(20, temperature=1.0, seed=3, ignore_eos=True).wait()
    content = session.tokens().tokens
    saved = session.save("before")
    for pid in [daemon.pid, *daemon.workers()]:
        os.kill(pid, signal.SIGKILL)
    daemon.process.wait(10)
    assert saved.tokens == len(content)

    again = restart(daemon)
    again.wait_until_answering()
    room = connect_to(again, "saver", timeout_s=TIMEOUT_S)
    (known,) = room.snapshots()
    assert (known.snapshot, known.length, known.bytes) == ("before", len(content), saved.bytes)
    back = room.restore("before", name="back")
    assert back.receipt is not None
    assert (back.receipt.reused, back.receipt.source) == (len(content) - 1, "snapshot")
    assert back.tokens().tokens == content
    assert {kind.scheme for kind in back.info().kinds} == {scheme}
    with room.open(tokens=content, kv=kv) as fresh:
        drawn = fresh.decode(8, ignore_eos=True).wait().tokens
    assert back.decode(8, ignore_eos=True).wait().tokens == drawn
    # Its worker dies: another one has it with its scheme.
    (worker,) = [pid for pid in again.workers() if pid]
    os.kill(worker, signal.SIGKILL)
    back.trim(to=len(content))
    assert back.decode(8, ignore_eos=True).wait().tokens == drawn
    assert {kind.scheme for kind in back.info().kinds} == {scheme}


def test_a_session_goes_on_beside_its_snapshot(room: Room) -> None:
    session = room.open(tokens=CONTENT)
    session.save("one")
    session.sync(tokens=CONTENT[:40] + [7] * 30)
    back = room.restore("one")
    assert back.tokens().tokens == CONTENT
    goes_on_as_fresh(back, room)
    goes_on_as_fresh(session, room)
    for child in back.fork(2):
        goes_on_as_fresh(child, room)


def test_a_chat_knows_its_turns(room: Room) -> None:
    chat = room.open(messages=[{"role": "user", "content": "hello"}])
    chat.decode(6, ignore_eos=True).wait()
    chat.save("chat")
    back = room.restore("chat")
    for each in (chat, back):
        each.prefill(messages=[{"role": "user", "content": "and again"}])
    assert back.tokens().tokens == chat.tokens().tokens


def test_replacing_keeps_the_old_one_until_the_new_one_is_there(room: Room, shared: RunningDaemon) -> None:
    session = room.open(tokens=CONTENT)
    before = set(kept(shared))
    session.save("one")
    session.prefill(tokens=[9] * 10)
    with pytest.raises(Exists):
        session.save("one")
    assert room.restore("one").length == len(CONTENT)
    session.save("one", replace=True)
    assert room.restore("one").length == len(CONTENT) + 10
    assert len(set(kept(shared)) - before) == 1


def test_two_owners(room: Room, shared: RunningDaemon, connect_to: ConnectTo) -> None:
    """Each has a name of its own; of the other's it can't tell that it is there."""
    other = connect_to(shared, "stranger", timeout_s=TIMEOUT_S)
    room.open(tokens=CONTENT).save("mine")
    told = []
    for name in ("mine", "nothing"):
        for ask in (other.restore, other.forget, lambda each: other.export(each, io.BytesIO())):
            with pytest.raises(NotFound) as refused:
                ask(name)
            told.append((refused.value.message, refused.value.field, refused.value.details))
    assert len({str(each) for each in told}) == 1
    assert other.snapshots() == []
    other.open(tokens=PROMPT).save("mine")
    assert other.restore("mine").tokens().tokens == PROMPT
    other.forget("mine")
    assert room.restore("mine").tokens().tokens == CONTENT


@pytest.mark.parametrize("name", ["..", ".", "...", "-", "a.b", "new", "kept", "A" * 64])
def test_names_are_no_paths(room: Room, shared: RunningDaemon, name: str) -> None:
    state = state_of(shared)
    before = {path for path in state.rglob("*") if path.is_dir()}
    room.open(tokens=PROMPT).save(name)
    made = {path for path in state.rglob("*") if path.is_dir()} - before
    assert {path.parent for path in made} <= {library_of(state, "wide") / "kept"}
    assert all(set(path.name) <= set("0123456789abcdef") for path in made)
    assert room.restore(name).tokens().tokens == PROMPT


def test_saving_while_others_decode(room: Room) -> None:
    """B46: streams beside go on, and draw what they would have drawn."""
    content = [n % 50 for n in range(2000)]
    sessions = [room.open(tokens=[n, *PROMPT]) for n in range(3)]
    large = room.open(tokens=content)
    expected = [greedy(room, session.tokens().tokens, 60) for session in sessions]
    streams = [session.decode(60, ignore_eos=True) for session in sessions]
    for stream in streams:
        next(stream)
    large.save("large")
    assert [stream.wait().tokens for stream in streams] == expected
    assert room.restore("large").tokens().tokens == content


# ---------------------------------------------------------------- damage


def test_a_bit_that_flips_in_any_file_is_refused_by_name(room: Room, shared: RunningDaemon) -> None:
    """B42: the file is named and nothing changes; with the bit as it was, all is well."""
    library = library_of(state_of(shared), "wide")
    before = {path for path in library.rglob("*") if path.is_file()}
    session = room.open(tokens=CONTENT)
    (child,) = session.fork(1)  # so that there is a run that both share
    child.decode(5, ignore_eos=True).wait()
    child.save("one")
    files = sorted({path for path in library.rglob("*") if path.is_file()} - before)
    assert {path.parent.name for path in files} >= {"runs"}
    assert {path.name for path in files} >= {"manifest", "tokens", "chat", "tail.safetensors"}
    expected, sessions = child.tokens().tokens, len(room.list())
    session.close()
    child.close()  # what is alive on the device would not be read
    drawn = random.Random(1)
    flipped = 0
    for path in files:
        content = path.read_bytes()
        for _ in range(3 if content else 0):
            at = drawn.randrange(len(content))
            damaged = bytearray(content)
            damaged[at] ^= 1 << drawn.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises((Corrupt, Mismatch)) as refused:
                room.restore("one")
            assert isinstance(refused.value, Corrupt), f"{path.name} at {at}"
            assert path.name[:8] in str(refused.value) or path.name in str(refused.value.details)
            with pytest.raises(Corrupt):
                room.export("one", io.BytesIO())
            flipped += 1
        path.write_bytes(content)
    assert flipped >= 12
    assert len(room.list()) == sessions - 2
    back = room.restore("one")
    assert back.tokens().tokens == expected
    goes_on_as_fresh(back, room)


def test_files_that_are_cut_or_gone(room: Room, shared: RunningDaemon) -> None:
    """B42."""
    before = set(kept(shared))
    room.open(tokens=CONTENT).save("one")
    (folder,) = set(kept(shared)) - before
    for name in ("manifest", "tokens", "tail.safetensors"):
        path = folder / name
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        with pytest.raises(Corrupt):
            room.restore("one")
        path.unlink()
        with pytest.raises((Corrupt, NotFound)):
            room.restore("one")
        path.write_bytes(content)
    assert room.restore("one").tokens().tokens == CONTENT


# ---------------------------------------------------------------- carried


def test_carried_away_forgotten_and_taken_in_again(room: Room, shared: RunningDaemon, tmp_path: Path) -> None:
    session = room.open(tokens=CONTENT)
    session.save("one")
    expected = greedy(room, CONTENT)
    size = room.export("one", tmp_path / "file")
    assert size == (tmp_path / "file").stat().st_size
    again = io.BytesIO()
    room.export("one", again)
    assert again.getvalue() == (tmp_path / "file").read_bytes()
    session.close()
    room.forget("one")
    with pytest.raises(NotFound):
        room.restore("one")
    taken = room.import_("two", tmp_path / "file")
    assert (taken.snapshot, taken.length) == ("two", len(CONTENT))
    back = room.restore("two")
    assert back.receipt is not None
    assert back.receipt.source == "snapshot"
    assert back.decode(8, ignore_eos=True).wait().tokens == expected
    assert list((state_of(shared) / "incoming").iterdir()) == []


def test_what_is_no_snapshot_is_not_taken_in(room: Room, shared: RunningDaemon) -> None:
    """X4: garbage, a file that was cut, one with a byte behind its end, one of another format."""
    room.open(tokens=CONTENT).save("one")
    out = io.BytesIO()
    room.export("one", out)
    good = out.getvalue()
    before = kept(shared)
    drawn = random.Random(3)
    bad = [b"x", b"\0" * 5000, drawn.randbytes(10_000), good[:-1], good[: len(good) // 2], good + b"\0"]
    bad.append(good[:19] + (2**40).to_bytes(8, "little") + good[27:])
    for content in bad:
        with pytest.raises(Corrupt):
            room.import_("bad", io.BytesIO(content))
    assert kept(shared) == before
    assert [each.snapshot for each in room.snapshots()] == ["one"]
    until(lambda: not list((state_of(shared) / "incoming").iterdir()), "a file was left behind")
    room.import_("bad", io.BytesIO(good))
    assert room.restore("bad").tokens().tokens == CONTENT


def test_a_snapshot_of_another_model_is_refused_by_name(room: Room) -> None:
    """B47: it may be taken in, and says what differs when it is restored."""
    room.open(tokens=CONTENT, model="other").save("of-other")
    out = io.BytesIO()
    room.export("of-other", out)
    room.import_("here", io.BytesIO(out.getvalue()), model="wide")
    with pytest.raises(Mismatch) as refused:
        room.restore("here")
    assert refused.value.details["part"] == "weights"
    assert refused.value.details["here"] != refused.value.details["there"]
    before = len(room.list())
    assert room.restore("of-other").tokens().tokens == CONTENT
    assert len(room.list()) == before + 1


# ---------------------------------------------------------------- workers that aren't there


def test_forgotten_while_its_worker_is_down(room: Room, shared: RunningDaemon) -> None:
    before = set(kept(shared, "other"))
    room.open(tokens=PROMPT, model="other").save("a")
    session = room.open(tokens=CONTENT, model="other")
    session.save("b")
    assert len(set(kept(shared, "other")) - before) == 2
    room.unload("other")
    room.forget("a")
    assert [each.snapshot for each in room.snapshots()] == ["b"]
    assert room.export("b", io.BytesIO()) > 0, "which needs no worker"
    assert room.restore("b").tokens().tokens == CONTENT
    until(
        lambda: len([each for each in kept(shared, "other") if each not in before and _named(each)]) == 1,
        "the files stayed",
    )


def _named(folder: Path) -> bool:
    return b'"automatic":false' in (folder / "manifest").read_bytes()


def test_a_save_whose_worker_is_killed_is_made_by_the_next(room: Room, shared: RunningDaemon) -> None:
    session = room.open(tokens=[n % 40 for n in range(3000)])
    saving = threading.Thread(target=lambda: session.save("one"))
    saving.start()
    time.sleep(0.02)
    for pid in shared.workers():
        os.kill(pid, signal.SIGKILL)
    saving.join(WAIT_S * 4)
    assert not saving.is_alive()
    assert [each.snapshot for each in room.snapshots()] == ["one"]
    assert room.restore("one").tokens().tokens == [n % 40 for n in range(3000)]


@pytest.mark.timeout(60 + 30 * KILLS)
def test_killed_while_it_saves_the_old_or_the_new(
    start_daemon: StartDaemon, restart: Restart, connect_to: ConnectTo, wide_folder: Path, tell: Tell
) -> None:
    """B44: a daemon and its worker, at random moments of saves that replace: one of the two, whole."""
    drawn = random.Random(11)
    daemon = start_daemon(model=wide_folder)
    await_model(daemon)
    acknowledged, outcomes = 0, {"old": 0, "new": 0}
    for _ in range(KILLS):
        room = connect_to(daemon, "saver", timeout_s=TIMEOUT_S)
        session = room.open(tokens=[*CONTENT, *[1] * acknowledged])
        sent = acknowledged
        stop = time.monotonic() + drawn.uniform(0.05, 0.6)
        victims = [daemon.pid, *daemon.workers()]
        killer = threading.Timer(stop - time.monotonic(), lambda pids=victims: [_kill(pid) for pid in pids])
        killer.start()
        try:
            while True:
                session.save("one", replace=True)
                acknowledged = sent
                session.prefill(tokens=[1])
                sent += 1
        except (ClientError, StateroomError):
            pass
        killer.join()
        daemon.process.wait(WAIT_S)
        daemon = restart(daemon)
        daemon.wait_until_answering()
        await_model(daemon)
        room = connect_to(daemon, "saver", timeout_s=TIMEOUT_S)
        known = room.snapshots()
        if not known:
            assert acknowledged == 0
            continue
        back = room.restore("one")
        more = back.length - len(CONTENT)
        assert acknowledged <= more <= sent
        outcomes["new" if more > acknowledged else "old"] += 1
        assert back.tokens().tokens == [*CONTENT, *[1] * more]
        acknowledged = more
        until(lambda it=daemon: sum(map(_named, kept(it))) == 1, "one of the two stayed")
        goes_on_as_fresh(back, room)
    tell(f"{KILLS} kills: {outcomes}")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
