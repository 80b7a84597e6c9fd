"""Files that can't be used: refused by type, with the file and a remedy, and left exactly as they were."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tests.daemon.store.messages import World, assert_same

from stateroom.daemon.store.pending import Pending
from stateroom.daemon.store.refusals import Corrupt, Foreign, Locked, Newer, StoreRefused
from stateroom.daemon.store.schema import MIGRATIONS
from stateroom.daemon.store.store import Store

FLIPS = 300


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "catalog.db"


def filled(file: Path, messages: int = 400) -> World:
    drawn, world, pending, store = random.Random(3), World(), Pending(), Store(file)
    for _ in range(messages):
        world.step(drawn, pending)
    store.write(pending.take())
    store.close()
    return world


def assert_refused(file: Path, kind: type[StoreRefused]) -> StoreRefused:
    before = file.read_bytes() if file.is_file() else None
    with pytest.raises(kind) as caught:
        Store(file)
    assert str(file) in str(caught.value)
    assert caught.value.remedy in str(caught.value)
    if before is not None:
        assert file.read_bytes() == before
    return caught.value


@pytest.mark.parametrize(
    "content", [b"x", b"no database" * 999, b"SQLite format 3\0" + b"x" * 5000, b"\0" * 4096]
)
def test_what_is_no_database(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert_refused(file, Corrupt)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_directory(file: Path) -> None:
    file.mkdir()
    assert_refused(file, Corrupt)


def test_a_database_of_another_program(file: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()
    assert_refused(file, Foreign)


def test_a_newer_one(file: Path) -> None:
    world = filled(file)
    with sqlite3.connect(file) as connection:
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    error = assert_refused(file, Newer)
    assert isinstance(error, Newer)
    assert error.version == len(MIGRATIONS) + 1
    with sqlite3.connect(file) as connection:
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
    connection.close()
    assert_same(Store(file).loaded, world)


def test_bits_that_flip_are_never_taken_for_what_was_written(file: Path) -> None:
    """Anywhere in the file: refused, or of no account (free space), never another token, owner or name."""
    world = filled(file)
    before, drawn = file.read_bytes(), random.Random(11)
    refused = 0
    for _ in range(FLIPS):
        bit = drawn.randrange(8 * len(before))
        flipped = bytearray(before)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        try:
            store = Store(file)
        except StoreRefused:
            refused += 1
        else:
            assert_same(store.loaded, world)
            store.close()
        for beside in file.parent.glob(f"{file.name}-*"):
            beside.unlink()
    assert refused > FLIPS / 3


def test_a_file_that_was_cut(file: Path) -> None:
    filled(file)
    before = file.read_bytes()
    for length in (100, 4096, 4097, len(before) // 2, len(before) - 4096, len(before) - 1):
        file.write_bytes(before[:length])
        with pytest.raises(StoreRefused):
            Store(file)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE sessions SET owner = 'another' WHERE number = 1",
        "UPDATE sessions SET ttl_s = 5e9",
        "UPDATE sessions SET id = 'z' || id",
        "UPDATE pieces SET tokens = zeroblob(length(tokens))",
        "UPDATE pieces SET tokens = tokens || x'00'",
        "UPDATE pieces SET tokens = 'text'",
        "UPDATE pieces SET place = -place",
        "DELETE FROM pieces WHERE place IN (SELECT place FROM pieces LIMIT 1)",
        "DELETE FROM sessions WHERE number = (SELECT min(number) FROM sessions)",
        "UPDATE chats SET turns = '[]'",
        "UPDATE snapshots SET owner = 'another'",
        "UPDATE models SET fingerprint = '{}'",
    ],
)
def test_rows_that_others_changed(file: Path, damage: str) -> None:
    filled(file)
    with sqlite3.connect(file) as connection:
        assert connection.execute(damage).rowcount > 0
    connection.close()
    assert_refused(file, Corrupt)


def test_another_process_has_it(file: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from stateroom.daemon.store.store import Store\n"
        "store = Store(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        assert_refused(file, Locked)
    finally:
        other.kill()
        other.wait()
    Store(file).close()  # the lock went with its process


# ---------------------------------------------------------------- migrations


def test_a_migration_is_done_once_and_keeps_everything(file: Path) -> None:
    world = filled(file)
    later = (*MIGRATIONS, "ALTER TABLE sessions ADD COLUMN note TEXT; CREATE TABLE notes (text TEXT)")
    for _ in range(2):
        store = Store(file, migrations=later)
        assert_same(store.loaded, world)
        store.close()
    with pytest.raises(Newer):
        Store(file)


def test_a_migration_that_fails_leaves_the_file_as_it_was(file: Path) -> None:
    world = filled(file)
    broken = (*MIGRATIONS, "ALTER TABLE sessions ADD COLUMN note TEXT; CREATE TABLE sessions (x)")
    with pytest.raises(sqlite3.OperationalError, match="already exists"):
        Store(file, migrations=broken)
    assert_same(Store(file).loaded, world)
