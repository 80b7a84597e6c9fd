"""The tail beside the catalog: together they are what was told, whenever the process is killed."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.daemon.store.messages import World, assert_same
from tests.daemon.store.tail_kills import Process

from stateroom.daemon.store import tail as module
from stateroom.daemon.store.rows import SessionRow

KILLS = int(os.environ.get("STATEROOM_KILLS", "60"))
ROOT = Path(__file__).resolve().parents[3]


def told(folder: Path, seed: int, messages: int, flush_at: Callable[[int], bool]) -> list[World]:
    """The world after each message."""
    drawn, world, process = random.Random(seed), World(), Process(folder)
    worlds = [world.copy()]
    for i in range(messages):
        world.step(drawn, process.pending)
        worlds.append(world.copy())
        if flush_at(i):
            process.flush(True)
    process.kill()
    return worlds


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32),
    acts=st.lists(st.sampled_from(("message", "message", "flush", "failed", "kill")), max_size=40),
    behind=st.sampled_from((0, 200, 10**6)),
)
def test_whatever_happens_all_that_was_told_is_there(seed: int, acts: list[str], behind: int) -> None:
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BEHIND_BYTES", behind)
        folder = Path(name)
        drawn, world, process = random.Random(seed), World(), Process(folder)
        for act in [*acts, "kill"]:
            if act == "message":
                world.step(drawn, process.pending)
            elif act == "kill":
                process.kill()
                process = Process(folder)
                assert_same(process.store.loaded, world)
            else:
                process.flush(act == "flush")
        process.kill()


@pytest.mark.parametrize("damage", ["torn", "flipped", "zeroed"])
def test_a_damaged_tail_ends_where_it_is_damaged(tmp_path: Path, damage: str) -> None:
    """What is read then was so at some moment, since the last flush; never anything else."""
    worlds = told(tmp_path, 4, 60, lambda i: i in (20, 40))
    content, drawn = (tmp_path / "catalog.tail").read_bytes(), random.Random(5)
    seen = set()
    for _ in range(60):
        at = drawn.randrange(len(content))
        changed = bytearray(content)
        if damage == "torn":
            del changed[at:]
        elif damage == "flipped":
            changed[at] ^= 1 << drawn.randrange(8)
        else:
            changed[at : at + 300] = bytes(len(changed[at : at + 300]))
        copy = tmp_path / "copy"
        copy.mkdir()
        shutil.copy(tmp_path / "catalog.db", copy)
        (copy / "catalog.tail").write_bytes(changed)
        process = Process(copy)
        loaded = process.store.loaded
        process.kill()
        shutil.rmtree(copy)
        seen.add(next(i for i, world in enumerate(worlds) if i >= 41 and _same(loaded, world)))
    assert len(seen) > 2


def _same(loaded: object, world: World) -> bool:
    try:
        assert_same(loaded, world)  # type: ignore[arg-type]
    except AssertionError:
        return False
    return True


def test_an_older_copy_of_the_catalog_meets_a_tail_that_is_not_its_own(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BEHIND_BYTES", 0)
        worlds = told(tmp_path, 6, 10, lambda i: i == 9)
        shutil.copy(tmp_path / "catalog.db", tmp_path / "older")
        process, world, drawn = Process(tmp_path), worlds[-1].copy(), random.Random(7)
        for _ in range(3):
            for _ in range(5):
                world.step(drawn, process.pending)
            process.flush(True)
        process.kill()
        shutil.copy(tmp_path / "older", tmp_path / "catalog.db")
        process = Process(tmp_path)
        assert_same(process.store.loaded, worlds[-1])
        process.kill()


def test_what_is_flushed_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEHIND_BYTES", 1000)
    process, sizes = Process(tmp_path), []
    process.pending.session(SessionRow("a", "owner", "model", "interactive", 1, 1))
    for n in range(200):
        process.pending.changed("a", n, [n])
        if n % 5 == 4:
            process.flush(True)
            sizes.append((tmp_path / "catalog.tail").stat().st_size)
    assert max(sizes) < 2000
    process.tail.close(remove=True)
    process.store.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["catalog.db"]


@pytest.mark.parametrize("why", ["limit", "disk"])
def test_a_tail_that_can_not_grow_is_begun_anew_with_the_next_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    process = Process(tmp_path)
    process.pending.session(SessionRow("a", "owner", "model", "interactive", 1, 1))
    process.pending.changed("a", 0, [1, 2])
    size = (tmp_path / "catalog.tail").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if why == "limit":
        monkeypatch.setattr(module, "BYTES_MAX", size + 10)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
    try:
        process.pending.changed("a", 2, [3])
        assert process.tail.lost
        process.pending.changed("a", 3, [4])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    copy = tmp_path / "killed-here"
    shutil.copytree(tmp_path, copy, ignore=lambda _folder, names: [n for n in names if n == copy.name])
    killed = Process(copy)
    assert [stored.tokens.tolist() for stored in killed.store.loaded.sessions] == [[1, 2]]
    killed.kill()
    monkeypatch.undo()
    process.flush(True)
    assert process.tail.lost is None
    process.pending.changed("a", 4, [5])
    process.kill()
    again = Process(tmp_path)
    (stored,) = again.store.loaded.sessions
    assert stored.tokens == array("I", [1, 2, 3, 4, 5])
    again.kill()


def test_a_tail_that_can_not_grow_is_kept_while_flushes_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds what the catalog lacks; begun anew behind a flush that failed, it would be of no use."""
    process = Process(tmp_path)
    process.pending.session(SessionRow("a", "owner", "model", "interactive", 1, 1))
    process.pending.changed("a", 0, [1, 2])
    monkeypatch.setattr(module, "BYTES_MAX", (tmp_path / "catalog.tail").stat().st_size + 10)
    process.pending.changed("a", 2, [3])
    assert process.tail.lost
    process.flush(False)
    process.pending.changed("a", 3, [4])
    process.kill()
    again = Process(tmp_path)
    assert [stored.tokens.tolist() for stored in again.store.loaded.sessions] == [[1, 2]]
    again.kill()


@pytest.mark.parametrize("room", [True, False])
def test_what_comes_while_a_tail_waits_for_its_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    process = Process(tmp_path)
    process.pending.session(SessionRow("a", "owner", "model", "interactive", 1, 1))
    process.tail._lose("the disk is full")
    process.number += 1
    batch = process.pending.take()
    process.tail.mark(process.number)
    monkeypatch.setattr(module, "BEHIND_BYTES", 10_000 if room else 100)
    process.pending.changed("a", 0, range(100))
    process.store.write(batch, False, process.number)
    process.tail.flushed()
    assert (process.tail.lost is None) is room  # else the next flush is waited for
    process.pending.changed("a", 100, [7])
    process.kill()
    again = Process(tmp_path)
    (stored,) = again.store.loaded.sessions
    assert stored.tokens.tolist() == ([*range(100), 7] if room else [])
    again.kill()


def test_a_killed_process_loses_nothing_that_it_told(tmp_path: Path) -> None:
    """Real processes, killed at random moments; a message is told once it was taken."""
    command = [sys.executable, "-m", "tests.daemon.store.tail_kills", str(tmp_path), str(KILLS), "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["kills"] == KILLS
    assert seen["from_tail"] > KILLS // 4
    assert seen["messages"] > 10 * KILLS
