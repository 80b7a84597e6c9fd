"""A budget too small for all sessions: idle ones give way and come back exact; who runs isn't disturbed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.harness import PROMPT, Bench, greedy
from tests.tiny import make_tiny_model

from stateroom.caches.snapshots.limits import Limits
from stateroom.client import protocol as p
from stateroom.daemon.engine import ladder
from stateroom.daemon.engine.demotion import freeable
from stateroom.daemon.engine.disk import InUse
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.engine.stream import Stream
from stateroom.daemon.link import Budget, Short, Within
from stateroom.daemon.scheduler.pace import Pace

MIB = 2**20
KINDS = ["llama", "gemma3_text", "lfm2", "falcon_h1", "mamba"]


def tokens_of(n: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(250) for _ in range(n)]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return make_tiny_model(context=2048)


def bench_of(loaded: LoadedModel, folder: Path | None = None, *, budget: int, **more: int) -> Bench:
    """Never over its budget: sampled at each turn of the loop."""
    limits = Limits(free_min_bytes=0, **more)
    bench = Bench(loaded, folder=folder, kv_budget_bytes=budget, limits=limits, pace=Pace(idle_ms=500.0))
    step: Callable[[], bool] = bench.engine.step

    def checked() -> bool:
        more = step()
        if bench.engine.ladder._limit is None:  # else it was made smaller, and isn't kept yet
            assert bench.engine.kv_bytes <= (bench.engine.memory.budget_bytes or 0)
        return more

    bench.engine.step = checked  # type: ignore[method-assign]
    return bench


def row_of(loaded: LoadedModel, tokens: int) -> int:
    """Bytes of a session of so many tokens, at the most."""
    return Bench(loaded).engine.schemes.dense.projected_bytes(tokens, 512)


def opened(bench: Bench, *contents: list[int], **options: object) -> list[str]:
    """All at once; nobody is refused."""
    rids = [bench.start(p.Open(tokens=tokens, **options)) for tokens in contents]  # type: ignore[arg-type]
    bench.finish(*rids)
    bodies = [bench.final(rid) for rid in rids]
    assert all(isinstance(body, p.OpenResult) for body in bodies), bodies
    return [body.session for body in bodies]  # type: ignore[union-attr]


def gone(bench: Bench) -> list[str]:
    """Sessions without KV."""
    return [name for name, session in bench.engine.sessions.items() if session.missing]


def exact(bench: Bench, *sessions: str) -> None:
    """Each goes on as if nothing had been done to it: greedy tokens, and logits."""
    for session in sessions:
        tokens = list(bench.session(session).tokens)
        assert bench.decode(session, 6, ignore_eos=True).tokens == greedy(bench, tokens, 6)
        bench.check_law(session)
    assert bench.incidents == []


# ---------------------------------------------------------------- more sessions than there is room for


@pytest.mark.parametrize(
    ("count", "length", "budget", "on_disk"), [(100, 1000, 64 * MIB, True), (24, 500, 6 * MIB, False)]
)
def test_nobody_is_refused_who_could_be_served(
    tmp_path: Path, count: int, length: int, budget: int, on_disk: bool
) -> None:
    """Eight at once, over sessions that come to far more than the budget; all come back exact."""
    model = make_tiny_model(width=128, context=2048)  # 1 KiB a token
    bench = bench_of(model, tmp_path if on_disk else None, budget=budget)
    draw, at_once = random.Random(1), 8
    contents = [tokens_of(length, n) for n in range(count)]
    sessions: list[str] = []
    for n in range(0, count, at_once):
        sessions += opened(bench, *contents[n : n + at_once])
    assert len(gone(bench)) >= count // 3
    for _ in range(6):
        rids = []
        for n in draw.sample(range(count), at_once):
            session = sessions[n]
            rids.append(bench.start(draw.choice([
                p.Decode(session=session, max_tokens=6, ignore_eos=True),
                p.Prefill(session=session, tokens=[1, 2, 3]),
                p.Sync(session=session, tokens=[*contents[n][: length - 100], 7, 7]),
                p.Score(session=session, tokens=[5, 6]),
                p.Fork(session=session, n=2),
            ])))  # fmt: skip
        bench.finish(*rids)
        assert not [bench.final(rid) for rid in rids if isinstance(bench.final(rid), p.ErrorBody)]
    exact(bench, *draw.sample(sessions, 8))
    if on_disk:
        away = [bench.session(session) for session in sessions if bench.session(session).missing]
        assert away
        assert all(session.snapshot is not None for session in away)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_comes_back(tmp_path: Path, kind: str, on_disk: bool) -> None:
    model = make_tiny_model(kind, context=2048)
    bench = bench_of(model, tmp_path if on_disk else None, budget=4 * row_of(model, 300))
    sessions = [opened(bench, tokens_of(300, n))[0] for n in range(9)]
    assert gone(bench)
    for session in sessions:
        bench.decode(session, 3, ignore_eos=True)
    exact(bench, *sessions)


def test_the_one_that_was_used_longest_ago_gives_way(loaded: LoadedModel) -> None:
    bench = bench_of(loaded, budget=4 * row_of(loaded, 300))
    one, two, three = (opened(bench, tokens_of(300, n))[0] for n in range(3))
    bench.decode(one, 2, ignore_eos=True)
    opened(bench, tokens_of(300, 3))
    assert gone(bench) == []
    bench.asides.clear()
    opened(bench, tokens_of(300, 4))
    assert gone(bench) == [two]
    (told,) = bench.asides
    assert (told.session, told.resident, told.private_bytes, told.parts) == (two, False, 0, None)
    opened(bench, tokens_of(300, 5))
    assert gone(bench) == [two, three]
    exact(bench, one, two, three)


def test_the_background_gives_way_first(loaded: LoadedModel) -> None:
    bench = bench_of(loaded, budget=3 * row_of(loaded, 300))
    (editor,) = opened(bench, tokens_of(300, 0))
    batch = opened(bench, *(tokens_of(300, n) for n in (1, 2)), session_class="background")
    opened(bench, tokens_of(300, 3))
    assert gone(bench) == [batch[0]]
    assert bench.session(editor).stored


def test_forks_give_way_together_or_not_at_all(loaded: LoadedModel) -> None:
    """A trunk that one of them decodes from is in use: the others have nothing to give."""
    row = row_of(loaded, 700)
    bench = bench_of(loaded, budget=2 * row + row_of(loaded, 250))
    (parent,) = opened(bench, tokens_of(600))
    forked = bench.call(p.Fork(session=parent, n=3))
    assert isinstance(forked, p.ForkResult)
    family = [parent, *forked.sessions]
    (other,) = opened(bench, tokens_of(300, 1))
    stream = bench.start(p.Decode(session=parent, max_tokens=60, ignore_eos=True))
    held = bench.start(p.Open(tokens=tokens_of(900, 2)))  # which needs what the stream has
    bench.engine.step()
    assert bench.final(stream) is None
    assert bench.final(held) is None
    assert gone(bench) == []
    memory = bench.engine.memory
    assert memory.busy_bytes == memory.held_bytes - freeable(*memory.idle()) + memory._promised()
    assert bench.engine.gauges()["waiting_for_memory"] == 1
    bench.finish(stream, held)
    assert set(family) <= set(gone(bench))
    bench.call(p.Close(session=bench.final(held).session))  # type: ignore[union-attr]
    exact(bench, *family, other)


def test_a_published_trunk_gives_way_and_is_forked_from_again(loaded: LoadedModel) -> None:
    bench = bench_of(loaded, budget=2 * row_of(loaded, 700))
    (parent,) = opened(bench, tokens_of(600))
    published = bench.call(p.Publish(session=parent, name="x"))
    assert isinstance(published, p.PublishResult)
    bench.call(p.Close(session=parent))
    opened(bench, tokens_of(600, 1))
    opened(bench, tokens_of(600, 2))
    assert published.trunk in gone(bench)
    forked = bench.call(p.Fork(session=published.trunk, n=1))
    assert isinstance(forked, p.ForkResult)
    exact(bench, *forked.sessions)


@pytest.mark.parametrize("on_disk", [False, True])
def test_running_streams_are_not_disturbed(loaded: LoadedModel, tmp_path: Path, on_disk: bool) -> None:
    bench = bench_of(loaded, tmp_path if on_disk else None, budget=5 * row_of(loaded, 300))
    streaming = opened(bench, *(tokens_of(100, n) for n in range(3)))
    wanted = [greedy(bench, tokens_of(100, n), 80) for n in range(3)]
    rids = [
        bench.start(p.Decode(session=session, max_tokens=80, ignore_eos=True, stream=True))
        for session in streaming
    ]
    asked: list[int] = []
    while any(bench.final(rid) is None for rid in rids):
        if len(asked) < 12 and all(bench.final(rid) is not None for rid in asked):
            asked.append(bench.start(p.Open(tokens=tokens_of(250, 10 + len(asked)))))
        bench.engine.step()
        assert all(bench.session(session).lent or bench.session(session).stored for session in streaming)
    assert [bench.final(rid).tokens for rid in rids] == wanted  # type: ignore[union-attr]
    bench.finish(*asked)
    assert gone(bench)
    exact(bench, *streaming)


def test_a_full_disk_leaves_the_tokens(loaded: LoadedModel, tmp_path: Path) -> None:
    bench = bench_of(loaded, tmp_path, budget=3 * row_of(loaded, 300), bytes_max=1000)
    sessions = [opened(bench, tokens_of(300, n))[0] for n in range(6)]
    assert len(gone(bench)) >= 3
    assert not bench.shelved
    exact(bench, *sessions)


def test_one_that_is_used_while_it_is_written_stays(loaded: LoadedModel, tmp_path: Path) -> None:
    bench = bench_of(loaded, tmp_path, budget=3 * row_of(loaded, 300))
    one, two, _ = (opened(bench, tokens_of(300, n))[0] for n in range(3))
    rid = bench.start(p.Open(tokens=tokens_of(300, 3)))
    assert bench.final(rid) is None
    bench.decode(one, 3, ignore_eos=True)  # which was to give way
    bench.finish(rid)
    assert isinstance(bench.final(rid), p.OpenResult)
    assert gone(bench) == [two]
    exact(bench, one, two)


def test_one_that_could_not_be_copied_keeps_its_kv(loaded: LoadedModel, tmp_path: Path) -> None:
    """It was looked at meanwhile. Who needs the room gets it from others, or when there is a next time."""
    bench = bench_of(loaded, tmp_path, budget=3 * row_of(loaded, 300))
    sessions = opened(bench, *(tokens_of(300, n) for n in range(3)))
    disk = bench.engine.disk
    assert disk is not None
    keep = disk.keep
    disk.keep = lambda _, then: then(InUse("looked at"))  # type: ignore[method-assign]
    rid = bench.start(p.Open(tokens=tokens_of(300, 3)))
    bench.engine.step()
    assert bench.final(rid) is None
    assert gone(bench) == []
    disk.keep = keep  # type: ignore[method-assign]
    bench.call(p.Prefill(session=sessions[2], tokens=[1]))
    bench.finish(rid)
    assert isinstance(bench.final(rid), p.OpenResult)
    exact(bench, *sessions)


# ---------------------------------------------------------------- who waits


@pytest.fixture
def full(loaded: LoadedModel) -> tuple[Bench, int, str]:
    """Room for one session and a half, a stream that has the most of it, and another session."""
    bench = bench_of(loaded, budget=row_of(loaded, 1000) + row_of(loaded, 250))
    (session,) = opened(bench, PROMPT)
    (other,) = opened(bench, tokens_of(200, 1))
    stream = bench.start(p.Decode(session=session, max_tokens=900, ignore_eos=True))
    bench.engine.step()
    return bench, stream, other


def requests_of(other: str) -> list[p.Request]:
    return [
        p.Open(tokens=tokens_of(400, 5)),
        p.Prefill(session=other, tokens=tokens_of(400, 5)),
        p.Sync(session=other, tokens=tokens_of(600, 6)),
        p.Decode(session=other, max_tokens=500, ignore_eos=True),
        p.Score(session=other, tokens=tokens_of(200, 6)),
    ]


@pytest.mark.parametrize("which", range(5))
def test_a_request_waits_for_what_runs(full: tuple[Bench, int, str], which: int) -> None:
    bench, stream, other = full
    rid = bench.start(requests_of(other)[which])
    for _ in range(20):
        bench.engine.step()
    assert bench.final(rid) is None
    assert bench.engine.ladder.rids == [rid]
    busy = bench.call(p.Prefill(session=other, tokens=[1]))
    assert isinstance(busy, p.ErrorBody) == (which > 0)
    bench.finish(stream, rid)
    assert not isinstance(bench.final(rid), p.ErrorBody)
    bench.check_law(other)


@pytest.mark.parametrize("which", range(5))
def test_a_cancel_ends_one_that_waits(full: tuple[Bench, int, str], which: int) -> None:
    """Within a turn, as any other: with its own result, and nothing changed."""
    bench, stream, other = full
    before = list(bench.session(other).tokens)
    rid = bench.start(requests_of(other)[which])
    assert bench.engine.ladder.rids == [rid]
    bench.cancel(rid)
    bench.engine.step()
    bench.engine.step()
    body = bench.final(rid)
    assert body is not None
    assert getattr(body, "finish", "cancelled") == "cancelled"
    assert not isinstance(body, p.ErrorBody)
    assert bench.final(stream) is None
    assert bench.session(other).tokens == before
    bench.call(p.Prefill(session=other, tokens=[1]))
    bench.check_law(other)


def test_a_cancelled_fork_that_waits_is_refused(full: tuple[Bench, int, str]) -> None:
    """It has no other way to end; its children never were."""
    bench, stream, other = full
    bench.call(p.Sync(session=other, tokens=PROMPT))  # too short to be shared
    (rid,) = (bench.start(p.Fork(session=other, n=64)),)
    assert bench.engine.ladder.rids == [rid]
    bench.cancel(rid)
    body = bench.final(rid)
    assert isinstance(body, p.ErrorBody)
    assert body.code == "capacity"
    assert len(bench.engine.sessions) == 2
    bench.finish(stream)


def test_a_wait_has_an_end(full: tuple[Bench, int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    bench, stream, other = full
    monkeypatch.setattr(ladder, "ROOM_WAIT_S", 0.05)
    refused = bench.call(p.Open(tokens=tokens_of(400, 5)))
    assert isinstance(refused, p.ErrorBody)
    assert refused.code == "capacity"
    assert refused.details["needed_bytes"] == row_of(bench.loaded, 400)
    assert refused.details["free_bytes"] == row_of(bench.loaded, 250) - row_of(bench.loaded, 200)
    assert refused.details["demotable_bytes"] == bench.session(other).kv_bytes
    assert bench.session(other).stored, "nobody gives way in vain"
    assert bench.final(stream) is None
    assert len(bench.engine.sessions) == 2


def test_a_wait_has_an_end_though_others_give_way_all_the_time(
    full: tuple[Bench, int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, stream, _ = full
    monkeypatch.setattr(ladder, "ROOM_WAIT_MOST_S", 0.05)
    rid = bench.start(p.Open(tokens=tokens_of(400, 5)))
    while (refused := bench.final(rid)) is None:
        bench.engine.ladder._progress_ms = bench.engine.clock_ms()  # for somebody who overtakes it
        bench.turn()
    assert isinstance(refused, p.ErrorBody)
    assert refused.code == "capacity"
    assert bench.final(stream) is None


def test_who_waits_in_vain_with_a_change_carried_out_tells_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV went for a snapshot that proved of no use, and then the budget became smaller."""
    model = make_tiny_model("gemma3_text", context=2048)
    bench = bench_of(model, tmp_path, budget=4 * row_of(model, 700))
    (session,) = opened(bench, tokens_of(600))
    disk, before = bench.engine.disk, tokens_of(600)
    assert disk is not None
    disk.keep(bench.session(session), lambda _: None)
    bench.idle()
    rid = bench.start(p.Sync(session=session, tokens=[*before[:550], 1, 2, 3]))
    while bench.session(session).length == 600:
        bench.turn()
    assert disk.fetching.waiting
    bench.engine.memory.budget_bytes = 1000
    monkeypatch.setattr(ladder, "ROOM_WAIT_S", 0.0)
    body = bench.finish(rid)
    assert isinstance(body, p.ErrorBody)
    assert body.code == "capacity"
    assert bench.journal[session] == bench.session(session).tokens == before[:550]
    bench.check_law(session)


