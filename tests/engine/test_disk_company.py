"""The disk beside everything else: streams, cancels, stops, a budget, many at once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.engine.harness import Bench, greedy
from tests.tiny import make_tiny_model

from stateroom.client import protocol as p
from stateroom.daemon.engine.fetching import READ_MAX
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.link import Kept

PROMPT = [(13 * k) % 200 for k in range(200)]


def text(seed: int, length: int = 200) -> list[int]:
    return [(seed * k + seed) % 199 for k in range(length)]


@pytest.fixture
def bench(loaded: LoadedModel, tmp_path: Path) -> Bench:
    return Bench(loaded, folder=tmp_path)


class Gate:
    """Holds the thread of files until it is opened."""

    def __init__(self, bench: Bench) -> None:
        self._open = threading.Event()
        assert bench.engine.disk is not None
        bench.engine.disk.files.ask(self._open.wait, lambda _: None)

    def open(self) -> None:
        self._open.set()


def parked(bench: Bench, session: str) -> None:
    body = bench.call(p.Park(session=session))
    assert isinstance(body, p.ParkResult), body
    assert body.tier == "disk"


def saved(bench: Bench, session: str) -> str:
    before = set(bench.shelved)
    body = bench.finish(bench.start(p.Save(session=session, snapshot="mine")))
    assert isinstance(body, p.SaveResult), body
    (made,) = bench.shelved.keys() - before
    return made


# ---------------------------------------------------------------- cancelled


def test_a_fill_that_waits_for_the_disk_is_cancelled_at_once(bench: Bench) -> None:
    session = bench.open(PROMPT)
    parked(bench, session)
    gate = Gate(bench)
    rid = bench.start(p.Prefill(session=session, tokens=[1, 2]))
    for _ in range(3):
        assert not bench.engine.step()  # it waits, and keeps nobody awake
    bench.cancel(rid)
    while bench.final(rid) is None:
        bench.engine.step()
    body = bench.final(rid)
    assert isinstance(body, p.LengthResult)
    assert (body.finish, body.length) == ("cancelled", len(PROMPT))
    gate.open()
    bench.idle()
    bench.check_law(session)
    again = bench.call(p.Prefill(session=session, tokens=[1, 2]))
    assert isinstance(again, p.LengthResult)
    assert again.receipt.source == "snapshot"
    bench.check_law(session)


@pytest.mark.parametrize("turns", range(12))
def test_a_fill_is_cancelled_anywhere_on_its_way(bench: Bench, turns: int) -> None:
    session = bench.open(PROMPT)
    parked(bench, session)
    rid = bench.start(p.Decode(session=session, max_tokens=4, ignore_eos=True))
    for _ in range(turns):
        bench.turn()
    bench.cancel(rid)
    assert isinstance(bench.finish(rid), p.DecodeResult)
    bench.idle()
    bench.check_law(session)
    assert bench.engine.disk is not None
    assert not bench.engine.disk.busy


@pytest.mark.parametrize("operation", ["save", "park"])
def test_what_is_being_kept_is_kept_to_the_end(bench: Bench, operation: str) -> None:
    session = bench.open(PROMPT)
    gate = Gate(bench)
    made: p.Request = (
        p.Save(session=session, snapshot="mine") if operation == "save" else p.Park(session=session)
    )
    rid = bench.start(made)
    busy = bench.call(p.Prefill(session=session, tokens=[1]))
    assert isinstance(busy, p.ErrorBody)
    assert busy.code == "busy"
    bench.cancel(rid)
    gate.open()
    assert isinstance(bench.finish(rid), p.SaveResult | p.ParkResult)
    bench.check_law(session)


@pytest.mark.parametrize("turns", range(5))
def test_a_cancelled_save_keeps_what_there_is(bench: Bench, turns: int) -> None:
    """Its KV was missing: as much of it as was computed by then is in the snapshot, and all tokens."""
    bench.adopt("s", PROMPT)
    rid = bench.start(p.Save(session="s", snapshot="mine"))
    for _ in range(turns):
        bench.engine.step()
    bench.cancel(rid)
    saved_body = bench.finish(rid)
    assert isinstance(saved_body, p.SaveResult), saved_body
    assert saved_body.tokens == len(PROMPT)
    (snapshot,) = bench.shelved
    body = bench.finish(bench.start(p.Restore(snapshot="mine"), snapshot=snapshot))
    assert isinstance(body, p.OpenResult), body
    assert body.length == len(PROMPT)
    bench.check_law(body.session)
    bench.check_law("s")


def test_a_cancelled_restore_opens_an_empty_session(bench: Bench) -> None:
    snapshot = saved(bench, bench.open(PROMPT))
    rid = bench.start(p.Restore(snapshot="mine"), snapshot=snapshot)
    while not bench.engine.requests:
        bench.turn()
    bench.cancel(rid)
    body = bench.finish(rid)
    assert isinstance(body, p.OpenResult)
    assert (body.finish, body.length) == ("cancelled", 0)
    bench.call(p.Prefill(session=body.session, tokens=[4, 5]))
    bench.check_law(body.session)


def test_a_restore_is_cancelled_before_anything_was_read(bench: Bench) -> None:
    snapshot = saved(bench, bench.open(PROMPT))
    gate = Gate(bench)
    rid = bench.start(p.Restore(snapshot="mine"), snapshot=snapshot)
    bench.engine.step()
    bench.cancel(rid)
    gate.open()
    body = bench.finish(rid)
    assert isinstance(body, p.OpenResult)
    assert (body.finish, body.length) == ("cancelled", 0)
    bench.check_law(body.session)


def test_told_to_stop_everything_is_answered(bench: Bench, tmp_path: Path) -> None:
    """Also what the disk hasn't done; it answers nothing twice when it has."""
    sessions = [bench.open(text(n)) for n in range(1, 5)]
    snapshot = saved(bench, sessions[0])
    gate = Gate(bench)
    rids = [
        bench.start(p.Park(session=sessions[1])),
        bench.start(p.Save(session=sessions[2], snapshot="other")),
        bench.start(p.Restore(snapshot="mine"), snapshot=snapshot),
        bench.start(p.Import(snapshot="theirs", total=9, data=b"9"), snapshot=str(tmp_path / "not there")),
    ]
    for _ in range(20):
        bench.engine.step()
    bench.engine.cancel_all()
    bench.commands.snapshots.stop()
    for rid in rids:
        body = bench.final(rid)
        assert isinstance(body, p.ErrorBody)
        assert body.code == "shutting_down"
    gate.open()
    bench.idle()
    for session in sessions:
        bench.check_law(session)
    assert len(bench.engine.sessions) == len(sessions)


