"""Sessions of every kind of layer and codec to disk and back: the same bytes, the same next logits."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tests.caches.models import tiny
from tests.caches.sessions import model_of
from tests.caches.snapshots.material import about

from stateroom.caches import snapshot
from stateroom.caches.attention import install
from stateroom.caches.blueprint import Blueprint
from stateroom.caches.codecs.scheme import Scheme
from stateroom.caches.session import SessionCache
from stateroom.caches.snapshots.library import Library
from stateroom.caches.snapshots.materialise import materialise, materialising
from stateroom.caches.snapshots.refusals import Corrupt, Mismatch
from stateroom.caches.snapshots.saving import Restored, restore, save
from stateroom.caches.snapshots.trunks import Trunks

MODEL = {"weights": "w", "config": "c", "tokenizer": "t"}
SCHEMES = [
    Scheme(),
    Scheme("affine8"),
    Scheme("affine4", group_size=32),
    Scheme("turbo"),
    Scheme("affine8", quantise_after=12),
]
WIDE = ("llama_64", "llama_windows_64", "gpt_oss_64", "llama4_64", "qwen3_next_64")
CASES = [(name, scheme) for name in WIDE for scheme in SCHEMES]
CASES += [(name, SCHEMES[0]) for name in ("lfm2", "mamba2", "falcon_h1")]
LENGTHS = [0, 5, 45]  # before and after windows wrap


@cache
def blueprints(architecture: str, scheme: Scheme) -> tuple[Blueprint, Blueprint]:
    made = SessionCache.create(model_of(architecture), scheme)
    return made.blueprint, Blueprint.of(model_of(architecture))


def empty(architecture: str, scheme: Scheme = SCHEMES[0]) -> SessionCache:
    wanted, dense = blueprints(architecture, scheme)
    return SessionCache.empty(wanted, replace(dense))


def text(length: int, seed: int = 11) -> list[int]:
    return [(seed * k + seed) % 50 for k in range(length)]


def feed(session: SessionCache, model: Any, tokens: list[int]) -> None:
    for start in range(0, len(tokens), 7):
        session.forward(model, mx.array([tokens[start : start + 7]]))
        mx.eval(session.arrays())


def raw(session: SessionCache) -> tuple[dict[str, object], dict[str, bytes]]:
    taken = snapshot.take(session)
    arrays = {name: bytes(memoryview(mx.view(a, mx.uint8))) for name, a in taken.arrays.items()}
    return dict(taken.facts), arrays


def assert_goes_on_alike(one: SessionCache, other: SessionCache, model: Any) -> None:
    more = mx.array([[3, 1, 4]])
    got, want = (np.array(each.forward(model, more).astype(mx.float32)) for each in (one, other))
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    assert raw(one) == raw(other)


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "snapshots")


@pytest.mark.parametrize(("architecture", "scheme"), CASES)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_kind_comes_back_byte_for_byte(
    library: Library, architecture: str, scheme: Scheme, length: int
) -> None:
    """B41, B42: an empty session too; another process has other blueprints of the same layers."""
    model, tokens = model_of(architecture), text(length)
    session = empty(architecture, scheme)
    feed(session, model, tokens)
    before = raw(session)
    made = save(library, session, [*tokens, 9], MODEL, about("a"), Trunks(), chat=b"what was said")
    back = restore(library, made.id, empty(architecture, scheme), MODEL, Trunks())
    assert (back.tokens, back.chat, back.manifest) == ([*tokens, 9], b"what was said", made)
    assert (back.cache.offsets, back.cache.quantised) == (session.offsets, session.quantised)
    assert raw(back.cache) == before == raw(session)
    assert_goes_on_alike(back.cache, session, model)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("architecture", ["llama_windows_64", "lfm2"])
def test_halves_stay_halves(library: Library, architecture: str, dtype: mx.Dtype) -> None:
    """B46: bfloat16 passes through no other type on its way."""
    model = tiny(architecture)
    model.set_dtype(dtype)
    install(model)
    session = SessionCache.create(model)
    feed(session, model, text(45))
    made = save(library, session, text(45), MODEL, about(), Trunks())
    word = {mx.bfloat16: "BF16", mx.float16: "F16"}[dtype]
    assert word in {tensor.dtype for tensor in made.tail}
    back = restore(library, made.id, SessionCache.create(model), MODEL, Trunks())
    assert raw(back.cache) == raw(session)
    assert_goes_on_alike(back.cache, session, model)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_files_are_safetensors(library: Library, scheme: Scheme) -> None:
    """As mlx's own reader reads them."""
    session = empty("llama_64", scheme)
    feed(session, model_of("llama_64"), text(90))
    child = session.branch()
    made = save(library, child, text(90), MODEL, about(), Trunks())
    taken = materialise(child, text(90), Trunks())
    kept = library.folder / "kept" / made.id / "tail.safetensors"
    for path, tensors in [(kept, taken.tail)] + [
        (library.folder / "runs" / run.digest, plain.tensors)
        for run, plain in zip(made.runs, taken.runs, strict=True)
    ]:
        found = mx.load(str(path), format="safetensors")
        assert isinstance(found, dict)
        there = {name: bytes(memoryview(mx.view(a, mx.uint8))) for name, a in found.items()}
        assert there == {tensor.name: bytes(tensor.content) for tensor in tensors}
    assert len(made.runs) == 1


