"""What waits is written in time, what can't be written waits, and nothing of it is lost or doubled."""

from __future__ import annotations

import asyncio
import io
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stateroom.daemon import keeper as module
from stateroom.daemon.clock import monotonic_s
from stateroom.daemon.exits import DAMAGED, FORBIDDEN, RUNNING, Leave
from stateroom.daemon.keeper import FILE_NAME, FLUSH_S, LASTING_S, TAIL_NAME, Keeper, open_store
from stateroom.daemon.logs import make_log
from stateroom.daemon.store.pending import Batch
from stateroom.daemon.store.refusals import NotWritten
from stateroom.daemon.store.rows import ModelRow, SessionRow
from stateroom.daemon.store.schema import MIGRATIONS
from stateroom.daemon.store.store import Store
from stateroom.daemon.store.tail import Tail

ROW = SessionRow("a", "owner", "model", "interactive", 1, 1)
LONG_S = 10.0  # for what must come about soon


class Watched(Store):
    """A real store that remembers what it was asked: (how many sessions and rows, whether lasting)."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.writes: list[tuple[int, bool]] = []

    def write(self, batch: Batch, lasting: bool = False, number: int | None = None) -> None:
        self.writes.append((len(batch), lasting))
        super().write(batch, lasting, number)

    def limit(self, pages: int) -> None:
        """As a full disk: the file may not grow past so many pages."""
        self._connection.execute(f"PRAGMA max_page_count = {pages}")

    @property
    def pages(self) -> int:
        (count,) = self._connection.execute("PRAGMA page_count").fetchone()
        return int(count)


class Scene:
    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE_NAME
        self.store = Watched(self.file)
        self.log = io.StringIO()
        self.keeper = Keeper(self.store, monotonic_s, make_log("json", "info", self.log))
        self.pending = self.keeper.pending

    async def until(self, read: Callable[[], bool]) -> None:
        for _ in range(int(LONG_S / 0.01)):
            if read():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it did not come about in time")

    @property
    def waiting(self) -> float:
        return self.keeper.gauges()["journal_pending"]

    def said(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.getvalue().splitlines()]


def play(folder: Path, act: Callable[[Scene], Awaitable[None]]) -> Scene:
    async def run() -> Scene:
        scene = Scene(folder)
        await act(scene)
        await scene.keeper.close()
        return scene

    return asyncio.run(run())


def tokens(folder: Path) -> dict[str, list[int]]:
    store = Store(folder / FILE_NAME)
    found = {stored.row.id: stored.tokens.tolist() for stored in store.loaded.sessions}
    store.close()
    return found


def test_what_waits_is_written_together_and_made_to_last(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        scene.pending.session(ROW)
        for token in range(5):
            scene.pending.changed("a", token, [token])
        assert scene.waiting == 1
        await scene.until(lambda: not scene.waiting)
        assert loop.time() - begin_s >= FLUSH_S
        await scene.until(lambda: len(scene.store.writes) == 2)
        assert loop.time() - begin_s >= LASTING_S
        assert scene.store.writes == [(1, False), (0, True)]
        await asyncio.sleep(2 * FLUSH_S)
        assert len(scene.store.writes) == 2, "nothing is written while nothing happens"

    play(tmp_path, act)
    assert tokens(tmp_path) == {"a": [0, 1, 2, 3, 4]}


def test_what_is_urgent_is_written_at_once_and_lasts(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        begin_s = asyncio.get_running_loop().time()
        scene.pending.session(ROW)
        scene.pending.hurry()
        await scene.until(lambda: not scene.waiting)
        assert scene.store.writes == [(1, True)]
        assert asyncio.get_running_loop().time() - begin_s < FLUSH_S

    play(tmp_path, act)


def test_the_last_flush_takes_all(tmp_path: Path) -> None:
    """Also what came while one was under way."""

    async def act(scene: Scene) -> None:
        scene.pending.session(ROW)
        scene.pending.hurry()
        await asyncio.sleep(0.001)
        scene.pending.changed("a", 0, [1, 2])
        scene.pending.put(ModelRow("model", "/model", {}, 1))

    scene = play(tmp_path, act)
    assert scene.store.writes[-1][1], "the last one lasts"
    assert tokens(tmp_path) == {"a": [1, 2]}


def test_a_full_disk_is_told_waited_for_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_FIRST_S", 0.02)

    async def act(scene: Scene) -> None:
        scene.pending.session(ROW)
        await scene.until(lambda: not scene.waiting)
        scene.store.limit(scene.store.pages)
        for _ in range(3):
            scene.pending.changed("a", 0, range(100_000))
        await scene.until(lambda: scene.keeper.failures >= 3)
        assert scene.waiting == 1
        assert scene.keeper.gauges()["journal_lag_s"] > 0
        scene.pending.changed("a", 99_999, [7])
        scene.store.limit(1_000_000)
        await scene.until(lambda: not scene.waiting)
        assert scene.keeper.gauges()["journal_lag_s"] == 0

    scene = play(tmp_path, act)
    assert tokens(tmp_path) == {"a": [*range(99_999), 7]}
    failed = [entry for entry in scene.said() if entry["event"] == "journal not written"]
    assert len(failed) == scene.keeper.failures
    assert all(str(scene.file) in entry["reason"] and "incident" not in entry for entry in failed)
    pauses = [entry["retry_in_s"] for entry in failed]
    assert pauses == [0.02 * 2**i for i in range(len(pauses))]
    assert "journal written again" in [entry["event"] for entry in scene.said()]


def test_what_the_last_flush_could_not_write_the_next_start_does(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.pending.session(ROW)
        await scene.until(lambda: not scene.waiting)
        scene.store.limit(scene.store.pages)
        scene.pending.changed("a", 0, range(100_000))

    scene = play(tmp_path, act)
    (said,) = [entry for entry in scene.said() if entry["event"] == "journal not written"]
    assert (said["waiting"], said["left_to"]) == (1, "the next start")
    assert tokens(tmp_path) == {"a": []}
    said = play(tmp_path, nothing).said()[0]
    assert (said["event"], said["messages"]) == ("journal taken in", 1)
    assert tokens(tmp_path) == {"a": [*range(100_000)]}


def test_a_flush_that_fails_after_the_end_was_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had is nowhere but in the tail: the last flush writes nothing behind it."""
    fails = [NotWritten(tmp_path, "a slow disk, and full")]

    def write(self: Store, batch: Batch, lasting: bool = False, number: int | None = None) -> None:
        if fails and batch.sessions["a"].edit is not None:
            time.sleep(1.5 * module.LAST_S)
            raise fails.pop()
        Store.write(self, batch, lasting, number)

    monkeypatch.setattr(Watched, "write", write)

    async def act(scene: Scene) -> None:
        scene.pending.session(ROW)
        await scene.until(lambda: not scene.waiting)
        scene.pending.changed("a", 0, [1, 2])
        await scene.until(lambda: scene.keeper._flushing is not None)

    play(tmp_path, act)
    assert not fails
    assert play(tmp_path, nothing).said()[0]["event"] == "journal taken in"
    assert tokens(tmp_path) == {"a": [1, 2]}


