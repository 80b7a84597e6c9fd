"""Park, save, restore, import, and sessions that another engine takes over with what was kept of them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from tests.engine.harness import Bench
from tests.tiny import make_tiny_model

from stateroom.caches.snapshots import carried
from stateroom.client import protocol as p
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.link import ChatTurn, Discard

PROMPT = [(13 * k) % 200 for k in range(120)]
ARCHITECTURES = ("llama", "gemma3_text", "lfm2", "falcon_h1", "mamba")
SCHEMES = (
    None,
    p.KV(scheme="affine8", group_size=32),
    p.KV(scheme="turbo"),
    p.KV(scheme="affine8", group_size=32, quantise_after=50),
)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def every(request: pytest.FixtureRequest) -> LoadedModel:
    """A tiny model of each kind of layer."""
    return make_tiny_model(request.param)


@pytest.fixture(scope="module")
def wide() -> LoadedModel:
    """With heads that can be quantised."""
    return make_tiny_model("llama", width=256)


def parked(bench: Bench, session: str) -> p.ParkResult:
    body = bench.call(p.Park(session=session))
    assert isinstance(body, p.ParkResult), body
    return body


def saved(bench: Bench, session: str, name: str = "mine", replaces: str | None = None) -> str:
    """The id that it has."""
    before = set(bench.shelved)
    body = bench.finish(bench.start(p.Save(session=session, snapshot=name), snapshot=replaces))
    assert isinstance(body, p.SaveResult), body
    (made,) = bench.shelved.keys() - before
    kept = bench.shelved[made]
    assert (kept.name, kept.length, kept.nbytes) == (name, body.tokens, body.bytes)
    return made


def restored(bench: Bench, snapshot: str) -> p.OpenResult:
    body = bench.finish(bench.start(p.Restore(snapshot="mine"), snapshot=snapshot))
    assert isinstance(body, p.OpenResult), body
    return body


def prefilled(bench: Bench, session: str, *tokens: int) -> p.Receipt:
    body = bench.call(p.Prefill(session=session, tokens=list(tokens)))
    assert isinstance(body, p.LengthResult), body
    return body.receipt


# ---------------------------------------------------------------- park


def test_a_parked_session_comes_back_from_disk(every: LoadedModel, tmp_path: Path) -> None:
    bench = Bench(every, folder=tmp_path)
    session = bench.open(PROMPT)
    drawn = bench.decode(session, 8, ignore_eos=True).tokens
    held = bench.engine.kv_bytes
    body = parked(bench, session)
    assert (body.tier, body.length) == ("disk", len(PROMPT) + 8)
    assert body.bytes > 0
    assert (body.freed_bytes, bench.engine.kv_bytes) == (held, 0)
    assert parked(bench, session).bytes == body.bytes
    computed = bench.engine.filling.tokens
    receipt = prefilled(bench, session, 5)
    assert (receipt.source, receipt.reused, receipt.prefilled) == ("snapshot", len(PROMPT) + 8, 1)
    assert receipt.why is None
    assert bench.engine.filling.tokens == computed + 1
    bench.check_law(session)
    alone = Bench(every)
    twin = alone.open(PROMPT)
    assert alone.decode(twin, 8, ignore_eos=True).tokens == drawn
    prefilled(alone, twin, 5)
    assert bench.decode(session, 8, ignore_eos=True).tokens == alone.decode(twin, 8, ignore_eos=True).tokens
    bench.check_law(session)


@pytest.mark.parametrize("kv", SCHEMES, ids=str)
def test_every_scheme_comes_back(wide: LoadedModel, tmp_path: Path, kv: p.KV | None) -> None:
    bench = Bench(wide, folder=tmp_path)
    session = bench.open(PROMPT, kv=kv)
    before = bench.next_logits(session)
    parked(bench, session)
    bench.call(p.Prefill(session=session, tokens=[]))
    assert bench.session(session).stored == len(PROMPT) - 1
    assert (bench.next_logits(session) == before).all()
    snapshot = saved(bench, session)
    other = restored(bench, snapshot)
    assert other.caps.kv == bench.session(session).served.caps.kv
    assert (bench.next_logits(other.session) == before).all()
    bench.check_law(other.session)


def test_without_a_disk_tokens_stay(loaded: LoadedModel) -> None:
    bench = Bench(loaded)
    session = bench.open(PROMPT)
    body = parked(bench, session)
    assert (body.tier, body.bytes) == ("tokens", 0)
    assert bench.engine.kv_bytes == 0
    assert prefilled(bench, session, 3).source == "none"
    bench.check_law(session)
    refused = bench.call(p.Save(session=session, snapshot="mine"))
    assert isinstance(refused, p.ErrorBody)
    assert refused.code == "unsupported"


@pytest.mark.parametrize("operation", ["trim", "sync", "fork", "score", "decode"])
def test_operations_on_a_parked_session(every: LoadedModel, tmp_path: Path, operation: str) -> None:
    bench = Bench(every, folder=tmp_path)
    session = bench.open(PROMPT)
    parked(bench, session)
    if operation == "trim":
        bench.call(p.Trim(session=session, to=70, replay=True))
    elif operation == "sync":
        bench.call(p.Sync(session=session, tokens=[*PROMPT[:100], 7, 8, 9]))
    elif operation == "fork":
        body = bench.call(p.Fork(session=session))
        assert isinstance(body, p.ForkResult)
        bench.check_law(body.sessions[0])
        assert bench.session(body.sessions[0]).snapshot is None
    elif operation == "score":
        assert isinstance(bench.call(p.Score(session=session, tokens=[1, 2])), p.ScoreResult)
    else:
        assert len(bench.decode(session, 4, ignore_eos=True).tokens) == 4
    bench.check_law(session)
    assert bench.incidents == []


def test_what_is_left_of_a_snapshot_is_used(loaded: LoadedModel, tmp_path: Path) -> None:
    bench = Bench(loaded, folder=tmp_path)
    session = bench.open(PROMPT)
    parked(bench, session)
    bench.call(p.Trim(session=session, to=90))
    body = bench.call(p.Sync(session=session, tokens=[*PROMPT[:60], 1, 2, 3]))
    assert isinstance(body, p.LengthResult)
    assert (body.receipt.source, body.receipt.reused, body.receipt.prefilled) == ("snapshot", 60, 3)
    bench.check_law(session)


# ---------------------------------------------------------------- save, restore


def test_a_saved_session_is_restored_beside_the_other(every: LoadedModel, tmp_path: Path) -> None:
    bench = Bench(every, folder=tmp_path)
    session = bench.open(PROMPT)
    snapshot = saved(bench, session)
    bench.decode(session, 4, ignore_eos=True)
    body = restored(bench, snapshot)
    assert body.length == len(PROMPT)
    assert body.receipt is not None
    assert (body.receipt.source, body.receipt.reused) == ("snapshot", len(PROMPT) - 1)
    bench.check_law(body.session)
    bench.check_law(session)
    saved(bench, session, "mine", snapshot)
    assert len(bench.shelved) == 1


def test_chat_and_missing_kv_are_kept_too(every: LoadedModel, tmp_path: Path) -> None:
    """A session without KV is computed before it is saved, so that a restore needn't."""
    bench = Bench(every, folder=tmp_path)
    said = [ChatTurn([p.Message(role="user", content="Where?")], 40)]
    bench.adopt("s", PROMPT, chat=said)
    snapshot = saved(bench, "s")
    bench.close()
    other = Bench(every, folder=tmp_path)
    body = restored(other, snapshot)
    assert body.receipt is not None
    assert body.receipt.prefilled == 1
    assert other.chat[body.session] == said
    other.check_law(body.session)