def test_only_so_many_wait(full: tuple[Bench, int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    bench, stream, _ = full
    monkeypatch.setattr(ladder, "HELD_MAX", 3)
    rids = [bench.start(p.Open(tokens=tokens_of(400, n))) for n in range(5)]
    assert [bench.final(rid) is None for rid in rids] == [True, True, True, False, False]
    bench.finish(stream, *rids[:3])
    assert all(isinstance(bench.final(rid), p.OpenResult) for rid in rids[:3])


def test_what_can_never_fit_is_refused_at_once(full: tuple[Bench, int, str]) -> None:
    bench, _, other = full
    refused = bench.start(p.Open(tokens=tokens_of(2000)))
    body = bench.final(refused)
    assert isinstance(body, p.ErrorBody)
    assert body.details["needed_bytes"] > (bench.engine.memory.budget_bytes or 0)
    assert bench.session(other).stored


def test_with_nothing_that_runs_there_is_nothing_to_wait_for(loaded: LoadedModel) -> None:
    bench = bench_of(loaded, budget=row_of(loaded, 700))
    (session,) = opened(bench, tokens_of(500))
    rid = bench.start(p.Prefill(session=session, tokens=tokens_of(600, 1)))
    assert isinstance(bench.final(rid), p.ErrorBody)
    bench.check_law(session)


def test_the_end_of_the_worker_ends_those_who_wait(full: tuple[Bench, int, str]) -> None:
    bench, stream, other = full
    rids = [bench.start(request) for request in requests_of(other)[:2]]
    bench.engine.cancel_all()
    bench.finish(stream, *rids)
    assert bench.engine.ladder.rids == []


# ---------------------------------------------------------------- the budget moves


def test_a_smaller_budget_is_kept_before_it_is_told(loaded: LoadedModel) -> None:
    row = row_of(loaded, 300)
    bench = Bench(loaded, kv_budget_bytes=8 * row)
    sessions = [opened(bench, tokens_of(300, n))[0] for n in range(6)]
    stream = bench.start(p.Decode(session=sessions[0], max_tokens=600, ignore_eos=True))
    bench.engine.step()
    bench.commands.take(Budget(row))
    assert bench.others == []  # the stream has more than that
    assert gone(bench) == sessions[1:]
    bench.finish(stream)
    assert bench.others == [Within(row)]
    assert bench.engine.kv_bytes <= row
    bench.commands.take(Budget(8 * row))
    assert bench.others == [Within(row), Within(8 * row)]
    exact(bench, *sessions)


def test_more_is_asked_for_where_there_may_be_more(loaded: LoadedModel) -> None:
    row = row_of(loaded, 300)
    bench = Bench(loaded, kv_budget_bytes=0)
    bench.commands.take(Budget(row, most=3 * row))
    (session,) = opened(bench, tokens_of(300))
    rid = bench.start(p.Prefill(session=session, tokens=tokens_of(400, 1)))
    needed = row_of(loaded, 700) - row
    assert bench.others == [Within(row), Short(needed)]
    for _ in range(5):
        bench.engine.step()
    assert len(bench.others) == 2  # it is asked for once
    bench.commands.take(Budget(2 * row, most=3 * row))
    bench.finish(rid)
    assert isinstance(bench.final(rid), p.LengthResult)
    refused = bench.start(p.Open(tokens=tokens_of(1800, 2)))
    assert isinstance(bench.final(refused), p.ErrorBody)  # more than there could ever be
    bench.check_law(session)


# ---------------------------------------------------------------- what else gives way


def test_drafts_of_idle_sessions_give_way_before_their_kv(loaded: LoadedModel) -> None:
    """They are made again when they are needed, and nobody sees a difference but in time."""
    small = make_tiny_model(layers=1, context=2048, seed=3)
    bench = Bench(loaded, load_drafter=lambda _: small)
    (session,) = opened(bench, tokens_of(300))
    by_model = p.Speculate(kind="model", model="small")
    bench.decode(session, 8, ignore_eos=True, speculate=by_model)
    guesser = bench.session(session).guesser
    assert guesser is not None
    assert guesser.drafts is not None
    bench.engine.memory.budget_bytes = bench.engine.kv_bytes + row_of(loaded, 300) - 1
    opened(bench, tokens_of(300, 1))
    assert guesser.drafts is None
    assert gone(bench) == []
    bench.decode(session, 8, ignore_eos=True, speculate=by_model)
    exact(bench, session)


def test_drafts_count_while_a_stream_has_them(loaded: LoadedModel) -> None:
    """Whatever became of the session's place among those that speculated lately."""
    small = make_tiny_model(layers=1, context=2048, seed=3)
    bench = Bench(loaded, load_drafter=lambda _: small)
    sessions = opened(bench, *(tokens_of(50, n) for n in range(3)))
    bench.engine.decoding.guessers._most = 1
    before = bench.engine.kv_bytes
    by_model = p.Speculate(kind="model", model="small")
    rids = [
        bench.start(p.Decode(session=session, max_tokens=60, ignore_eos=True, speculate=by_model))
        for session in sessions
    ]
    drafts = 0
    while any(bench.final(rid) is None for rid in rids):
        bench.engine.step()
        streams = [request for request in bench.engine.requests.values() if isinstance(request, Stream)]
        drafts = max(drafts, sum(stream.drafts.nbytes for stream in streams))
        if len(streams) == 3:
            assert bench.engine.kv_bytes >= before + sum(stream.drafts.nbytes for stream in streams)
    assert drafts >= 3 * small_row(small)


def small_row(small: LoadedModel) -> int:
    return Bench(small).engine.schemes.dense.projected_bytes(60, 1)


@pytest.mark.parametrize("kind", ["gemma3_text", "lfm2"])
def test_where_a_loan_does_not_fit_it_is_computed_anew(kind: str) -> None:
    """The loan holds the lender's checkpoints, which are what would give way."""
    model = make_tiny_model(kind, context=2048)
    bench = bench_of(model, budget=2**30)
    (lender,) = opened(bench, tokens_of(600))
    needed = row_of(model, 600)
    marks = bench.session(lender).trail.nbytes
    assert marks > 0
    bench.engine.memory.budget_bytes = bench.engine.kv_bytes + needed - marks // 2
    (other,) = opened(bench, tokens_of(600))
    assert gone(bench) == []
    exact(bench, lender, other)


# ---------------------------------------------------------------- whatever happens


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "lfm2"])
def test_whatever_is_asked_the_budget_and_the_law_hold(
    tmp_path: Path, kind: str, on_disk: bool, seed: int
) -> None:
    """Opens, syncs, forks, publishes, decodes, parks, closes, cancels and budgets, several at a time."""
    model = make_tiny_model(kind, context=2048)
    row = row_of(model, 400)
    bench = bench_of(model, tmp_path if on_disk else None, budget=5 * row)
    draw = random.Random(seed)
    begun: list[int] = []

    def tokens() -> list[int]:
        cut = draw.choice([0, 40, 270])
        return [*tokens_of(300)[:cut], *tokens_of(draw.choice([1, 60, 130]), draw.randrange(9))]

    for _ in range(40):
        idle = [
            session.id
            for session in bench.engine.sessions.values()
            if session not in bench.engine.busy and not bench.engine.ladder.holds(session)
        ]
        session = draw.choice(idle) if idle else None
        chance = draw.random()
        request: p.Request
        if session is None or chance < 0.3:
            request = p.Open(tokens=tokens(), session_class=draw.choice(["interactive", "background"]))
        elif chance < 0.5:
            request = p.Sync(session=session, tokens=tokens())
        elif chance < 0.6:
            request = p.Fork(session=session, n=2)
        elif chance < 0.65 and bench.session(session).tokens:
            request = p.Publish(session=session, name="x")
        elif chance < 0.7:
            request = p.Park(session=session)
        elif chance < 0.95 and bench.session(session).tokens:
            request = p.Decode(session=session, max_tokens=draw.choice([3, 40]), ignore_eos=True)
        else:
            request = p.Close(session=session)
        begun.append(bench.start(request))
        for _ in range(draw.choice([0, 1, 6, 40])):
            bench.engine.step()
        if draw.random() < 0.1:
            bench.cancel(draw.choice(begun))
        if draw.random() < 0.1:
            bench.commands.take(Budget(draw.choice([4, 5, 6]) * row, most=6 * row))
    bench.idle()
    assert bench.incidents == []
    bodies = [bench.final(rid) for rid in begun]
    assert all(body is not None for body in bodies)
    assert not [body for body in bodies if isinstance(body, p.ErrorBody)]
    for name in bench.engine.sessions:
        bench.check_law(name)


@pytest.mark.parametrize("kind", ["gemma3_text", "lfm2"])
def test_who_is_active_leaves_checkpoints_though_memory_is_full(tmp_path: Path, kind: str) -> None:
    """Else each edit of a session that can't be trimmed would compute all of it once others fill memory."""
    model = make_tiny_model(kind, context=2048)
    bench = bench_of(model, tmp_path, budget=4 * row_of(model, 300))
    for n in range(6):
        opened(bench, tokens_of(300, n))
    (session,) = opened(bench, tokens_of(300, 6))
    for n in range(3):
        bench.call(p.Prefill(session=session, tokens=tokens_of(60, n)))
        bench.idle()
    synced = bench.call(
        p.Sync(session=session, tokens=[*tokens_of(300, 6), *tokens_of(60, 0), *tokens_of(60, 1), 5])
    )
    assert isinstance(synced, p.LengthResult)
    assert synced.receipt.reused >= 419
    exact(bench, session)
