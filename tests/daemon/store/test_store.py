"""What is written is what is read at the next start, whatever happened in between."""

from __future__ import annotations

import os
import random
import sqlite3
import stat
from array import array
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.daemon.store.messages import World, assert_same

from stateroom.daemon.store.pending import Edit, Pending
from stateroom.daemon.store.refusals import NotWritten
from stateroom.daemon.store.rows import SessionRow
from stateroom.daemon.store.schema import PIECE_TOKENS
from stateroom.daemon.store.store import FREE_PAGES_MAX, Store

PAGE_BYTES = 4096
ROW = SessionRow("a", "owner", "model", "interactive", 1, 1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "catalog.db"


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), flushes=st.lists(st.integers(1, 12), max_size=9))
def test_every_flush_is_found_at_the_next_start(seed: int, flushes: list[int]) -> None:
    """Messages at random, flushed at random, opened again at random, beside a model in plain Python."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "catalog.db"
        drawn, world, pending, store = random.Random(seed), World(), Pending(), Store(file)
        for messages in flushes:
            for _ in range(messages):
                world.step(drawn, pending)
            store.write(pending.take())
            if drawn.random() < 0.5:
                store.close()
                store = Store(file)
                assert_same(store.loaded, world)
        store.close()
        store = Store(file)
        assert_same(store.loaded, world)
        store.close()


edits = st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 9), max_size=12)), max_size=8)


@given(st.lists(st.integers(0, 9), max_size=30), edits)
def test_edits_become_one(tokens: list[int], made: list[tuple[int, list[int]]]) -> None:
    after, joined = list(tokens), Edit(len(tokens), array("I"))
    for keep, new in made:
        keep = min(keep, len(after))
        after = after[:keep] + new
        joined = joined.then(Edit(keep, array("I", new)))
    assert tokens[: joined.keep] + list(joined.new) == after
    again = after[: joined.keep] + list(joined.new)
    assert again == after


@pytest.mark.parametrize("length", [0, 1, PIECE_TOKENS - 1, PIECE_TOKENS, PIECE_TOKENS + 1, 3 * PIECE_TOKENS])
@pytest.mark.parametrize("keep", [0, 1, PIECE_TOKENS - 1, PIECE_TOKENS, PIECE_TOKENS + 1, 2 * PIECE_TOKENS])
@pytest.mark.parametrize("new", [0, 1, PIECE_TOKENS, PIECE_TOKENS + 1])
def test_edges_of_pieces(file: Path, length: int, keep: int, new: int) -> None:
    if keep > length:
        keep = length
    first, second = list(range(length)), list(range(10_000, 10_000 + new))
    store, pending = Store(file), Pending()
    pending.session(ROW)
    pending.changed("a", 0, first)
    store.write(pending.take())
    pending.changed("a", keep, second)
    store.write(pending.take())
    pending.changed("a", keep + new, [7])
    store.write(pending.take())
    store.close()
    (held,) = Store(file).loaded.sessions
    assert held.tokens.tolist() == [*first[:keep], *second, 7]


def test_names_change_places_in_one_flush(file: Path) -> None:
    store, pending = Store(file), Pending()
    for name in ("a", "b", "c"):
        pending.session(SessionRow(name, "owner", "model", "interactive", 1, 1, name=name))
    store.write(pending.take())
    pending.closed("c")
    for session, name in (("a", "b"), ("b", "a")):
        pending.session(SessionRow(session, "owner", "model", "interactive", 1, 1, name=name))
    pending.session(SessionRow("d", "owner", "model", "interactive", 1, 1, name="c"))
    store.write(pending.take())
    store.close()
    names = {each.row.id: each.row.name for each in Store(file).loaded.sessions}
    assert names == {"a": "b", "b": "a", "d": "c"}


def test_a_batch_that_was_not_written_is_put_back(file: Path) -> None:
    """Before what came since; written twice, it changes nothing."""
    drawn, world, pending, store = random.Random(5), World(), Pending(), Store(file)
    for _ in range(200):
        for _ in range(drawn.randrange(6)):
            world.step(drawn, pending)
        batch = pending.take()
        if drawn.random() < 0.5:
            store.write(batch)
        for _ in range(drawn.randrange(3)):
            world.step(drawn, pending)
        pending.put_back(batch)
    store.write(pending.take())
    store.close()
    assert_same(Store(file).loaded, world)


def test_a_full_disk_loses_nothing(file: Path) -> None:
    """The flush fails as a whole; what waits is written when there is room again."""
    drawn, world, pending, store = random.Random(7), World(), Pending(), Store(file)
    for _ in range(50):
        world.step(drawn, pending)
    store.write(pending.take())
    before = world.copy()
    connection = store._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    failed = 0
    for _ in range(30):
        for _ in range(6):
            world.step(drawn, pending)
        batch = pending.take()
        try:
            store.write(batch)
        except NotWritten:
            pending.put_back(batch)
            failed += 1
        else:
            before = world.copy()
    assert failed
    store.close()
    store = Store(file)
    assert_same(store.loaded, before)
    store.write(pending.take())
    store.close()
    assert_same(Store(file).loaded, world)


def test_an_error_of_ours_changes_nothing(file: Path) -> None:
    store, pending = Store(file), Pending()
    pending.session(ROW)
    pending.changed("a", 0, [1, 2, 3])
    store.write(pending.take())
    for session, keep in (("a", 4), ("never opened", 0)):
        pending.changed("a", 1, [9])
        pending.session(SessionRow("b", "owner", "model", "interactive", 1, 1))
        pending.changed(session, keep, [])
        batch = pending.take()
        if session == "a":
            batch.sessions["a"].edit = Edit(4, array("I"))
        with pytest.raises(ValueError, match="tokens"):
            store.write(batch)
    store.close()
    (held,) = Store(file).loaded.sessions
    assert (held.row, held.tokens.tolist()) == (ROW, [1, 2, 3])


def test_what_was_closed_is_on_the_disk_no_more(file: Path) -> None:
    """Overwritten, not only unlinked, and the file gets shorter."""
    store, pending = Store(file), Pending()
    secret = [0x5EC2E7AA] * 600_000
    pending.session(ROW)
    pending.changed("a", 0, secret)
    store.write(pending.take())
    pending.closed("a")
    store.write(pending.take())
    for n in range(8):
        pending.session(SessionRow(f"b{n}", "owner", "model", "interactive", 1, 1))
        store.write(pending.take())
    store.close()
    content = file.read_bytes()
    assert secret[0].to_bytes(4, "little") * 2 not in content
    assert len(content) < (FREE_PAGES_MAX + 40) * PAGE_BYTES
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_the_file_is_private(file: Path) -> None:
    store, pending = Store(file), Pending()
    pending.session(ROW)
    store.write(pending.take())
    for path in file.parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not (file.parent / f"{file.name}-shm").exists()
    store.close()
    os.chmod(file, 0o600)


def test_it_is_a_database_that_others_can_read(file: Path) -> None:
    store, pending = Store(file), Pending()
    pending.session(ROW)
    pending.changed("a", 0, [1, 2**32 - 1])
    store.write(pending.take())
    store.close()
    with sqlite3.connect(file) as connection:
        assert connection.execute("SELECT id, owner FROM sessions").fetchall() == [("a", "owner")]
        assert connection.execute("SELECT hex(tokens) FROM pieces").fetchall() == [("01000000FFFFFFFF",)]


def test_what_is_to_last_is_committed_with_a_sync(file: Path) -> None:
    """Each flush says which it is; when the last ones were not, an empty one that is to last writes too."""
    store, pending = Store(file), Pending()
    made: list[str] = []
    store._connection.set_trace_callback(made.append)

    def flush(lasting: bool, new: int) -> list[str]:
        made.clear()
        for n in range(new):
            pending.session(SessionRow(f"a{n}", "owner", "model", "interactive", 1, 1))
        store.write(pending.take(), lasting)
        told = ("PRAGMA synchronous", "UPDATE flushes", "COMMIT")
        return [each.partition(" SET")[0] for each in made if each.startswith(told)]

    assert flush(False, 1) == ["PRAGMA synchronous = NORMAL", "UPDATE flushes", "COMMIT"]
    assert flush(True, 1) == ["PRAGMA synchronous = FULL", "UPDATE flushes", "COMMIT"]
    assert flush(True, 0) == []
    assert flush(False, 1) == ["PRAGMA synchronous = NORMAL", "UPDATE flushes", "COMMIT"]
    assert flush(False, 0) == []
    assert flush(True, 0) == ["PRAGMA synchronous = FULL", "UPDATE flushes", "COMMIT"]
    assert flush(True, 0) == []