# ---------------------------------------------------------------- beside others


def test_a_stream_goes_on_beside_the_disk(tmp_path: Path) -> None:
    """Tokens come while others are kept and read; those are the tokens that would have come anyway."""
    bench = Bench(make_tiny_model(context=4096), folder=tmp_path)
    tokens = 2_000  # of which not all come before a slow disk has kept everything
    others = [bench.open(text(n)) for n in range(1, 5)]
    session = bench.open(PROMPT)
    rid = bench.start(p.Decode(session=session, max_tokens=tokens, ignore_eos=True, stream=True))
    for other in others:
        parked(bench, other)
    assert bench.final(rid) is None
    for other in others:
        bench.call(p.Prefill(session=other, tokens=[3]))
        bench.check_law(other)
    body = bench.finish(rid)
    assert isinstance(body, p.DecodeResult)
    assert body.tokens == greedy(bench, PROMPT, tokens)


def test_one_turn_copies_one_tensor(bench: Bench) -> None:
    session = bench.open(PROMPT)
    tensors = len(bench.engine.schemes.dense.empty().stores[0].planes)  # type: ignore[union-attr]
    rid, gate, turns = bench.start(p.Park(session=session)), Gate(bench), 0
    while bench.engine.step():
        turns += 1
    assert turns >= tensors - 1
    gate.open()
    assert isinstance(bench.finish(rid), p.ParkResult)


def test_who_shares_a_beginning_waits_for_the_disk_of_another(bench: Bench) -> None:
    """A session with the same beginning is lent what the disk brings, and computes none of it."""
    session = bench.open(PROMPT)
    parked(bench, session)
    gate = Gate(bench)
    first = bench.start(p.Prefill(session=session, tokens=[1]))
    second = bench.start(p.Open(tokens=[*PROMPT, 2, 3]))
    for _ in range(3):
        assert not bench.engine.step()
    gate.open()
    bench.finish(first, second)
    body = bench.final(second)
    assert isinstance(body, p.OpenResult)
    assert body.receipt is not None
    assert (body.receipt.source, body.receipt.reused) == ("shared", len(PROMPT))
    bench.check_law(body.session)