def test_a_session_is_never_there_twice() -> None:
    """On the device: copied a tensor at a time."""
    model, tokens = model_of("llama_64"), text(700)
    session = empty("llama_64")
    feed(session, model, tokens)
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    materialise(session, tokens, Trunks())
    assert 0 < mx.get_peak_memory() - before <= session.nbytes_live / 2
    assert len(session.arrays()) > 3


# ---------------------------------------------------------------- trunks


def family(
    architecture: str = "llama_64", scheme: Scheme = SCHEMES[0]
) -> list[tuple[SessionCache, list[int]]]:
    """A parent of a hundred tokens, children that went on, one cut back into the trunk, and a grandchild."""
    model, tokens = model_of(architecture), text(100)
    parent = empty(architecture, scheme)
    feed(parent, model, tokens)
    made = [(parent, tokens)]
    for seed in (3, 7):
        child, more = parent.branch(), text(70, seed)
        feed(child, model, more)
        made.append((child, tokens + more))
    shorter = parent.branch()
    shorter.trim(0, 12)
    feed(shorter, model, text(4, 13))
    grandchild = made[1][0].branch()
    feed(grandchild, model, text(5, 17))
    return [*made, (shorter, tokens[:88] + text(4, 13)), (grandchild, made[1][1] + text(5, 17))]


@pytest.mark.parametrize("scheme", SCHEMES[:4])
@pytest.mark.parametrize("architecture", ["llama_64", "qwen3_next_64"])
def test_trunks_are_stored_once_and_shared_again(library: Library, architecture: str, scheme: Scheme) -> None:
    model = model_of(architecture)
    sessions = family(architecture, scheme) if architecture == "llama_64" else []
    if not sessions:  # states can't be trimmed
        parent = empty(architecture, scheme)
        feed(parent, model, text(100))
        sessions = [(parent, text(100)), (parent.branch(), text(100))]
    trunks = Trunks()
    saved = [save(library, session, tokens, MODEL, about(), trunks) for session, tokens in sessions]
    runs = [run.digest for made in saved for run in made.runs]
    assert len(set(runs)) < len(runs)
    assert {path.name for path in (library.folder / "runs").iterdir()} == set(runs)
    again = Trunks()
    back = [restore(library, made.id, empty(architecture, scheme), MODEL, again) for made in saved]
    for restored, (session, tokens) in zip(back, sessions, strict=True):
        assert restored.tokens == tokens
        assert raw(restored.cache) == raw(session)
    assert back[0].cache.trunks == back[1].cache.trunks & back[0].cache.trunks != set()
    for restored, (session, _) in zip(back, sessions, strict=True):
        assert_goes_on_alike(restored.cache, session, model)


def test_of_a_trunk_only_what_is_in_view_is_stored(library: Library) -> None:
    """B31: the tokens that a session was trimmed by are in none of its files."""
    parent = empty("llama_64")
    feed(parent, model_of("llama_64"), text(100))
    shorter = parent.branch()
    shorter.trim(0, 30)
    made = save(library, shorter, text(70), MODEL, about(), Trunks())
    assert [(run.start, run.length) for run in made.runs] == [(0, 70)]
    assert {tensor.shape[2] for tensor in made.runs[0].tensors} == {70}
    assert made.tail == ()


def test_what_is_on_disk_is_neither_copied_nor_loaded_again(library: Library) -> None:
    (parent, tokens), *_ = family()
    trunks = Trunks()
    made = save(library, parent, tokens, MODEL, about(), trunks)
    material = materialise(parent, tokens, trunks)
    assert material.nbytes == 0
    child = parent.branch()
    alive = trunks.alive(made.runs)
    assert set(alive.values()) == parent.trunks == child.trunks
    content = library.read(made.id, made.fingerprint, alive)
    assert content.runs == (None,)
    back = restore(library, made.id, empty("llama_64"), MODEL, trunks)
    assert back.cache.trunks == parent.trunks


def test_a_run_that_was_removed_is_copied_again(library: Library) -> None:
    (parent, tokens), *_ = family()
    trunks = Trunks()
    first = save(library, parent, tokens, MODEL, about(), trunks)
    library.remove(first.id)
    assert list((library.folder / "runs").iterdir()) == []
    made = save(library, parent, tokens, MODEL, about(), trunks)
    back = restore(library, made.id, empty("llama_64"), MODEL, Trunks())
    assert raw(back.cache) == raw(parent)


def test_saving_and_restoring_hold_no_trunk(library: Library) -> None:
    """B51."""
    (parent, tokens), *_ = family()
    trunks = Trunks()
    made = save(library, parent, tokens, MODEL, about(), trunks)
    back: Restored | None = restore(library, made.id, empty("llama_64"), MODEL, trunks)
    del parent, _
    assert back is not None
    assert trunks.alive(made.runs)
    back = None
    assert trunks.alive(made.runs) == {}


