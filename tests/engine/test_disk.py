"""Sessions kept on disk by an engine: what is written, what is told of it, and what goes again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.engine.harness import Bench

from stateroom.caches.snapshots.limits import Limits
from stateroom.client import protocol as p
from stateroom.client.errors import Capacity
from stateroom.daemon.engine.disk import InUse
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.link import Kept
from stateroom.daemon.scheduler.pace import Pace

PROMPT = [(13 * k) % 200 for k in range(120)]


@pytest.fixture
def bench(loaded: LoadedModel, tmp_path: Path) -> Bench:
    return Bench(loaded, folder=tmp_path / "library")


def keep(bench: Bench, *sessions: str) -> list[Kept | Exception]:
    """Keeps the sessions as the ladder does; what came of it, in order."""
    outcomes: list[Kept | Exception] = []
    for session in sessions:
        assert bench.engine.disk is not None
        bench.engine.disk.keep(bench.session(session), outcomes.append)
    bench.idle()
    return outcomes


def test_a_session_is_kept_once(bench: Bench) -> None:
    session = bench.open(PROMPT)
    (kept,) = keep(bench, session)
    assert isinstance(kept, Kept)
    assert (kept.session, kept.name, kept.length) == (session, None, len(PROMPT))
    assert bench.shelved == {kept.id: kept}
    held = bench.session(session)
    assert (held.snapshot, held.snapshot_length, held.snapshot_stored) == (
        kept.id,
        len(PROMPT),
        len(PROMPT) - 1,
    )
    assert keep(bench, session) == [kept]  # nothing is new
    bench.decode(session, 5, ignore_eos=True)
    (newer,) = keep(bench, session)
    assert isinstance(newer, Kept)
    assert (newer.length, bench.shelved) == (len(PROMPT) + 5, {newer.id: newer})
    bench.check_law(session)


def test_what_was_trimmed_is_on_disk_no_longer(bench: Bench) -> None:
    """B31."""
    session = bench.open(PROMPT)
    keep(bench, session)
    bench.call(p.Trim(session=session, to=50))
    assert bench.session(session).snapshot_length == 50
    (newer,) = keep(bench, session)
    assert isinstance(newer, Kept)
    assert (newer.length, bench.shelved) == (50, {newer.id: newer})
    assert keep(bench, session) == [newer]
    bench.call(p.Prefill(session=session, tokens=[1, 2, 3]))
    (last,) = keep(bench, session)
    assert isinstance(last, Kept)
    assert (last.length, bench.shelved) == (53, {last.id: last})


def test_one_that_is_needed_before_it_was_copied_is_not_kept(bench: Bench) -> None:
    session = bench.open(PROMPT)
    outcomes: list[Kept | Exception] = []
    assert bench.engine.disk is not None
    bench.engine.disk.keep(bench.session(session), outcomes.append)
    bench.engine.step()  # the first tensor
    bench.decode(session, 3, ignore_eos=True)
    bench.idle()
    assert [type(outcome) for outcome in outcomes] == [InUse]
    assert not bench.shelved
    bench.check_law(session)


def test_a_closed_session_leaves_nothing(bench: Bench) -> None:
    one, other = bench.open(PROMPT), bench.open([*PROMPT, 1])
    keep(bench, one)
    bench.call(p.Close(session=one))
    assert bench.engine.disk is not None
    bench.engine.disk.keep(bench.session(other), lambda _: None)
    while not bench.engine.disk._writing:  # then it is copied, and closed while it is written
        bench.engine.step()
    bench.call(p.Close(session=other))
    bench.idle()
    assert not bench.shelved
    assert not bench.engine.disk.library.entries
    assert bench.incidents == []


def test_one_that_is_parked_while_it_is_written_is_there_once(bench: Bench) -> None:
    session = bench.open(PROMPT)
    disk = bench.engine.disk
    assert disk is not None
    go = threading.Event()
    disk.files.ask(go.wait, lambda _: None)
    disk.keep(bench.session(session), lambda _: None)
    while not disk._writing:
        bench.engine.step()
    rid = bench.start(p.Park(session=session))  # before it is known that it was written
    while disk._writing < 2:
        bench.engine.step()
    go.set()
    assert isinstance(bench.finish(rid), p.ParkResult)
    bench.idle()
    assert list(bench.shelved) == list(disk.library.entries) == [bench.session(session).snapshot]
    bench.call(p.Close(session=session))
    bench.idle()
    assert not disk.library.entries


def test_what_a_cancel_took_back_is_on_disk_no_longer(loaded: LoadedModel, tmp_path: Path) -> None:
    """It was written while the session was trimmed and given the same tokens again, but for the last ones."""
    bench = Bench(loaded, folder=tmp_path, pace=Pace(idle_ms=1.0))
    session, disk = bench.open(PROMPT), bench.engine.disk
    assert disk is not None
    go = threading.Event()
    disk.files.ask(go.wait, lambda _: None)
    disk.keep(bench.session(session), lambda _: None)
    while not disk._writing:
        bench.engine.step()
    bench.call(p.Trim(session=session, to=10))
    rid = bench.start(p.Prefill(session=session, tokens=PROMPT[10:]))
    while bench.session(session).stored < 12:
        bench.engine.step()
    go.set()
    while disk._writing:
        assert disk.files.wait(20.0)
        disk.files.turn()
    bench.cancel(rid)
    bench.finish(rid)
    held = bench.session(session)
    assert held.snapshot is not None
    assert held.snapshot_length == held.length < len(PROMPT)
    assert isinstance(bench.call(p.Park(session=session)), p.ParkResult)
    assert [kept.length for kept in bench.shelved.values()] == [held.length]
    bench.check_law(session)


def test_the_oldest_goes_when_there_is_no_room(loaded: LoadedModel, tmp_path: Path) -> None:
    bench = Bench(loaded, folder=tmp_path, limits=Limits(free_min_bytes=0, count_max=2))
    sessions = [bench.open([*PROMPT, n]) for n in range(3)]
    kept = keep(bench, *sessions)
    assert all(isinstance(each, Kept) for each in kept)
    assert list(bench.shelved.values()) == kept[1:]
    assert [bench.session(each).snapshot is None for each in sessions] == [True, False, False]


def test_a_full_disk_is_told_with_figures(loaded: LoadedModel, tmp_path: Path) -> None:
    bench = Bench(loaded, folder=tmp_path, limits=Limits(bytes_max=1000, free_min_bytes=0))
    session = bench.open(PROMPT)
    (refused,) = keep(bench, session)
    assert isinstance(refused, Capacity)
    assert refused.details["needed_bytes"] > refused.details["free_bytes"]
    assert bench.session(session).snapshot is None
    assert not bench.shelved
    bench.check_law(session)