def test_an_empty_session_is_not_saved(loaded: LoadedModel, tmp_path: Path) -> None:
    bench = Bench(loaded, folder=tmp_path)
    refused = bench.call(p.Save(session=bench.open(), snapshot="mine"))
    assert isinstance(refused, p.ErrorBody)
    assert refused.code == "invalid"


def test_trunks_are_shared_on_disk_and_again_in_memory(tmp_path: Path) -> None:
    loaded = make_tiny_model(context=2048)
    bench = Bench(loaded, folder=tmp_path)
    long = [(7 * k) % 200 for k in range(600)]
    session = bench.open(long)
    body = bench.call(p.Fork(session=session, n=3))
    assert isinstance(body, p.ForkResult)
    for n, child in enumerate(body.sessions):
        prefilled(bench, child, n, n, n)
        parked(bench, child)
    first, *others = (bench.shelved[bench.session(child).snapshot or ""] for child in body.sessions)
    assert all(other.nbytes > 0.9 * first.nbytes for other in others)  # each tells of all that it names
    library = bench.engine.disk.library if bench.engine.disk is not None else None
    assert library is not None
    assert library.used_bytes < 1.5 * first.nbytes
    parked(bench, session)
    held = []
    for child in body.sessions:
        prefilled(bench, child, 9)
        bench.check_law(child)
        held.append(bench.engine.kv_bytes)
    assert held[2] < 1.5 * held[0]


