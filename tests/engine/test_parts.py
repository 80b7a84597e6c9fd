"""Rows of a batch that are stored apart or packed: what moves, who may share a pass, and what is drawn."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.harness import Bench, greedy
from tests.tiny import make_tiny_model

from stateroom.caches.session import SessionCache
from stateroom.client import protocol as p
from stateroom.daemon.engine import part_costs
from stateroom.daemon.engine.batch import STEPS_LEAST
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.scheduler.packing import Costs

LENGTHS = (100, 37, 5, 64)
FASTER = Costs(part_ms=1e3, column_ms=1e-3, beside_ms=1e-3, byte_ms=1e-9)  # together, whatever it moves


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return make_tiny_model("llama", width=256)  # heads that can be quantised


def prompts(n: int = len(LENGTHS), length: int = 0) -> list[list[int]]:
    return [[(13 * k + 7 * i) % 200 for k in range(length or LENGTHS[i])] for i in range(n)]


def started(bench: Bench, sessions: list[str], tokens: int | list[int]) -> list[int]:
    each = tokens if isinstance(tokens, list) else [tokens] * len(sessions)
    decodes = [
        p.Decode(session=s, max_tokens=n, ignore_eos=True) for s, n in zip(sessions, each, strict=True)
    ]
    return [bench.start(decode) for decode in decodes]


def ended(bench: Bench, rids: list[int]) -> list[list[int]]:
    bench.finish(*rids)
    bodies: list[Any] = [bench.final(rid) for rid in rids]
    return [body.tokens for body in bodies]


def parts(bench: Bench) -> list[int]:
    (batch,) = bench.engine.decoding.batches
    return [part.rows for part in batch.cache.parts]


def test_rows_join_and_leave_without_a_byte_moved(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any lengths, at any step; a session's cache is the same object before, during and after."""
    bench = Bench(loaded)
    sessions = [bench.open(prompt) for prompt in prompts()]
    caches = [bench.session(session).cache for session in sessions]

    def refuse(*_: object) -> None:
        raise AssertionError("rows that are stored apart are never copied")

    for name in ("merge_rows", "extract_row", "filter_rows"):
        monkeypatch.setattr(SessionCache, name, refuse)
    rids = started(bench, sessions[:2], [30, 9])
    for _ in range(5):
        bench.engine.step()
    rids += started(bench, sessions[2:], [12, 20])
    bench.engine.step()
    assert parts(bench) == [1, 1, 1, 1]
    drawn = ended(bench, rids)
    monkeypatch.undo()
    assert [bench.session(session).cache for session in sessions] == caches
    assert drawn == [greedy(bench, prompt, n) for prompt, n in zip(prompts(), (30, 9, 12, 20), strict=True)]
    for session in sessions:
        bench.check_law(session)


def test_sessions_of_any_scheme_share_a_pass(loaded: LoadedModel) -> None:
    """One that is quantised on the way is so at its own length, in company as alone."""
    bench, lone = Bench(loaded), Bench(loaded)
    kvs = [None, p.KV(scheme="affine8"), p.KV(scheme="affine8", quantise_after=45), p.KV(scheme="turbo")]
    drawn = []
    for each in (bench, lone):
        sessions = [each.open(prompt, kv=kv) for prompt, kv in zip(prompts(), kvs, strict=True)]
        if each is bench:
            rids = started(each, sessions, 50)
            each.engine.step()
            assert len(each.engine.decoding.batches) == 1
            drawn.append(ended(each, rids))
        else:
            drawn.append([ended(each, started(each, [session], 50))[0] for session in sessions])
        for session in sessions:
            each.check_law(session)
        assert all(each.session(session).cache.quantised for session in sessions)  # type: ignore[union-attr]
    assert drawn[0] == drawn[1]


def test_forks_come_together_over_their_trunk_and_others_stand_apart(loaded: LoadedModel) -> None:
    """Only what is their own has moved; each draws what it would alone."""
    bench = Bench(loaded)
    prompt, other = prompts(1, 150)[0], prompts(2)[1]
    parent, stranger = bench.open(prompt), bench.open(other)
    forks = bench.call(p.Fork(session=parent, n=3))
    assert isinstance(forks, p.ForkResult)
    for n, child in enumerate(forks.sessions):
        bench.call(p.Prefill(session=child, tokens=[n + 1] * (n + 1)))
    rids = started(bench, [stranger, *forks.sessions], [40, 20, 25, 30])
    bench.engine.step()
    assert parts(bench) == [1, 3]
    (batch,) = bench.engine.decoding.batches
    assert batch.cache.parts[1].stores[0].layout.forgotten == (150 - 1,) * 3  # type: ignore[union-attr]
    drawn = ended(bench, rids)
    assert drawn[0] == greedy(bench, other, 40)
    for n, got in enumerate(drawn[1:]):
        assert got == greedy(bench, [*prompt, *[n + 1] * (n + 1)], 20 + 5 * n)
    for session in (parent, stranger, *forks.sessions):
        bench.check_law(session)


