"""What the engine's recorder says of real requests adds up to what these were answered."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.engine.harness import PROMPT, Bench
from tests.engine.speculating import LOOKUP, always, tell
from tests.tiny import make_tiny_model

from stateroom.client import protocol as p
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.engine.worker import RECALLS_MAX, Worker
from stateroom.daemon.link import Mark, Recall, Recorded, decode_from_worker, encode_to_worker
from stateroom.daemon.scheduler.pace import Pace

LONG = [(13 * k) % 200 for k in range(400)]
WAITS = ("memory", "disk", "turn", "yielded")
WORK = ("prefill", "score", "verify", "decode", "rounds")
OVERLAP_MS = 0.5  # by which two clocks of one moment may differ


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return make_tiny_model(context=2048)


@pytest.fixture
def bench(loaded: LoadedModel) -> Bench:
    return Bench(loaded)


def marks(bench: Bench, rid: int) -> list[Mark]:
    """Of a request that ended: from its beginning to its answer, in order."""
    made, dropped = bench.engine.recorder.marks(rid, bench.engine.clock_ms())
    assert dropped == 0
    assert (made[0].name, made[-1].name) == ("taken", "answered")
    assert all(mark.ms >= 0 for mark in made)
    # Of one that is parked a last step may still be on its way: it overlaps with the wait.
    for before, after in pairwise(mark for mark in made if mark.name in WORK):
        assert after.start_ms >= before.start_ms + before.ms - OVERLAP_MS
    return made


def total(made: list[Mark], detail: str, *names: str) -> int:
    return sum(mark.details[detail] for mark in made if mark.name in names)


def names(made: list[Mark], *among: str) -> list[str]:
    return [mark.name for mark in made if mark.name in among]


def test_quanta_and_steps_are_what_was_computed_and_drawn(bench: Bench) -> None:
    opened = bench.start(p.Open(tokens=LONG))
    body = bench.finish(opened)
    assert isinstance(body, p.OpenResult)
    assert body.receipt is not None
    made = marks(bench, opened)
    assert total(made, "tokens", "prefill") == body.receipt.prefilled - 1  # the last one stays pending
    assert len(names(made, "prefill")) > 1
    rid = bench.start(p.Decode(session=body.session, max_tokens=40, ignore_eos=True))
    decoded = bench.finish(rid)
    assert isinstance(decoded, p.DecodeResult)
    made = marks(bench, rid)
    assert total(made, "tokens", "decode") == total(made, "steps", "decode") == decoded.usage.decoded == 40
    assert names(made, *WAITS, *WORK) == ["turn", "decode"]
    spent = sum(mark.ms for mark in made if mark.name == "decode")
    assert 0 < spent <= made[-1].start_ms - made[0].start_ms


def test_a_decode_beside_a_prefill(bench: Bench) -> None:
    session = bench.open(PROMPT)
    decode = bench.start(p.Decode(session=session, max_tokens=60, ignore_eos=True))
    for _ in range(5):
        bench.engine.step()
    fill = bench.start(p.Open(tokens=LONG))
    bench.finish(decode, fill)
    ours, theirs = marks(bench, decode), marks(bench, fill)
    assert total(ours, "tokens", "decode") == 60
    assert total(theirs, "tokens", "prefill") == len(LONG) - 1
    # Each sees the other's work as others'.
    behind = [mark for mark in ours if mark.name == "others"]
    assert {kind for mark in behind for kind in mark.details} == {"prefill_ms"}
    assert {kind for mark in theirs if mark.name == "others" for kind in mark.details} == {"decode_ms"}
    assert len(names(ours, "decode")) > 2  # split where quanta lay between


def test_rows_of_one_step_and_of_one_pass(loaded: LoadedModel) -> None:
    pace = Pace(idle_ms=1e6)
    for tokens in (16, 512):
        pace.cost.add(tokens, 50.0)  # whatever their length: they share where they can
    bench = Bench(loaded, pace=pace)
    fills = [bench.start(p.Open(tokens=[9 + k] * 20)) for k in range(3)]
    bench.finish(*fills)
    passes = [mark for rid in fills for mark in marks(bench, rid) if mark.name == "prefill"]
    assert max(mark.details["rows"] for mark in passes) > 1
    sessions = [bench.open([7, k, 8]) for k in range(3)]
    counts = (10, 20, 20)
    rids = [
        bench.start(p.Decode(session=session, max_tokens=count, ignore_eos=True))
        for session, count in zip(sessions, counts, strict=True)
    ]
    bench.finish(*rids)
    for rid, count in zip(rids, counts, strict=True):
        made = marks(bench, rid)
        assert total(made, "tokens", "decode") == count
    rows = [mark.details["rows"] for mark in marks(bench, rids[1]) if mark.name == "decode"]
    assert 3 in rows
    assert rows[-1] == 2  # when the short one had gone


@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_rounds(loaded: LoadedModel, wrong: float) -> None:
    bench = always(Bench(loaded))
    session = bench.open(PROMPT)
    plain = bench.decode(bench.open(PROMPT), 50, ignore_eos=True).tokens
    tell(bench, session, plain, wrong=wrong)
    rid = bench.start(p.Decode(session=session, max_tokens=50, ignore_eos=True, speculate=LOOKUP))
    body = bench.finish(rid)
    assert isinstance(body, p.DecodeResult)
    made = marks(bench, rid)
    assert body.usage.drafted > 0
    assert total(made, "guesses", "rounds") == body.usage.drafted
    assert total(made, "tokens", "rounds", "decode") == 50


def test_score_and_verify(bench: Bench) -> None:
    session = bench.open(LONG)
    rid = bench.start(p.Score(session=session, tokens=[1, 2, 3]))
    bench.finish(rid)
    assert total(marks(bench, rid), "tokens", "score") == 3
    rid = bench.start(p.Verify(session=session))
    bench.finish(rid)
    assert total(marks(bench, rid), "tokens", "verify") == len(LONG)


def test_waits_for_the_disk(loaded: LoadedModel, tmp_path: Path) -> None:
    bench = Bench(loaded, folder=tmp_path / "library")
    session = bench.open(LONG)
    parked = bench.start(p.Park(session=session))
    bench.finish(parked)
    rid = bench.start(p.Decode(session=session, max_tokens=3, ignore_eos=True))
    bench.finish(rid)
    for number, does in ((parked, "write"), (rid, "read")):
        (wait,) = [mark for mark in marks(bench, number) if mark.name == "disk"]
        assert wait.details == {"does": does}
        assert wait.ms > 0
    assert names(marks(bench, rid), *WORK) == ["decode"]
    bench.close()


def test_waits_for_memory(loaded: LoadedModel) -> None:
    room = Bench(loaded).engine.schemes.dense.projected_bytes(len(LONG), 512)
    bench = Bench(loaded, kv_budget_bytes=room, pace=Pace(idle_ms=500.0))
    session = bench.open(PROMPT)
    decode = bench.start(p.Decode(session=session, max_tokens=200, ignore_eos=True))
    bench.engine.step()
    waits = bench.start(p.Open(tokens=LONG))
    assert [mark.name for mark in bench.engine.recorder.marks(waits, bench.engine.clock_ms())[0]][:2] == [
        "taken",
        "memory",
    ]
    bench.finish(decode, waits)
    made = marks(bench, waits)
    assert names(made, *WAITS)[0] == "memory"
    (wait,) = [mark for mark in made if mark.name == "memory"]
    assert wait.details["needed_bytes"] > 0
    assert total(made, "tokens", "prefill") == len(LONG) - 1


def test_a_stream_without_a_place_waits_for_its_turn(loaded: LoadedModel) -> None:
    bench = Bench(loaded, rows_max=1)
    options: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True}
    low = bench.open(PROMPT, session_class="background")
    high = bench.open([5] * 9)
    background = bench.start(p.Decode(session=low, **options))
    for _ in range(5):
        bench.engine.step()
    first = bench.start(p.Decode(session=high, **options))
    bench.finish(background, first)
    made = marks(bench, background)
    assert "yielded" in names(made, *WAITS)
    assert total(made, "tokens", "decode") == 120


def test_a_bug_is_reported_with_the_requests_it_befell(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, tuple[int, ...]]] = []

    class Telling(Bench):
        def _report(self, error: BaseException, rids: Any = ()) -> str:
            told.append((str(error), tuple(rids)))
            return "incident"

    bench = Telling(loaded)
    sessions = [bench.open([7, k, 8]) for k in range(2)]
    rids = [bench.start(p.Decode(session=s, max_tokens=50, ignore_eos=True)) for s in sessions]
    for _ in range(4):
        bench.engine.step()

    def fail(*_: object) -> None:
        raise RuntimeError("the step failed")

    monkeypatch.setattr(bench.engine.decoding, "_publish", fail)
    bench.finish(*rids)
    assert sorted(told) == [("the step failed", (rid,)) for rid in rids]
    for rid in rids:
        body = bench.final(rid)
        assert isinstance(body, p.ErrorBody)
        assert body.details == {"incident": "incident", "rid": rid}
        assert marks(bench, rid)[-1].details == {"code": "internal"}


def test_an_engine_that_records_nothing(loaded: LoadedModel) -> None:
    bench = Bench(loaded, record=False)
    rid = bench.start(p.Open(tokens=PROMPT))
    bench.finish(rid)
    assert bench.engine.recorder.marks(rid, 0.0) == ([], 0)


def test_a_worker_tells_of_those_last_asked_for_and_of_one_a_turn(bench: Bench) -> None:
    """Who asked before has given up: the steps of others are held on for nobody."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as broker, context.socket(zmq.PAIR) as link:
        broker.bind("inproc://recalls")
        link.connect("inproc://recalls")
        worker = Worker(link, bench.commands)
        asked = list(range(3 * RECALLS_MAX))
        for rid in asked:
            broker.send(encode_to_worker(Recall(rid)))
        worker._take(0)
        while worker._recall():
            pass
        told = [decode_from_worker(broker.recv(zmq.NOBLOCK)) for _ in range(RECALLS_MAX)]
        assert told == [Recorded(rid, []) for rid in asked[-RECALLS_MAX:]]
        assert not broker.poll(0)
