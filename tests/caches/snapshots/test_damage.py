"""Whatever happens to a byte of a snapshot: it is refused, and the file is named. Without mlx."""

from __future__ import annotations

import json
import random
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.caches.snapshots.material import EXPECTED, MODEL, about, files, material, run

from stateroom.caches.snapshots import carried, manifest
from stateroom.caches.snapshots.library import Library
from stateroom.caches.snapshots.manifest import MAGIC
from stateroom.caches.snapshots.refusals import Corrupt, Mismatch
from stateroom.caches.snapshots.tensors import digest_of

SLOW_FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
FLIPS = 400


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "snapshots")


@pytest.fixture
def saved(library: Library) -> str:
    return library.write(material(3, runs=(run(1), run(2, 6, 11))), MODEL, about("a name")).id


def assert_refused(library: Library, snapshot: str, file: Path) -> None:
    with pytest.raises(Corrupt) as caught:
        library.read(snapshot, EXPECTED)
    assert Path(caught.value.file) == file


@SLOW_FIXTURE
@given(data=st.data())
def test_bits_that_flip_are_found(library: Library, saved: str, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(files(library)))
    before = file.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(before) - 1))
    flipped = bytearray(before)
    flipped[bit // 8] ^= 1 << bit % 8
    try:
        file.write_bytes(flipped)
        assert_refused(library, saved, file)
    finally:
        file.write_bytes(before)
    library.read(saved, EXPECTED)


def test_every_byte_of_every_file_is_covered(library: Library, saved: str) -> None:
    """Where headers, padding and tensors meet too: every byte of the small files, many of the others."""
    for file in files(library):
        before = file.read_bytes()
        places = (
            range(len(before)) if len(before) < FLIPS else random.Random(5).sample(range(len(before)), FLIPS)
        )
        for place in places:
            file.write_bytes(before[:place] + bytes([before[place] ^ 0x20]) + before[place + 1 :])
            assert_refused(library, saved, file)
        file.write_bytes(before)
    library.read(saved, EXPECTED)


@SLOW_FIXTURE
@given(data=st.data())
def test_files_that_are_cut_or_longer_are_found(library: Library, saved: str, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(files(library)))
    before = file.read_bytes()
    length = data.draw(st.integers(0, len(before) + 9).filter(lambda n: n != len(before)))
    try:
        file.write_bytes((before + bytes(9))[:length])
        assert_refused(library, saved, file)
    finally:
        file.write_bytes(before)


def test_files_that_are_gone_or_no_files_are_found(library: Library, saved: str, tmp_path: Path) -> None:
    for file in files(library):
        before = file.read_bytes()
        file.unlink()
        assert_refused(library, saved, file)
        file.mkdir()
        assert_refused(library, saved, file)
        file.rmdir()
        (tmp_path / "elsewhere").write_bytes(before)
        file.symlink_to(tmp_path / "elsewhere")
        assert_refused(library, saved, file)
        file.unlink()
        file.write_bytes(before)
    library.read(saved, EXPECTED)


def test_files_that_changed_places_are_found(library: Library, saved: str) -> None:
    other = library.write(material(5, runs=(run(1),)), MODEL, about())
    kept = library.folder / "kept"
    for name in ("manifest", "tokens", "chat", "tail.safetensors"):
        before = (kept / saved / name).read_bytes()
        (kept / saved / name).write_bytes((kept / other.id / name).read_bytes())
        assert_refused(library, saved, kept / saved / name)
        (kept / saved / name).write_bytes(before)


# ---------------------------------------------------------------- manifests


def rewritten(file: Path, change: Any) -> None:
    """Another manifest with a checksum of its own, as a careless or hostile program would make it."""
    body = json.loads(file.read_bytes().partition(b"\n")[2])
    change(body)
    text = json.dumps(body).encode()
    file.write_bytes(MAGIC + digest_of(text).encode() + b"\n" + text)


def first_tensor(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["tail"][0]
    return found


LIES = [
    lambda body: body.update(surprise=1),
    lambda body: body.pop("facts"),
    lambda body: body.update(format="1"),
    lambda body: body.update(format=True),
    lambda body: body.update(id="../../elsewhere"),
    lambda body: body.update(id="0" * 32),
    lambda body: body.update(replaces="/etc/passwd"),
    lambda body: body.update(facts=[]),
    lambda body: body.update(runs=None),
    lambda body: body["about"].update(automatic="yes"),
    lambda body: body["about"].update(automatic=1),
    lambda body: body["about"].update(created_ms=-1),
    lambda body: body["about"].update(created_ms=1.5),
    lambda body: body["about"].update(owner=None),
    lambda body: body["facts"].update(length=2**60),
    lambda body: body["facts"].update(length=1.0),
    lambda body: body["facts"].update(length=None),
    lambda body: body["tokens"].update(nbytes=31),
    lambda body: body["tokens"].update(digest="x"),
    lambda body: body["fingerprint"].update(weights=1),
    lambda body: first_tensor(body).update(nbytes=10**12),
    lambda body: first_tensor(body).update(dtype="F80"),
    lambda body: first_tensor(body).update(dtype="BF16"),
    lambda body: first_tensor(body).update(shape=[10**9, 10**9]),
    lambda body: first_tensor(body).update(shape=[-1, -280]),
    lambda body: first_tensor(body).update(shape="1257"),
    lambda body: first_tensor(body).update(digest="../" * 21 + "x"),
    lambda body: first_tensor(body).update(name="0.1"),
    lambda body: body["runs"][0].update(store=-1),
    lambda body: body["runs"][0].update(length="11"),
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_is_read_strictly(library: Library, saved: str, lie: Any) -> None:
    """X4: no value is taken for one of another type."""
    file = library.folder / "kept" / saved / "manifest"
    rewritten(file, lie)
    assert_refused(library, saved, file)
    library.close()
    again = Library(library.folder)
    assert list(again.broken) == [saved]
    assert isinstance(again.broken[saved], Corrupt)


def test_lengths_that_lie_in_agreement_are_found_before_anything_is_read(
    library: Library, saved: str
) -> None:
    """A terabyte that isn't there is found before anything is read: the file's own length is asked first."""
    file = library.folder / "kept" / saved / "manifest"

    def lie(body: dict[str, Any]) -> None:
        first_tensor(body).update(shape=[10**6, 10**6], nbytes=4 * 10**12)

    rewritten(file, lie)
    assert_refused(library, saved, file.with_name("tail.safetensors"))


def test_a_newer_format_is_no_broken_one(library: Library, saved: str) -> None:
    """B47: refused by name, kept with all its runs, and removed only when that is asked for."""
    file = library.folder / "kept" / saved / "manifest"
    rewritten(file, lambda body: body.update(format=2, whatever=[None, 2.5]))
    with pytest.raises(Mismatch) as caught:
        library.read(saved, EXPECTED)
    assert (caught.value.part, caught.value.here, caught.value.there) == ("format", "1", "2")
    library.close()
    again = Library(library.folder)
    assert isinstance(again.broken[saved], Mismatch)
    other = again.write(material(8, runs=(run(8),)), MODEL, about())
    again.remove(other.id)
    assert len(list((library.folder / "runs").iterdir())) == 3  # what nobody understands may name any run
    again.remove(saved)
    assert files(again) == []


def test_other_fingerprints_are_named(library: Library, saved: str) -> None:
    for part in EXPECTED:
        with pytest.raises(Mismatch) as caught:
            library.read(saved, EXPECTED | {part: "another"})
        assert (caught.value.part, caught.value.here, caught.value.there) == (part, "another", EXPECTED[part])
    for expected in (EXPECTED | {"tokenizer": "t"}, {"weights": "w"}):
        with pytest.raises(Mismatch, match="not told"):
            library.read(saved, expected)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_manifest(content: bytes) -> None:
    """B76: nothing in them is run, whatever they are."""
    for whole in (content, MAGIC + content, MAGIC + digest_of(content).encode() + b"\n" + content):
        with pytest.raises((Corrupt, Mismatch)):
            manifest.decode(whole, "file")


@pytest.mark.parametrize(
    "body", [b'{"a":1,"a":2}', b'{"format":NaN}', b"[" * 100_000, b"null", b"[]", b"\xff"]
)
def test_json_that_means_two_things(body: bytes) -> None:
    with pytest.raises(Corrupt):
        manifest.decode(MAGIC + digest_of(body).encode() + b"\n" + body, "file")


# ---------------------------------------------------------------- a file to carry


def test_a_carried_file_is_refused_from_its_first_byte_to_its_last(
    library: Library, saved: str, tmp_path: Path
) -> None:
    into = Library(tmp_path / "others")
    out = BytesIO()
    carried.export(library, saved, out)
    whole, drawn = out.getvalue(), random.Random(7)
    damaged = [whole[:n] for n in drawn.sample(range(len(whole)), 60)] + [whole + b"\0", b""]
    for _ in range(FLIPS):
        place = drawn.randrange(len(whole))
        damaged.append(whole[:place] + bytes([whole[place] ^ 1 << drawn.randrange(8)]) + whole[place + 1 :])
    for content in damaged:
        with pytest.raises(Corrupt, match="theirs"):
            carried.take_in(into, BytesIO(content), about(), "theirs")
    assert files(into) == []
    assert into.entries == {}