def test_many_come_back_at_once_within_the_budget(tmp_path: Path) -> None:
    loaded = make_tiny_model()
    alone = Bench(loaded)
    alone.open(PROMPT)
    room = 8 * alone.engine.kv_bytes
    bench = Bench(loaded, folder=tmp_path, kv_budget_bytes=room)
    sessions = [bench.open(text(n)) for n in range(1, 7)]
    for session in sessions:
        parked(bench, session)
    rids = [bench.start(p.Prefill(session=session, tokens=[7])) for session in sessions]
    while any(bench.final(rid) is None for rid in rids):
        bench.turn()
        assert bench.engine.kv_bytes <= room
    for rid, session in zip(rids, sessions, strict=True):
        body = bench.final(rid)
        assert isinstance(body, p.LengthResult), body
        assert body.receipt.source == "snapshot"
        bench.check_law(session)


def test_what_was_read_never_piles_up_in_memory(bench: Bench) -> None:
    """Bytes that were read are held besides the budget: of a few sessions, however many come back."""
    sessions = [bench.open(text(n)) for n in range(1, 9)]
    for session in sessions:
        parked(bench, session)
    assert bench.engine.disk is not None
    fetching, most = bench.engine.disk.fetching, 0
    rids = [bench.start(p.Prefill(session=session, tokens=[7])) for session in sessions]
    bench.cancel(rids[3])
    while any(bench.final(rid) is None for rid in rids):
        bench.turn()
        most = max(most, fetching._reading + len(fetching._building))
    assert most == READ_MAX
    assert not bench.engine.disk.busy
    for session in sessions:
        bench.check_law(session)


def test_forks_that_come_back_at_once_share_their_trunk_again(tmp_path: Path) -> None:
    bench = Bench(make_tiny_model(context=1024), folder=tmp_path)
    parent = bench.open(text(3, 600))
    body = bench.call(p.Fork(session=parent, n=4))
    assert isinstance(body, p.ForkResult)
    held = bench.engine.kv_bytes
    for session in [*body.sessions, parent]:
        parked(bench, session)
    assert bench.engine.kv_bytes == 0
    rids = [bench.start(p.Prefill(session=session, tokens=[7])) for session in body.sessions]
    bench.finish(*rids)
    for session in body.sessions:
        bench.check_law(session)
    assert bench.engine.kv_bytes < 2 * held


def test_a_published_trunk_comes_back(tmp_path: Path) -> None:
    bench = Bench(make_tiny_model(context=1024), folder=tmp_path)
    session = bench.open(text(3, 600))
    body = bench.call(p.Publish(session=session, name="shared"))
    assert isinstance(body, p.PublishResult)
    outcomes: list[Kept | Exception] = []
    assert bench.engine.disk is not None
    bench.engine.disk.keep(bench.session(body.trunk), outcomes.append)
    bench.idle()
    (kept,) = outcomes
    assert isinstance(kept, Kept)
    tokens, told = bench.session(body.trunk).tokens, kept.id
    bench.close()
    other = Bench(bench.loaded, folder=tmp_path)
    other.adopt(body.trunk, tokens, owner="a", trunk=body.trunk, trunk_length=600, snapshot=told)
    forked = other.finish(other.start(p.Fork(trunk=body.trunk), body.trunk, "b"))
    assert isinstance(forked, p.ForkResult)
    (child,) = forked.sessions
    other.call(p.Prefill(session=child, tokens=[1]))
    other.check_law(child)


def test_a_failing_disk_harms_nobody(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    session = bench.open(PROMPT)
    parked(bench, session)
    assert bench.engine.disk is not None

    def read(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(bench.engine.disk.library, "read", read)
    body = bench.call(p.Prefill(session=session, tokens=[5]))
    assert isinstance(body, p.LengthResult)
    assert (body.receipt.reused, body.receipt.source) == (0, "none")
    assert "the disk failed" in (body.receipt.why or "")
    assert len(bench.incidents) == 1
    bench.check_law(session)
