"""Going back in layers that can't be trimmed: exact at checkpoints, replayed from them elsewhere."""

from __future__ import annotations

import pytest
from tests.engine.harness import Bench
from tests.tiny import WINDOW, make_tiny_model

from stateroom.caches.checkpoints import CHECKPOINTS_MAX
from stateroom.caches.session import SessionCache
from stateroom.caches.stored_rows import TRIM_BACK
from stateroom.client import protocol as p
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.engine.session import CHECKPOINT_EVERY

STATEFUL = ["lfm2", "falcon_h1", "mamba"]
LONG = 2 * CHECKPOINT_EVERY + 50


@pytest.fixture(scope="module", params=STATEFUL)
def stateful(request: pytest.FixtureRequest) -> LoadedModel:
    return make_tiny_model(request.param, context=4096)


@pytest.fixture(scope="module")
def windowed() -> LoadedModel:
    return make_tiny_model("gemma3_text", context=4096)


def tokens_of(n: int, seed: int = 0) -> list[int]:
    return [(13 * k + 7 * seed) % 200 for k in range(n)]


def trimmed(bench: Bench, session: str, to: int, *, replay: bool = False) -> p.LengthResult:
    body = bench.call(p.Trim(session=session, to=to, replay=replay))
    assert isinstance(body, p.LengthResult), body
    return body


def test_a_prompts_end_can_be_gone_back_to(stateful: LoadedModel) -> None:
    """The use of every agent: a prompt, an answer that is rejected, another answer."""
    bench = Bench(stateful)
    session = bench.open(tokens_of(30))
    bench.decode(session, 20, ignore_eos=True)
    receipt = trimmed(bench, session, 30).receipt
    assert (receipt.reused, receipt.prefilled, receipt.trimmed, receipt.why) == (30, 0, 20, None)
    bench.check_law(session)
    bench.decode(session, 3, ignore_eos=True)
    bench.check_law(session)


def test_a_long_prompt_leaves_checkpoints_on_its_way(stateful: LoadedModel) -> None:
    """An edit in the middle computes what lies behind the nearest checkpoint, not everything."""
    bench = Bench(stateful)
    tokens = tokens_of(LONG)
    session = bench.open(tokens)
    marks = bench.session(session).checkpoints
    assert [n for n in marks if n < LONG], "there are some before the end"
    edited = [*tokens[:-5], 1, 2, 3]
    body = bench.call(p.Sync(session=session, tokens=edited))
    assert isinstance(body, p.LengthResult)
    before = max(n for n in marks if n <= LONG - 5)
    assert body.receipt.reused == before - 1
    assert body.receipt.prefilled == len(edited) - body.receipt.reused
    assert f"checkpoint at {before - 1} tokens" in (body.receipt.why or "")
    bench.check_law(session)


def test_a_trim_tells_its_cost_and_what_costs_nothing(stateful: LoadedModel) -> None:
    bench = Bench(stateful)
    session = bench.open(tokens_of(LONG))
    marks = bench.session(session).checkpoints
    to = marks[0] + 20
    refused = bench.call(p.Trim(session=session, to=to))
    assert isinstance(refused, p.ErrorBody)
    assert (refused.code, refused.details) == ("unsupported", {"nearest": marks[0], "replayed": 21})
    assert bench.session(session).length == LONG
    receipt = trimmed(bench, session, to, replay=True).receipt
    assert (receipt.reused, receipt.prefilled) == (marks[0] - 1, 21)
    bench.check_law(session)
    receipt = trimmed(bench, session, marks[0]).receipt
    assert (receipt.reused, receipt.prefilled, receipt.why) == (marks[0], 0, None)
    bench.check_law(session)


def test_a_long_answer_leaves_checkpoints_too_also_in_company(stateful: LoadedModel) -> None:
    bench = Bench(stateful)
    sessions = [bench.open(tokens_of(9, seed)) for seed in range(2)]
    rids = [
        bench.start(p.Decode(session=s, max_tokens=CHECKPOINT_EVERY + 40, ignore_eos=True)) for s in sessions
    ]
    bench.finish(*rids)
    for session in sessions:
        inside = [n for n in bench.session(session).checkpoints if n > 9]
        assert inside
        trimmed(bench, session, inside[-1])
        bench.check_law(session)


def test_forks_share_checkpoints_and_go_their_own_ways(stateful: LoadedModel) -> None:
    """B30: a checkpoint is nobody's to write."""
    bench = Bench(stateful)
    session = bench.open(tokens_of(40))
    bench.decode(session, 10, ignore_eos=True)
    body = bench.call(p.Fork(session=session, n=2))
    assert isinstance(body, p.ForkResult)
    held = bench.engine.kv_bytes
    for n, child in enumerate(body.sessions):
        trimmed(bench, child, 40)
        bench.decode(child, 4 + n, ignore_eos=True, sampling=p.Sampling(temperature=1.0, seed=n))
    trimmed(bench, session, 40)
    for each in (session, *body.sessions):
        bench.check_law(each)
    assert bench.engine.kv_bytes <= held


