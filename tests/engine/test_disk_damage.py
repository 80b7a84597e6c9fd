"""Snapshots that can't be used: named and refused, or computed from tokens instead; nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.harness import Bench
from tests.tiny import make_tiny_model

from stateroom.caches.snapshots.limits import Limits
from stateroom.client import protocol as p
from stateroom.daemon.engine.model import LoadedModel

LENGTH = 200
PROMPT = [(13 * k) % 200 for k in range(LENGTH)]
FILES = ("manifest", "tokens", "chat", "tail.safetensors", "run")


def forked(bench: Bench) -> str:
    """A session with a trunk and some tokens of its own."""
    body = bench.call(p.Fork(session=bench.open(PROMPT)))
    assert isinstance(body, p.ForkResult)
    bench.call(p.Prefill(session=body.sessions[0], tokens=[1, 2, 3]))
    return body.sessions[0]


def parked(bench: Bench, session: str) -> str:
    body = bench.call(p.Park(session=session))
    assert isinstance(body, p.ParkResult), body
    assert body.tier == "disk"
    return bench.session(session).snapshot or ""


def saved(bench: Bench, session: str) -> str:
    before = set(bench.shelved)
    body = bench.finish(bench.start(p.Save(session=session, snapshot="mine")))
    assert isinstance(body, p.SaveResult), body
    (made,) = bench.shelved.keys() - before
    return made


def refused(bench: Bench, request: p.Request, snapshot: str | None = None) -> p.ErrorBody:
    """Nothing was changed by it."""
    sessions, held, shelved = set(bench.engine.sessions), bench.engine.kv_bytes, dict(bench.shelved)
    body = bench.finish(bench.start(request, snapshot=snapshot))
    assert isinstance(body, p.ErrorBody), body
    assert (set(bench.engine.sessions), bench.engine.kv_bytes) == (sessions, held)
    assert bench.shelved == shelved
    return body


def flip(folder: Path, snapshot: str, name: str, seed: int = 0) -> None:
    """One bit of a file of a snapshot."""
    path = folder / "kept" / snapshot / name
    if name == "run":
        (path,) = (folder / "runs").iterdir()
    content = bytearray(path.read_bytes())
    at = random.Random(seed).randrange(8 * len(content))
    content[at // 8] ^= 1 << (at % 8)
    path.write_bytes(content)


def cut(folder: Path, snapshot: str, name: str) -> None:
    path = folder / "kept" / snapshot / name
    if name == "run":
        (path,) = (folder / "runs").iterdir()
    path.write_bytes(path.read_bytes()[:-1])


def take_away(folder: Path, snapshot: str, name: str) -> None:
    path = folder / "kept" / snapshot / name
    if name == "run":
        (path,) = (folder / "runs").iterdir()
    path.unlink()


DAMAGES: tuple[Callable[[Path, str, str], None], ...] = (flip, cut, take_away)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named(
    loaded: LoadedModel, tmp_path: Path, name: str, damage: Callable[[Path, str, str], None]
) -> None:
    bench = Bench(loaded, folder=tmp_path)
    session = forked(bench)
    snapshot = saved(bench, session)
    for other in list(bench.engine.sessions):
        bench.call(p.Close(session=other))  # else the run needn't be read
    damage(tmp_path, snapshot, name)
    body = refused(bench, p.Restore(snapshot="mine"), snapshot)
    assert body.code == "corrupt"
    assert body.details["file"].split()[0] == name
    assert str(tmp_path) not in str(body)
    assert bench.incidents == []


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", FILES)
def test_a_parked_session_with_a_damaged_file_is_computed(
    loaded: LoadedModel, tmp_path: Path, name: str, damage: Callable[[Path, str, str], None]
) -> None:
    bench = Bench(loaded, folder=tmp_path)
    session = forked(bench)
    snapshot = parked(bench, session)
    bench.call(p.Close(session="s1"))
    damage(tmp_path, snapshot, name)
    body = bench.call(p.Prefill(session=session, tokens=[5]))
    assert isinstance(body, p.LengthResult)
    assert body.receipt.why is not None
    assert name in body.receipt.why
    assert (body.receipt.reused, body.receipt.prefilled) == (0, LENGTH + 4)
    bench.check_law(session)
    bench.idle()
    assert not bench.shelved  # nobody will want it again
    bench.check_law(session)
    parked(bench, session)  # a run that went bad is written anew
    body = bench.call(p.Prefill(session=session, tokens=[6]))
    assert isinstance(body, p.LengthResult)
    assert (body.receipt.source, body.receipt.reused) == ("snapshot", LENGTH + 4)
    bench.check_law(session)


@pytest.mark.parametrize("part", ["weights", "config", "tokenizer", "dtype"])
def test_another_model_is_told_by_part(loaded: LoadedModel, tmp_path: Path, part: str) -> None:
    bench = Bench(loaded, folder=tmp_path)
    session = bench.open(PROMPT)
    named, own = saved(bench, session), parked(bench, session)
    tokens = bench.journal[session]
    bench.close()
    other = Bench(loaded, folder=tmp_path, model={**bench_model(), part: "another"})
    body = refused(other, p.Restore(snapshot="mine"), named)
    assert body.code == "mismatch"
    assert (body.details["part"], body.details["here"]) == (part, "another")
    other.adopt("s", tokens, snapshot=own)
    computed = other.call(p.Prefill(session="s", tokens=[4]))
    assert isinstance(computed, p.LengthResult)
    assert (computed.receipt.reused, computed.receipt.source) == (0, "none")
    assert part in (computed.receipt.why or "")
    other.check_law("s")


def bench_model() -> dict[str, str]:
    return {"weights": "w", "config": "c", "tokenizer": "t", "dtype": "float32"}


def test_other_layers_are_refused(tmp_path: Path) -> None:
    """Fingerprints as equal as can be; the blueprint tells them apart."""
    bench = Bench(make_tiny_model(layers=2), folder=tmp_path)
    named = saved(bench, bench.open(PROMPT))
    bench.close()
    other = Bench(make_tiny_model(layers=4), folder=tmp_path)
    body = refused(other, p.Restore(snapshot="mine"), named)
    assert (body.code, body.details["part"]) == ("mismatch", "layers")


def test_what_is_not_there_is_not_found(loaded: LoadedModel, tmp_path: Path) -> None:
    bench = Bench(loaded, folder=tmp_path)
    body = refused(bench, p.Restore(snapshot="mine"), "0" * 32)
    assert (body.code, body.field) == ("not_found", "snapshot")


def test_a_full_disk_refuses_with_figures(loaded: LoadedModel, tmp_path: Path) -> None:
    bench = Bench(loaded, folder=tmp_path, limits=Limits(bytes_max=5000, free_min_bytes=0))
    session = bench.open(PROMPT)
    for request in (p.Save(session=session, snapshot="mine"), p.Park(session=session)):
        body = refused(bench, request)
        assert body.code == "capacity"
        assert body.details["needed_bytes"] > body.details["free_bytes"]
    bench.check_law(session)
    assert bench.decode(session, 3, ignore_eos=True).tokens


def test_a_disk_that_fails_is_an_incident(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(loaded, folder=tmp_path)
    session = bench.open(PROMPT)
    assert bench.engine.disk is not None

    def write(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(bench.engine.disk.library, "write", write)
    for request in (p.Save(session=session, snapshot="mine"), p.Park(session=session)):
        body = refused(bench, request)
        assert (body.code, len(bench.incidents)) == ("internal", 1)
        bench.incidents.clear()
    bench.check_law(session)


def test_restoring_needs_room_in_memory(loaded: LoadedModel, tmp_path: Path) -> None:
    bench = Bench(loaded, folder=tmp_path)
    named = saved(bench, bench.open(PROMPT))
    bench.close()
    other = Bench(loaded, folder=tmp_path, kv_budget_bytes=1000)
    body = refused(other, p.Restore(snapshot="mine"), named)
    assert body.code == "capacity"
    assert body.details["needed_bytes"] > 1000
