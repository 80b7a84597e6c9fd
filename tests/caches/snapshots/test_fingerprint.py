"""A model is known by its content: what changes it changes a part by name, what doesn't changes nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import mlx.core as mx
import pytest
from tests.caches.models import tiny

from stateroom.caches.snapshots import durable
from stateroom.caches.snapshots.fingerprint import Digests, of_config, of_path
from stateroom.caches.snapshots.weights import of_model

LONG_AGO_NS = 10**18


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for name, content in {
        "model-1.safetensors": "weights",
        "model-2.safetensors": "more weights",
        "config.json": '{"rope_scaling": {"factor": 2.0}, "hidden_size": 8, "sliding_window": 16}',
        "tokenizer.json": "tokens",
        "chat_template.jinja": "template",
        "README.md": "words",
    }.items():
        written(made / name, content)
    return made


def written(path: Path, content: str, at_ns: int = LONG_AGO_NS) -> None:
    path.write_text(content)
    os.utime(path, ns=(at_ns, at_ns))


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {part for part in before if before[part] != after[part]}


@pytest.mark.parametrize(
    ("file", "content", "parts"),
    [
        ("model-2.safetensors", "more weightz", {"weights"}),
        ("model-3.safetensors", "", {"weights"}),
        (
            "config.json",
            '{"rope_scaling": {"factor": 4.0}, "hidden_size": 8, "sliding_window": 16}',
            {"config"},
        ),
        (
            "config.json",
            '{"rope_scaling": {"factor": 2.0}, "hidden_size": 8, "sliding_window": 32}',
            {"config"},
        ),
        ("config.json", '{"hidden_size": 8, "sliding_window": 16, "rope_scaling": {"factor": 2.0}}', set()),
        ("tokenizer.json", "tokenz", {"tokenizer"}),
        ("special_tokens_map.json", "{}", {"tokenizer"}),
        ("chat_template.jinja", "another", set()),
        ("README.md", "others", set()),
    ],
)
def test_what_changes_is_named(folder: Path, file: str, content: str, parts: set[str]) -> None:
    """B47."""
    before = of_path(folder, "float32")
    written(folder / file, content)
    assert changed(before, of_path(folder, "float32")) == parts
    assert changed(before, of_path(folder, "bfloat16")) == parts | {"dtype"}


def test_names_and_places_of_folders_do_not_matter(folder: Path, tmp_path: Path) -> None:
    before = of_path(folder, "float32")
    folder.rename(tmp_path / "elsewhere")
    assert of_path(tmp_path / "elsewhere", "float32") == before
    (tmp_path / "elsewhere" / "model-1.safetensors").rename(tmp_path / "elsewhere" / "model-9.safetensors")
    assert changed(before, of_path(tmp_path / "elsewhere", "float32")) == {"weights"}


def test_a_gguf_file_is_everything(tmp_path: Path) -> None:
    for name, content in {"a.gguf": "one", "b.gguf": "two"}.items():
        written(tmp_path / name, content)
    one, two = (of_path(tmp_path / name, "float32") for name in ("a.gguf", "b.gguf"))
    assert changed(one, two) == {"weights", "config", "tokenizer"}
    (tmp_path / "b.gguf").unlink()
    assert of_path(tmp_path, "float32") == one


def test_digests_are_remembered_by_size_time_and_inode(folder: Path, tmp_path: Path) -> None:
    kept, file = tmp_path / "home" / "digests.json", folder / "model-1.safetensors"
    first = Digests(kept).of(file)
    told = json.loads(kept.read_text())
    told[str(file.resolve())][-1] = "remembered"
    kept.write_text(json.dumps(told))
    assert Digests(kept).of(file) == "remembered"
    written(file, "WEIGHTS", LONG_AGO_NS + 1)
    assert Digests(kept).of(file) not in ("remembered", first)
    written(file, "weights and more", LONG_AGO_NS + 1)
    after = Digests(kept).of(file)
    other = folder / "other"
    written(other, "WEIGHTS and more", LONG_AGO_NS + 1)
    os.replace(other, file)
    assert Digests(kept).of(file) != after


def test_a_file_of_this_moment_is_not_remembered(folder: Path, tmp_path: Path) -> None:
    """It may change again and keep its size and time."""
    file = folder / "model-1.safetensors"
    file.write_text("fresh..")
    before = file.stat()
    digests = Digests(tmp_path / "digests.json")
    first = digests.of(file)
    file.write_text("FRESH..")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digests.of(file) != first


@pytest.mark.parametrize("content", [b"", b"no json", b"[]", b'{"x": 3}', b"[" * 100_000, None])
def test_what_cannot_be_remembered_is_read_again(folder: Path, tmp_path: Path, content: bytes | None) -> None:
    kept, file = tmp_path / "digests.json", folder / "model-1.safetensors"
    if content is None:
        kept.mkdir()
        kept = kept / "digests.json"
    else:
        kept.write_bytes(content)
    assert Digests(kept).of(file) == Digests().of(file) == Digests(kept).of(file)


def test_a_full_disk_keeps_no_model_from_being_known(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = folder / "model-1.safetensors"
    monkeypatch.setattr(durable, "write", write)
    digests = Digests(tmp_path / "digests.json")
    assert digests.of(file) == Digests().of(file) == digests.of(file)


def test_configurations_are_compared_by_what_layers_read() -> None:
    assert of_config({"a": 1, "b": [1.5]}) == of_config({"b": [1.5], "a": 1, "transformers_version": "5"})
    assert of_config({"a": 1}) != of_config({"a": "1"}) != of_config({"a": True})


def test_a_model_without_files_is_known_by_its_tensors() -> None:
    config = {"model_type": "llama"}
    before = of_model(tiny("llama"), config, b"tokens")
    assert of_model(tiny("llama"), config, b"tokens") == before
    other = tiny("llama")
    other.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    assert changed(before, of_model(other, config, b"tokens")) == {"weights"}
    half = tiny("llama")
    half.set_dtype(mx.bfloat16)
    assert changed(before, of_model(half, config, b"tokens")) == {"weights", "dtype"}
    assert changed(before, of_model(tiny("llama"), config, b"others")) == {"tokenizer"}