def test_two_trunks_at_once_each_with_their_own_rows(loaded: LoadedModel) -> None:
    """Packing the rows of one changes the order in which the others stand."""
    bench = Bench(loaded)
    families = []
    for prompt in ([3] * 150, [4] * 150):
        parent = bench.open(prompt)
        forks = bench.call(p.Fork(session=parent, n=1))
        assert isinstance(forks, p.ForkResult)
        families.append([parent, *forks.sessions])
    (one, its), (other, others) = families
    rids = started(bench, [one, other, its, others], 20)
    bench.engine.step()
    (batch,) = bench.engine.decoding.batches
    together: dict[int, set[str]] = {}
    for stream, (part, _) in zip(batch.members, batch.cache.places(), strict=True):
        together.setdefault(id(part), set()).add(stream.session.id)
    assert sorted(map(sorted, together.values())) == sorted(map(sorted, families))
    ended(bench, rids)
    for session in (one, other, its, others):
        bench.check_law(session)


def test_rows_of_like_length_are_packed_where_that_is_faster(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where there is room for the copy; who leaves or joins meanwhile finds their own tokens."""
    bench = Bench(loaded)
    bench.engine.decoding.costs = FASTER
    given = [*prompts(3, 60), *prompts(1)]
    sessions = [bench.open(prompt) for prompt in given]
    asked: list[int] = []

    def has_room(nbytes: int) -> bool:
        asked.append(nbytes)
        return len(asked) > 1

    monkeypatch.setattr(bench.engine.memory, "has_room", has_room)
    rids = started(bench, sessions[:3], [8, 60, 40])
    bench.engine.step()
    assert parts(bench) == [1, 1, 1]
    assert asked == [3 * 59 * bench.engine.bytes_per_token]
    rids += started(bench, sessions[3:], [STEPS_LEAST])
    bench.engine.step()
    assert sorted(parts(bench)) == [1, 3], "much longer ones would be padding"
    drawn = ended(bench, rids)
    wanted = zip(given, (8, 60, 40, STEPS_LEAST), strict=True)
    assert drawn == [greedy(bench, prompt, n) for prompt, n in wanted]
    for session in sessions:
        bench.check_law(session)


def test_packing_that_fails_leaves_rows_as_they_stand(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B16."""
    bench = Bench(loaded)
    bench.engine.decoding.costs = FASTER
    given = prompts(2, 60)
    sessions = [bench.open(prompt) for prompt in given]
    rids = started(bench, sessions, 40)

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(SessionCache, "merge_rows", fail)
    for _ in range(3):
        bench.engine.step()
    assert parts(bench) == [1, 1]
    assert len(bench.incidents) == 1
    monkeypatch.undo()
    assert ended(bench, rids) == [greedy(bench, prompt, 40) for prompt in given]
    for session in sessions:
        bench.check_law(session)


def test_a_model_of_states_is_merged_as_ever() -> None:
    bench = Bench(make_tiny_model("lfm2"))
    sessions = [bench.open(prompt) for prompt in prompts()]
    rids = started(bench, sessions, 20)
    bench.engine.step()
    assert parts(bench) == [4]
    assert ended(bench, rids) == [greedy(bench, prompt, 20) for prompt in prompts()]


def test_costs_are_measured_with_rows_that_are_nobodys() -> None:
    """By a clock that ticks a millisecond at each look; what is faster by less than noise isn't."""
    bench = Bench(make_tiny_model("gemma3_text"))
    (sample,) = bench.engine.schemes.dense.samples
    ticks = iter(range(10_000))
    costs = part_costs.measured(bench.loaded.model, sample, lambda: next(ticks) / 1000.0)
    assert (costs.part_ms, costs.column_ms, costs.beside_ms) == pytest.approx((0.0, 0.0, 0.0), abs=1e-9)
    assert 0.0 < costs.byte_ms < 1e-4
    assert sample.offsets == (1,)
    assert not sample.trunks
    trial = part_costs.Trial(12.0, 10.0, 15.0, 11.0, 4.0, merge=2.0, merged_bytes=1000)
    rows, tokens = part_costs.ROWS, part_costs.TOKENS
    costs = trial.costs()
    assert costs.part_ms == pytest.approx(2.0 / (rows - 1))
    assert costs.column_ms == pytest.approx(8.0 / (rows * (tokens - 1)))
    assert costs.beside_ms == pytest.approx(costs.column_ms - (2.0 - 1.0) / tokens)
    assert costs.byte_ms == pytest.approx(2e-3)
