"""What requests wait for, as the engine tells it with its pulse: each reason comes about, and goes again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.engine.harness import PROMPT, Bench
from tests.tiny import make_tiny_model

from stateroom.client import protocol as p
from stateroom.daemon.engine import doing
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.link import Doing, Pulse, decode_from_worker, encode_from_worker
from stateroom.daemon.scheduler.pace import Pace


def tokens_of(n: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(250) for _ in range(n)]


def now(bench: Bench) -> dict[int, Doing]:
    """By rid, as a broker would hear it."""
    heard = decode_from_worker(encode_from_worker(Pulse({}, bench.commands.doings.now())))
    assert isinstance(heard, Pulse)
    assert len({each.rid for each in heard.doing}) == len(heard.doing)
    return {each.rid: each for each in heard.doing}


def waits(bench: Bench) -> dict[int, str | None]:
    return {rid: each.waiting for rid, each in now(bench).items()}


def decoding(bench: Bench, session: str, max_tokens: int = 60) -> int:
    return bench.start(p.Decode(session=session, max_tokens=max_tokens, ignore_eos=True))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return make_tiny_model(context=2048)


def test_an_idle_engine_tells_nothing(loaded: LoadedModel) -> None:
    bench = Bench(loaded)
    session = bench.open(PROMPT)
    bench.decode(session, 3)
    assert now(bench) == {}


def test_what_runs_waits_for_nothing_and_tells_how_far_it_is(loaded: LoadedModel) -> None:
    bench = Bench(loaded, pace=Pace(idle_ms=0.0))
    session = bench.open(PROMPT)
    rid = decoding(bench, session, 20)
    fill = bench.start(p.Open(tokens=tokens_of(500)))
    told = []
    while bench.final(rid) is None:
        bench.engine.step()
        told.append(now(bench))
    streamed = [each[rid] for each in told if rid in each]
    assert {each.waiting for each in streamed} == {None}
    assert {each.total for each in streamed} == {20}
    assert [each.done for each in streamed] == sorted(each.done for each in streamed)
    assert streamed[-1].done >= 18
    fed = [each[fill] for each in told if fill in each and each[fill].waiting is None]
    assert {each.total for each in fed} == {499}
    assert 0 < fed[-1].done < 499
    bench.finish(fill)


def test_who_is_not_fed_waits_for_its_turn(loaded: LoadedModel) -> None:
    """Of two prefills the one that got no further since the last pulse; both got on by the one after that."""
    bench = Bench(loaded, pace=Pace(idle_ms=0.0))
    rids = [bench.start(p.Open(tokens=tokens_of(700, seed))) for seed in (1, 2)]
    assert waits(bench) == dict.fromkeys(rids, "turn")  # no quantum was launched yet
    bench.engine.step()
    (first,) = (rid for rid, why in waits(bench).items() if why is None)
    (second,) = set(rids) - {first}
    before = now(bench)
    assert before[second] == Doing(second, "turn", 0, 699)
    for _ in range(12):
        bench.engine.step()
    assert waits(bench) == dict.fromkeys(rids)
    bench.finish(*rids)


def test_who_shares_what_another_computes_waits_for_its_turn(loaded: LoadedModel) -> None:
    bench = Bench(loaded, pace=Pace(idle_ms=0.0))
    first, second = (bench.start(p.Open(tokens=tokens_of(400))) for _ in range(2))
    bench.engine.step()
    assert waits(bench) == {first: None, second: "turn"}
    bench.finish(first, second)
    assert now(bench) == {}


def test_streams_without_a_place_wait_for_their_turn(loaded: LoadedModel) -> None:
    bench = Bench(loaded, rows_max=1)
    rids = [decoding(bench, bench.open(tokens)) for tokens in ([1, 2, 3], [4, 5, 6])]
    bench.engine.step()
    assert waits(bench) == {rids[0]: None, rids[1]: "turn"}
    while waits(bench).get(rids[1]) is not None:
        bench.engine.step()
    assert waits(bench) == {rids[0]: "turn", rids[1]: None}  # its slice was over
    bench.finish(*rids)


def test_a_background_stream_yields_to_interactive_ones(loaded: LoadedModel) -> None:
    bench = Bench(loaded, rows_max=1)
    agents = [bench.open([n + 1] * 8, session_class="background") for n in range(2)]
    slow, slower = (decoding(bench, agent, 200) for agent in agents)
    bench.engine.step()
    assert waits(bench) == {slow: None, slower: "turn"}  # behind one of its own class
    editor = decoding(bench, bench.open(PROMPT), 10)
    bench.engine.step()
    assert waits(bench) == {slow: "yielded", slower: "yielded", editor: None}
    bench.finish(editor)
    bench.engine.step()
    assert sorted(map(str, waits(bench).values())) == ["None", "turn"]
    bench.finish(slow, slower)


@pytest.mark.parametrize("op", ["open", "decode"])
def test_who_has_no_room_waits_for_memory(loaded: LoadedModel, op: str) -> None:
    def row(tokens: int) -> int:
        return Bench(loaded).engine.schemes.dense.projected_bytes(tokens, 512)

    bench = Bench(loaded, kv_budget_bytes=row(1000) + row(250))
    runs = decoding(bench, bench.open(PROMPT), 900)
    other = bench.open(tokens_of(200, 1))
    rid = bench.start(p.Open(tokens=tokens_of(400, 5))) if op == "open" else decoding(bench, other, 500)
    for _ in range(3):
        bench.engine.step()
    assert waits(bench) == {rid: "memory", runs: None}
    bench.cancel(runs)
    bench.finish(runs)
    bench.turn()
    assert waits(bench)[rid] != "memory"
    bench.finish(rid)


def test_who_is_kept_or_read_waits_for_the_disk(loaded: LoadedModel, tmp_path: Path) -> None:
    """Save, park, what comes back by itself, and a restore: until the files are done with."""
    bench = Bench(loaded, folder=tmp_path)
    session = bench.open(tokens_of(300))
    snapshot = ""
    for request in (p.Save(session=session, snapshot="mine"), p.Park(session=session)):
        rid = bench.start(request)
        assert waits(bench) == {rid: "disk"}
        bench.finish(rid)
        snapshot = snapshot or next(iter(bench.shelved))
    rid = bench.start(p.Decode(session=session, max_tokens=3, ignore_eos=True))
    assert now(bench) == {rid: Doing(rid, "disk")}
    bench.finish(rid)
    rid = bench.start(p.Restore(snapshot="mine"), snapshot=snapshot)
    assert waits(bench) == {rid: "disk"}
    body = bench.finish(rid)
    assert isinstance(body, p.OpenResult)
    assert now(bench) == {}


def test_a_decode_that_computes_first_has_drawn_nothing(loaded: LoadedModel) -> None:
    bench = Bench(loaded, pace=Pace(idle_ms=0.0))
    session = bench.open(tokens_of(200))
    bench.session(session).drop_kv()
    rid = decoding(bench, session)
    bench.engine.step()
    assert now(bench) == {rid: Doing(rid, None, 0, 0)}
    bench.finish(rid)


def test_scores_and_verifications_tell_how_far_they_are(loaded: LoadedModel) -> None:
    bench = Bench(loaded, pace=Pace(idle_ms=0.0))
    session, other = bench.open(tokens_of(150)), bench.open(tokens_of(90, 3))
    score = bench.start(p.Score(session=session, tokens=tokens_of(120, 2)))
    look = bench.start(p.Verify(session=other))
    told = [now(bench)]
    while bench.final(score) is None or bench.final(look) is None:
        bench.engine.step()
        told.append(now(bench))
    for rid, total in ((score, 120), (look, 90)):
        seen = [each[rid] for each in told if rid in each]
        assert {each.total for each in seen} == {total}
        assert len({each.done for each in seen}) > 1


def test_a_pulse_is_bounded(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those first that wait for memory, which may take longest."""
    monkeypatch.setattr(doing, "WAITS_TOLD", 3)
    bench = Bench(loaded, rows_max=1)
    rids = [decoding(bench, bench.open([n + 1] * 4), 20) for n in range(5)]
    bench.engine.step()
    assert list(now(bench)) == rids[:3]
    bench.finish(*rids)
