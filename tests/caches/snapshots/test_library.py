"""The folder of snapshots: what is shared, replaced, removed, carried; who has it open. Without mlx."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import replace
from io import BytesIO
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.caches.snapshots.material import (
    EXPECTED,
    MODEL,
    about,
    files,
    material,
    plain_of,
    plain_of_material,
    run,
)

from stateroom.caches.snapshots import carried, durable
from stateroom.caches.snapshots.library import Library
from stateroom.caches.snapshots.limits import Limits
from stateroom.caches.snapshots.refusals import InUse, Missing, NoRoom, RunGone
from stateroom.caches.snapshots.tensors import ITEM_BYTES, Plain


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "snapshots")


def runs(library: Library) -> set[str]:
    return {path.name for path in (library.folder / "runs").iterdir()}


def test_what_is_read_is_what_was_written(library: Library) -> None:
    for seed in range(5):
        whole = material(seed, length=seed, runs=(run(seed), run(seed + 1, start=11)))
        made = library.write(whole, MODEL, about(f"number {seed}"))
        assert plain_of(library.read(made.id, EXPECTED)) == plain_of_material(whole)
    library.close()
    again = Library(library.folder)
    assert again.entries == library.entries
    assert sum(path.stat().st_size for path in files(again)) == again.used_bytes


def test_runs_are_there_once_and_as_long_as_they_are_named(library: Library) -> None:
    one = library.write(material(1, runs=(run(1),)), MODEL, about())
    two = library.write(material(2, runs=(run(1), run(2, start=11))), MODEL, about())
    assert runs(library) == {each.digest for each in two.runs}
    library.remove(two.id)
    assert runs(library) == {one.runs[0].digest}
    library.read(one.id, EXPECTED)
    library.remove(one.id)
    assert files(library) == []
    for gone in (one.id, two.id, "0" * 32, "..", "", "manifest"):
        with pytest.raises(Missing):
            library.remove(gone)
        with pytest.raises(Missing):
            library.read(gone, EXPECTED)


def test_a_run_that_went_bad_is_written_again_and_heals_the_others(library: Library) -> None:
    first = library.write(material(1, runs=(run(1),)), MODEL, about())
    path = library.folder / "runs" / first.runs[0].digest
    path.write_bytes(b"\0" * path.stat().st_size)
    library.close()
    again = Library(library.folder)
    again.write(material(2, runs=(run(1),)), MODEL, about())
    assert plain_of(again.read(first.id, EXPECTED)) == plain_of_material(material(1, runs=(run(1),)))


def test_material_that_names_a_run_which_is_gone(library: Library) -> None:
    made = library.write(material(1, runs=(run(1),)), MODEL, about())
    plain = run(1)
    named = type(plain)(plain.store, plain.start, plain.length, plain.key, (), made.runs[0].tensors)
    second = library.write(material(2, runs=(named,)), MODEL, about())
    assert (
        plain_of(library.read(second.id, EXPECTED))[-1] == plain_of_material(material(2, runs=(plain,)))[-1]
    )
    library.remove(made.id)
    library.remove(second.id)
    before = files(library)
    with pytest.raises(RunGone):
        library.write(material(2, runs=(named,)), MODEL, about())
    assert files(library) == before


def test_what_replaces_another_takes_its_place(library: Library) -> None:
    one = library.write(material(1, runs=(run(1),)), MODEL, about("mine"))
    two = library.write(material(2, runs=(run(2),)), MODEL, about("mine"), replaces=one.id)
    assert list(library.entries) == [two.id]
    assert runs(library) == {two.runs[0].digest}


def test_one_process_has_it_open(library: Library) -> None:
    """B44: no two writers."""
    with pytest.raises(InUse):
        Library(library.folder)
    library.close()
    Library(library.folder).close()


def test_names_are_never_paths(library: Library, tmp_path: Path) -> None:
    """Whatever people call a snapshot is in its manifest alone."""
    for name in ("../../evil", "/etc/passwd", "a/b", "", ".", "\0", "CON", "ü" * 300):
        made = library.write(material(1), MODEL, about(name))
        assert library.manifest(made.id).about.name == name
    assert {path.name for path in tmp_path.iterdir()} == {"snapshots"}
    assert {path.parent.parent for path in files(library)} == {library.folder / "kept"}


def test_files_and_folders_are_private(library: Library) -> None:
    library.write(material(1, runs=(run(1),)), MODEL, about())
    for at, _, names in os.walk(library.folder):
        assert stat.S_IMODE(Path(at).stat().st_mode) == 0o700
        assert {stat.S_IMODE((Path(at) / name).stat().st_mode) for name in names} <= {0o600}


def test_strange_files_are_left_alone(library: Library) -> None:
    (library.folder / "kept" / ".DS_Store").write_bytes(b"x")
    (library.folder / "runs" / "notes.txt").write_bytes(b"x")
    library.close()
    assert [path.name for path in files(Library(library.folder))] == [".DS_Store", "notes.txt"]


# ---------------------------------------------------------------- room


def test_the_oldest_automatic_ones_make_room(tmp_path: Path) -> None:
    library = Library(tmp_path / "a", Limits(count_max=3, free_min_bytes=0))
    named = library.write(material(1), MODEL, about("named", at=0))
    old, new = (library.write(material(n), MODEL, about(at=n, automatic=True)) for n in (5, 6))
    last = library.write(material(7), MODEL, about("another", at=7))
    assert set(library.entries) == {named.id, new.id, last.id}
    assert not (library.folder / "kept" / old.id).exists()
    library.write(material(8), MODEL, about("a third", at=8))
    before = files(library)
    with pytest.raises(NoRoom, match="there can be 3 snapshots"):
        library.write(material(9), MODEL, about(at=9, automatic=True))
    assert files(library) == before
    replaced = library.write(material(9), MODEL, about("named", at=9), replaces=named.id)
    assert replaced.id in library.entries


def test_the_floor_of_free_space_is_kept(tmp_path: Path) -> None:
    free = 10_000
    library = Library(tmp_path / "a", Limits(free_min_bytes=8_000), lambda _: free - library.used_bytes)
    one = library.write(material(1), MODEL, about(automatic=True))
    with pytest.raises(NoRoom) as caught:
        library.write(material(2, length=100), MODEL, about())
    assert caught.value.short_bytes > 0
    assert list(library.entries) == [one.id]
    library.write(material(3), MODEL, about())
    assert one.id not in library.entries


def test_room_is_not_made_of_the_runs_that_are_needed(tmp_path: Path) -> None:
    library = Library(tmp_path / "a", Limits(count_max=1, free_min_bytes=0))
    library.write(material(1, runs=(run(1), run(2, start=11))), MODEL, about(automatic=True))
    whole = material(2, runs=(run(1),))
    made = library.write(whole, MODEL, about(automatic=True))
    assert plain_of(library.read(made.id, EXPECTED)) == plain_of_material(whole)
    assert runs(library) == {made.runs[0].digest}


# ---------------------------------------------------------------- carried


def test_a_snapshot_is_carried_in_one_file(library: Library, tmp_path: Path) -> None:
    whole = material(1, runs=(run(1), run(2, start=11)))
    made = library.write(whole, MODEL, about("theirs"))
    out = BytesIO()
    assert carried.export(library, made.id, out) == len(out.getvalue())
    others = Library(tmp_path / "others")
    for owner in ("one", "two"):
        out.seek(0)
        taken = carried.take_in(others, out, about(owner))
        assert taken.id != made.id
        assert taken.about == about(owner)
        assert plain_of(others.read(taken.id, EXPECTED)) == plain_of_material(whole)
    assert runs(others) == runs(library)
    others.close()
    assert len(Library(others.folder).entries) == 2


# ---------------------------------------------------------------- in which order


def test_names_come_after_bytes(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """B44: a file is synced before its folder, that before it is moved, and both ends of a move after it."""
    done: list[tuple[str, Path]] = []

    def told(what: str) -> None:
        real = getattr(durable, what)

        def wrapped(path: Path, *rest: object) -> object:
            answer = real(path, *rest)
            done.append((what, Path(path).relative_to(library.folder)))
            return answer

        monkeypatch.setattr(durable, what, wrapped)

    one = library.write(material(1), MODEL, about())
    for what in ("write", "move", "sync_folder", "remove"):
        told(what)
    made = library.write(material(2, runs=(run(1),)), MODEL, about(), replaces=one.id)
    new, kept, shared = Path("new"), Path("kept"), Path("runs")
    digest = made.runs[0].digest
    assert done == [
        ("write", new / digest),
        ("sync_folder", shared),
        ("sync_folder", new),
        ("move", new / digest),
        *[("write", new / made.id / name) for name in ("tokens", "chat", "tail.safetensors", "manifest")],
        ("sync_folder", new / made.id),
        ("sync_folder", kept),
        ("sync_folder", new),
        ("move", new / made.id),
        ("sync_folder", new),
        ("sync_folder", kept),
        ("move", kept / one.id),
        ("remove", new / one.id),
    ]


def test_every_file_is_synced(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []

    def sync(descriptor: int) -> None:
        place = f"/proc/self/fd/{descriptor}"
        synced.append(Path(os.readlink(place)))

    if not sys.platform.startswith("linux"):
        pytest.skip("paths of descriptors are read from /proc")
    monkeypatch.setattr(durable, "sync", sync)
    library.write(material(2, runs=(run(1),)), MODEL, about())
    assert len([path for path in synced if path.suffix or path.name in ("tokens", "chat", "manifest")]) == 4
    assert len([path for path in synced if len(path.name) == 64]) == 1


@pytest.mark.parametrize(
    ("what", "nth"), [*(("rename", n) for n in range(3)), *(("sync_folder", n) for n in range(7))]
)
def test_a_disk_that_fails_once_leaves_nothing_in_the_way(
    library: Library, monkeypatch: pytest.MonkeyPatch, what: str, nth: int
) -> None:
    """Whichever of the names that a snapshot of two runs is given, or of the syncs behind them."""
    old = library.write(material(1, runs=(run(1),)), MODEL, about())
    before = list(files(library))
    place = os if what == "rename" else durable
    real, calls = getattr(place, what), list[object]()

    def failing(*paths: Path) -> None:
        calls.append(paths)
        if len(calls) == nth + 1:
            raise OSError(28, "No space left on device")
        real(*paths)

    new = material(2, runs=(run(2), run(3, start=11)))
    monkeypatch.setattr(place, what, failing)
    with pytest.raises(OSError, match="No space"):
        library.write(new, MODEL, about(), replaces=old.id)
    monkeypatch.undo()
    assert files(library) == before
    made = library.write(new, MODEL, about(), replaces=old.id)
    library.close()
    again = Library(library.folder)
    assert list(again.entries) == [made.id]
    assert plain_of(again.read(made.id, EXPECTED)) == plain_of_material(new)


def test_what_writes_loads_no_mlx() -> None:
    """B46: a writer's thread or process has nothing to touch the device with."""
    program = "import sys, stateroom.caches.snapshots.carried as c, stateroom.caches.snapshots.fingerprint\n"
    program += "print([name for name in sys.modules if name.split('.')[0] in ('mlx', 'numpy')], c.MAGIC)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[] ")


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
dtypes = st.sampled_from(sorted(ITEM_BYTES))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.text(max_size=9), dtypes, shapes), max_size=6, unique_by=lambda each: each[0]))
def test_tensors_of_any_type_and_shape(drawn: list[tuple[str, str, tuple[int, ...]]]) -> None:
    """Single values, and tensors of nothing, among them."""
    tail = tuple(
        Plain(name, dtype, shape, os.urandom(prod(shape) * ITEM_BYTES[dtype])) for name, dtype, shape in drawn
    )
    with TemporaryDirectory() as folder:
        library = Library(Path(folder))
        made = library.write(replace(material(1), tail=tail), MODEL, about())
        assert library.read(made.id, EXPECTED).tail == tail
        library.close()


def test_what_is_removed_while_it_is_read_is_missing(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It isn't corrupt; nobody is to be told that the disk fails."""
    made = library.write(material(1), MODEL, about())
    real, asked = durable.read, 0

    def read(path: Path, most: int, exactly: int | None = None) -> bytes:
        nonlocal asked
        asked += 1
        if asked == 3:
            library.remove(made.id)
        return real(path, most, exactly)

    monkeypatch.setattr(durable, "read", read)
    with pytest.raises(Missing):
        library.read(made.id, EXPECTED)
    assert asked >= 3