async def nothing(scene: Scene) -> None:
    pass


# ---------------------------------------------------------------- files that can't be used


def test_a_tail_that_does_not_fit_is_named_and_left_alone(tmp_path: Path) -> None:
    play(tmp_path, nothing)
    tail = Tail(tmp_path / TAIL_NAME)
    store = open_store(tmp_path)
    tail.begin(store.number)
    tail.add(("changed", "nobody", 0, [1]))
    tail.close(remove=False)
    store.close()
    before = [(tmp_path / name).read_bytes() for name in (FILE_NAME, TAIL_NAME)]
    with pytest.raises(Leave) as caught:
        play(tmp_path, nothing)
    assert caught.value.code == DAMAGED
    assert str(tmp_path / TAIL_NAME) in caught.value.message
    assert [(tmp_path / name).read_bytes() for name in (FILE_NAME, TAIL_NAME)] == before
    (tmp_path / TAIL_NAME).unlink()
    play(tmp_path, nothing)


def refused(folder: Path) -> Leave:
    file = folder / FILE_NAME
    before = file.read_bytes() if file.is_file() else None
    with pytest.raises(Leave) as caught:
        open_store(folder)
    assert str(file) in caught.value.message
    if before is not None:
        assert file.read_bytes() == before
    return caught.value


def test_a_damaged_catalog(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 999)
    leaving = refused(tmp_path)
    assert leaving.code == DAMAGED
    assert "recover" in leaving.message


def test_a_catalog_of_a_newer_stateroom(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    leaving = refused(tmp_path)
    assert leaving.code == DAMAGED
    assert "newer stateroom" in leaving.message


def test_a_catalog_that_another_process_has(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom stateroom.daemon.keeper import open_store\n"
        "kept = open_store(Path(sys.argv[1]))\nprint('open', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(Leave) as caught:
            open_store(tmp_path)
        other.kill()
    assert caught.value.code == RUNNING
    assert "stateroom stop" in caught.value.message
    open_store(tmp_path).close()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    leaving = refused(tmp_path / "missing")
    assert leaving.code == FORBIDDEN