# ---------------------------------------------------------------- refusals


def test_other_models_and_schemes_are_refused_by_name(library: Library) -> None:
    """B47: the part that differs is named, with both values; the cache that was to take it is as it was."""
    session = empty("llama_64", SCHEMES[1])
    feed(session, model_of("llama_64"), text(20))
    made = save(library, session, text(20), MODEL, about(), Trunks())

    def refused(target: SessionCache, model: dict[str, str]) -> Mismatch:
        with pytest.raises(Mismatch) as caught:
            restore(library, made.id, target, model, Trunks())
        assert target.offsets == (0,)
        return caught.value

    for part in MODEL:
        error = refused(empty("llama_64", SCHEMES[1]), MODEL | {part: "another"})
        assert (error.part, error.here, error.there) == (part, "another", MODEL[part])
    error = refused(empty("llama_64", SCHEMES[2]), MODEL)
    assert (error.part, error.here, error.there) == ("kv", "affine4, groups of 32", "affine8")
    assert refused(empty("llama_64", SCHEMES[4]), MODEL).part == "kv"
    assert refused(empty("llama_windows_64", SCHEMES[1]), MODEL).part == "layers"
    assert restore(library, made.id, empty("llama_64", SCHEMES[1]), MODEL, Trunks()).tokens == text(20)


LIES: list[dict[str, Any]] = [
    {"facts": {"length": 19}},
    {"facts": {"length": True}},
    {"facts": {"0.forgotten": 0}},
    {"facts": {"quantised": "True"}},
    {"facts": {"format": 2}},
    {"facts": {"0.signature": "another"}},
    {"runs": 0, "store": 1},
    {"runs": 0, "store": 99},
    {"runs": 0, "start": 1},
    {"runs": 0, "length": 99},
    {"runs": 0, "length": 0},
    {"tokens": 3},
]


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_is_whole_but_lies_is_corrupt(library: Library, lie: dict[str, Any]) -> None:
    """Checksums and all; whatever it tells, nothing is restored that isn't as long as it says."""
    _, (child, tokens), *_ = family()
    material = materialise(child, tokens, Trunks())
    if "facts" in lie:
        material = replace(material, facts=dict(material.facts) | lie["facts"])
    elif "tokens" in lie:
        material = replace(material, tokens=material.tokens[: lie["tokens"]])
    else:
        wrong = {name: value for name, value in lie.items() if name != "runs"}
        material = replace(material, runs=(replace(material.runs[0], **wrong), *material.runs[1:]))
    made = library.write(material, MODEL, about())
    with pytest.raises(Corrupt, match="manifest"):
        restore(library, made.id, empty("llama_64"), MODEL, Trunks())


def test_a_group_is_refused(library: Library) -> None:
    sessions = [empty("llama_64") for _ in range(2)]
    for session in sessions:
        feed(session, model_of("llama_64"), text(5))
    with pytest.raises(ValueError, match="KV of"):
        materialise(SessionCache.merge_rows(sessions), text(5), Trunks())


def test_in_steps_it_is_the_session_of_the_first_step(library: Library) -> None:
    """Whatever it does between the steps: goes on, is trimmed, branches."""
    model, trunks = model_of("qwen3_next_64"), Trunks()
    parent = empty("qwen3_next_64")
    feed(parent, model, text(100))
    session = parent.branch()
    feed(session, model, text(20, 3))
    before, tokens = raw(session), text(100) + text(20, 3)
    steps = materialising(session, tokens, trunks)
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as done:
            material = done.value
            break
        count += 1
        tokens.append(count)
        feed(session, model, [count])
        if count == 2:
            session.branch()
    assert count == len(material.tail) + len(material.runs[0].tensors)
    made = library.write(material, MODEL, about())
    back = restore(library, made.id, empty("qwen3_next_64"), MODEL, trunks)
    assert back.tokens == tokens[:120]
    assert raw(back.cache) == before


@pytest.mark.parametrize("architecture", ["llama_64", "lfm2"])
def test_tensors_that_the_model_does_not_make_are_corrupt(library: Library, architecture: str) -> None:
    """A file from elsewhere may have right checksums of anything; its shapes and types are the model's."""
    session, sample = empty(architecture), empty(architecture)
    feed(session, model_of(architecture), text(100))
    feed(sample, model_of(architecture), text(1))
    child = session.branch()
    whole = [materialise(each, text(100), Trunks()) for each in (session, child)]
    for material in whole:
        made = library.write(material, MODEL, about())
        restore(library, made.id, empty(architecture), MODEL, Trunks(), [sample])
    other = tiny(architecture)
    other.set_dtype(mx.bfloat16)
    install(other)
    strange = SessionCache.create(other)
    feed(strange, other, text(100))
    for each in (strange, strange.branch()):
        made = library.write(materialise(each, text(100), Trunks()), MODEL, about())
        with pytest.raises(Corrupt, match="doesn't make"):
            restore(library, made.id, empty(architecture), MODEL, Trunks(), [sample])