# ---------------------------------------------------------------- another engine


def test_an_adopted_session_begins_with_its_snapshot(every: LoadedModel, tmp_path: Path) -> None:
    bench = Bench(every, folder=tmp_path)
    session = bench.open(PROMPT)
    parked(bench, session)
    snapshot = bench.session(session).snapshot
    bench.close()
    other = Bench(every, folder=tmp_path)
    assert list(other.shelved) == [snapshot]
    other.adopt(session, [*PROMPT, 4, 5, 6], snapshot=snapshot)
    receipt = prefilled(other, session, 7)
    assert (receipt.source, receipt.reused) == ("snapshot", len(PROMPT) - 1)
    other.check_law(session)


def test_tokens_that_came_after_the_snapshot_was_cut_are_computed(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    """The journal is the truth: what the snapshot has of other tokens isn't used."""
    bench = Bench(loaded, folder=tmp_path)
    session = bench.open(PROMPT)
    parked(bench, session)
    snapshot = bench.session(session).snapshot
    bench.close()
    other = Bench(loaded, folder=tmp_path)
    tokens = [*PROMPT[:80], *(9 for _ in range(60))]
    other.adopt(session, tokens, snapshot=snapshot)
    receipt = prefilled(other, session, 7)
    assert (receipt.source, receipt.reused) == ("snapshot", 80)
    other.check_law(session)
    assert parked(other, session).tier == "disk"
    assert other.session(session).snapshot != snapshot


def test_a_snapshot_that_is_gone_is_told(loaded: LoadedModel, tmp_path: Path) -> None:
    bench = Bench(loaded, folder=tmp_path)
    bench.adopt("s", PROMPT, snapshot="0" * 32)
    assert bench.session("s").snapshot is None
    assert prefilled(bench, "s", 7).source == "none"


def test_discarded_ones_go(loaded: LoadedModel, tmp_path: Path) -> None:
    bench = Bench(loaded, folder=tmp_path)
    session = bench.open(PROMPT)
    named = saved(bench, session)
    parked(bench, session)
    bench.commands.take(Discard([named, bench.session(session).snapshot or "", "0" * 32]))
    bench.idle()
    assert not bench.shelved
    assert bench.session(session).snapshot is None
    assert prefilled(bench, session, 7).source == "none"
    bench.check_law(session)


# ---------------------------------------------------------------- carried


def test_a_carried_file_becomes_a_snapshot(every: LoadedModel, tmp_path: Path) -> None:
    bench = Bench(every, folder=tmp_path / "here")
    session = bench.open(PROMPT)
    snapshot = saved(bench, session)
    assert bench.engine.disk is not None
    file = io.BytesIO()
    carried.export(bench.engine.disk.library, snapshot, file)
    path = tmp_path / "carried"
    path.write_bytes(file.getvalue())
    other = Bench(every, folder=tmp_path / "there")
    total = len(file.getvalue())
    request = p.Import(snapshot="theirs", total=total, data=b"last")
    body = other.finish(other.start(request, owner="b", snapshot=str(path)))
    assert isinstance(body, p.ImportResult)
    assert body.received == total
    assert body.snapshot is not None
    assert (body.snapshot.snapshot, body.snapshot.length) == ("theirs", len(PROMPT))
    (made,) = other.shelved
    assert other.shelved[made].owner == "b"
    other.check_law(restored(other, made).session)
    path.write_bytes(file.getvalue()[:-1] + bytes([file.getvalue()[-1] ^ 1]))
    refused = other.finish(other.start(request, owner="b", snapshot=str(path)))
    assert isinstance(refused, p.ErrorBody)
    assert refused.code == "corrupt"
    assert list(other.shelved) == [made]