def test_checkpoints_are_bounded(stateful: LoadedModel) -> None:
    bench = Bench(stateful)
    session = bench.open([1])
    for n in range(3 * CHECKPOINTS_MAX):
        bench.call(p.Prefill(session=session, tokens=[n + 1, n + 2]))
    trail = bench.session(session).trail
    assert len(trail) == CHECKPOINTS_MAX
    assert trail.lengths[-1] == bench.session(session).stored
    bench.check_law(session)


def test_kv_that_is_dropped_takes_its_checkpoints_along(stateful: LoadedModel) -> None:
    bench = Bench(stateful)
    session = bench.open(tokens_of(30))
    bench.adopt(session, tokens_of(30))
    assert bench.engine.kv_bytes == 0
    assert bench.session(session).checkpoints == []
    bench.check_law(session)


def test_a_wrapped_window_is_trimmed_a_little_at_any_time(windowed: LoadedModel) -> None:
    """B32: short of what a window keeps beyond what it shows, nothing is computed again."""
    bench = Bench(windowed)
    session = bench.open(tokens_of(3 * TRIM_BACK + 6 * WINDOW))
    bench.decode(session, 5, ignore_eos=True)
    length = bench.session(session).length
    for n in (1, TRIM_BACK // 2, TRIM_BACK // 4):
        length -= n
        receipt = trimmed(bench, session, length).receipt
        assert (receipt.reused, receipt.prefilled) == (length, 0)
        bench.check_law(session)


def test_a_wrapped_window_goes_back_to_checkpoints(windowed: LoadedModel) -> None:
    bench = Bench(windowed)
    session = bench.open(tokens_of(400))
    for n in range(4):  # far beyond what the planes hold
        bench.call(p.Prefill(session=session, tokens=tokens_of(400, n + 1)))
    held = bench.session(session)
    assert held.trim_floor > 1000
    first = held.checkpoints[0]
    refused = bench.call(p.Trim(session=session, to=first - 3))
    assert isinstance(refused, p.ErrorBody)
    assert refused.code == "unsupported"
    receipt = trimmed(bench, session, first).receipt
    assert (receipt.reused, receipt.prefilled) == (first, 0)
    bench.check_law(session)
    bench.decode(session, 12, ignore_eos=True)
    bench.check_law(session)


# ---------------------------------------------------------------- within the budget


def test_the_nearest_length_is_the_nearest(stateful: LoadedModel) -> None:
    """A session of one token, or none, needs no KV."""
    bench = Bench(stateful)
    session = bench.open(tokens_of(LONG))
    reachable = [0, 1, *bench.session(session).checkpoints, LONG]
    for to in (2, 60, 130, 200, 300, LONG - 3):
        refused = bench.call(p.Trim(session=session, to=to))
        assert isinstance(refused, p.ErrorBody)
        nearest = refused.details["nearest"]
        assert nearest in reachable
        assert abs(nearest - to) == min(abs(n - to) for n in reachable)


@pytest.mark.usefixtures("refusing")
def test_checkpoints_of_a_session_that_waits_are_not_dropped(stateful: LoadedModel) -> None:
    """Its plan counts on them."""
    probe = Bench(stateful)
    one = probe.session(probe.open(tokens_of(300)))
    bench = Bench(stateful, kv_budget_bytes=3 * one.kv_bytes + 4 * one.trail.nbytes)
    session, other = bench.open(tokens_of(300)), bench.open(tokens_of(20, 1))
    bench.call(p.Prefill(session=session, tokens=tokens_of(30, 2)))
    edited = [*tokens_of(300), *tokens_of(20, 3)]
    rids = [
        bench.start(p.Prefill(session=other, tokens=tokens_of(300, 4))),
        bench.start(p.Sync(session=session, tokens=edited)),
        *(bench.start(p.Open(tokens=tokens_of(300, 5))) for _ in range(9)),
    ]
    bench.idle()
    synced = bench.final(rids[1])
    assert isinstance(synced, p.LengthResult)
    assert (synced.receipt.reused, synced.receipt.prefilled, synced.receipt.why) == (300, 20, None)
    assert any(isinstance(bench.final(rid), p.ErrorBody) for rid in rids[2:]), "memory was short"
    bench.check_law(session)
    bench.check_law(other)


def test_checkpoints_go_only_where_that_is_enough_and_the_broker_hears_of_it(stateful: LoadedModel) -> None:
    probe = Bench(stateful)
    session = probe.session(probe.open(tokens_of(30)))
    one, marks = session.kv_bytes, session.trail.nbytes
    bench = Bench(stateful, kv_budget_bytes=2 * one + marks)
    first = bench.open(tokens_of(30))
    bench.decode(first, 4, ignore_eos=True)
    refused = bench.call(p.Fork(session=first, n=9))
    assert isinstance(refused, p.ErrorBody)
    assert refused.code == "capacity"
    assert bench.session(first).checkpoints, "nothing changed"
    assert not bench.asides
    bench.engine.memory.budget_bytes = 2 * one
    second = bench.open(tokens_of(30, 1))
    (aside,) = bench.asides
    assert (aside.session, aside.keep, aside.tokens, aside.checkpoints) == (first, 34, [], [])
    assert aside.private_bytes == bench.session(first).kv_bytes
    for each in (first, second):
        bench.check_law(each)


def test_checkpoints_are_held_to_the_budget(stateful: LoadedModel) -> None:
    probe = Bench(stateful)
    one = probe.session(probe.open(tokens_of(30))).kv_bytes
    budget = 12 * one
    bench = Bench(stateful, kv_budget_bytes=budget)
    sessions = []
    for n in range(12):
        body = bench.call(p.Open(tokens=tokens_of(20, n)))
        if isinstance(body, p.OpenResult):
            sessions.append(body.session)
        for session in sessions:
            bench.call(p.Prefill(session=session, tokens=[n + 1]))
        assert bench.engine.kv_bytes <= budget
    assert len(sessions) == 12


def test_a_checkpoint_that_is_too_large_is_not_tried_at_every_token(
    stateful: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    whole = SessionCache.checkpoint
    monkeypatch.setattr(SessionCache, "checkpoint", lambda cache, row: taken.append(row) or whole(cache, row))
    bench = Bench(stateful)
    session = bench.open(tokens_of(10))
    bench.session(session).trail.bytes_max = 1
    taken.clear()
    bench.decode(session, 60, ignore_eos=True)
    assert not taken
    bench.session(session).trail.bytes_max = 1 << 30
    bench.decode(session, CHECKPOINT_EVERY + 20, ignore_eos=True)
    assert len(taken) <= 2


def test_shared_checkpoints_count_once(stateful: LoadedModel) -> None:
    bench = Bench(stateful)
    session = bench.open(tokens_of(40))
    marks = bench.session(session).trail.nbytes
    body = bench.call(p.Fork(session=session, n=2))
    assert isinstance(body, p.ForkResult)
    assert body.shared_bytes == marks
    every = [session, *body.sessions]
    rows = sum(bench.session(each).kv_bytes for each in every)
    assert bench.engine.kv_bytes == rows + marks
    freed = 0
    for each in every:
        closed = bench.call(p.Close(session=each))
        assert isinstance(closed, p.CloseResult)
        freed += closed.freed_bytes
    assert freed == rows + marks
    assert bench.engine.kv_bytes == 0


@pytest.mark.usefixtures("refusing")
def test_windows_are_admitted_by_what_they_take(windowed: LoadedModel) -> None:
    """A quantum of a prefill stays in a window's planes until it has been read."""
    probe = Bench(windowed)
    one = probe.session(probe.open(tokens_of(500))).kv_bytes
    budget = 6 * one
    bench = Bench(windowed, kv_budget_bytes=budget)
    rids = [bench.start(p.Open(tokens=tokens_of(500, n))) for n in range(9)]
    admitted = 0
    while any(bench.final(rid) is None for rid in rids):
        bench.engine.step()
        assert bench.engine.kv_bytes <= budget
    admitted = sum(isinstance(bench.final(rid), p.OpenResult) for rid in rids)
    assert 0 < admitted < 9


@pytest.mark.parametrize("architecture", ["gemma3_text", "lfm2", "mamba"])
def test_live_bytes_are_never_more_than_private_ones(architecture: str) -> None:
    bench = Bench(make_tiny_model(architecture, context=4096))
    sessions = [bench.open(tokens_of(600, n)) for n in range(2)]
    rids = [bench.start(p.Decode(session=s, max_tokens=40, ignore_eos=True)) for s in sessions]
    while any(bench.final(rid) is None for rid in rids):
        bench.engine.step()
        for session in map(bench.session, sessions):
            told = bench.engine.memory.told(session)
            assert 0 < told.live <= told.private + told.shared


@pytest.mark.parametrize("architecture", ["gemma3_text", "lfm2", "mamba"])
@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_an_edit_that_needs_its_own_checkpoints_keeps_them(architecture: str, spare: int) -> None:
    """They are not what gives way to it."""
    model = make_tiny_model(architecture, context=4096)
    probe = Bench(model)
    session = probe.open(tokens_of(600))
    held = probe.engine.kv_bytes
    growth = probe.session(session).served.projected_bytes(700, 512) - probe.session(session).kv_bytes
    bench = Bench(model, kv_budget_bytes=held + growth + spare)
    session = bench.open(tokens_of(600))
    body = bench.call(p.Sync(session=session, tokens=[*tokens_of(400), *tokens_of(300, 3)]))
    assert isinstance(body, p.LengthResult | p.ErrorBody)
    assert not bench.incidents
    bench.check_law(session)
