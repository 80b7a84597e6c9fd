"""The schedule carried out: streams are parked, short prompts share passes, and nobody notices."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import mlx.core as mx
import pytest
from tests.engine.harness import PROMPT, Bench, greedy
from tests.tiny import make_tiny_model

from stateroom.caches.checkpoints import Trail
from stateroom.client import protocol as p
from stateroom.client.limits import SESSIONS_MAX
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.engine.session import CHECKPOINT_EVERY, Session
from stateroom.daemon.link import Adopt
from stateroom.daemon.scheduler.pace import Pace
from stateroom.daemon.scheduler.places import SLICE_STEPS

LONG = 2 * SLICE_STEPS + 9  # tokens; a stream of so many changes places
IDLE = 10_000  # sessions


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "lfm2", "falcon_h1"])
def family(request: pytest.FixtureRequest) -> LoadedModel:
    return make_tiny_model(request.param)


def prompts(count: int) -> list[list[int]]:
    return [[(17 * n + k) % 200 for k in range(6 + n)] for n in range(count)]


def decodes(bench: Bench, sessions: list[str], tokens: int, **more: Any) -> list[int]:
    return [
        bench.start(p.Decode(session=session, max_tokens=tokens, ignore_eos=True, **more))
        for session in sessions
    ]


def result(bench: Bench, rid: int) -> p.DecodeResult:
    body = bench.final(rid)
    assert isinstance(body, p.DecodeResult), body
    return body


def open_as(bench: Bench, owner: str, tokens: list[int], **more: Any) -> str:
    rid = bench.start(p.Open(tokens=tokens, **more), owner=owner)
    body = bench.finish(rid)
    assert isinstance(body, p.OpenResult), body
    return body.session


# ---------------------------------------------------------------- places


def test_streams_that_change_places_say_what_they_would_alone(family: LoadedModel) -> None:
    """B19: parked and back again, at any step, with nothing computed twice and the law intact."""
    bench = Bench(family, rows_max=2)
    sessions = [bench.open(prompt) for prompt in prompts(5)]
    computed = bench.engine.filling.tokens
    rids = decodes(bench, sessions, LONG)
    most, seen = 0, set()
    while any(bench.final(rid) is None for rid in rids):
        bench.engine.step()
        most = max(most, bench.engine.decoding.rows)
        seen.update(bench.engine.decoding.launched)
    assert most == 2
    assert seen == set(rids)
    assert bench.engine.filling.tokens == computed
    for session, prompt, rid in zip(sessions, prompts(5), rids, strict=True):
        assert result(bench, rid).tokens == greedy(bench, prompt, LONG)
        bench.check_law(session)


def test_a_parked_session_is_told_as_resident(bench: Bench) -> None:
    """Also one whose whole KV was made by the stream itself."""
    bench = Bench(bench.loaded, rows_max=1)
    sessions = [bench.open([7]), bench.open([9])]
    rids = decodes(bench, sessions, LONG)
    told = []
    emit = bench.engine.emit

    def listen(answer: Any) -> None:
        if getattr(answer, "journal", None) is not None:
            told.append(answer.journal)
        emit(answer)

    bench.engine.emit = listen
    bench.finish(*rids)
    assert len(told) > LONG
    assert all(journal.resident for journal in told)
    grown = [journal for journal in told if journal.tokens]
    assert all(journal.private_bytes > 0 for journal in grown[2:])


def test_an_interactive_stream_takes_a_background_ones_place(bench: Bench) -> None:
    bench = Bench(bench.loaded, rows_max=2)
    agents = [bench.open([n + 1] * 8, session_class="background") for n in range(2)]
    agent_rids = decodes(bench, agents, 40)
    for _ in range(5):
        bench.engine.step()
    editor = bench.open(PROMPT)
    (editor_rid,) = decodes(bench, [editor], 10)
    bench.engine.step()
    assert editor_rid in bench.engine.decoding.launched
    assert list(bench.engine.decoding.parked) == [agent_rids[1]]
    bench.engine.step()  # the draw that was on its way
    drawn = len(bench.bodies[agent_rids[1]])
    while bench.final(editor_rid) is None:
        assert len(bench.bodies[agent_rids[1]]) == drawn
        bench.engine.step()
    bench.finish(*agent_rids)
    for n, rid in enumerate(agent_rids):
        assert result(bench, rid).tokens == greedy(bench, [n + 1] * 8, 40)
        bench.check_law(agents[n])


def test_parked_streams_end_at_once(bench: Bench) -> None:
    """B20: cancelled while it waits, before its first step and after; its answer says what it had."""
    bench = Bench(bench.loaded, rows_max=1)
    sessions = [bench.open(prompt) for prompt in prompts(3)]
    first, second, third = decodes(bench, sessions, 3 * SLICE_STEPS)
    while second not in bench.engine.decoding.launched:
        bench.engine.step()
    bench.engine.step()
    assert set(bench.engine.decoding.parked) == {first, third}
    bench.cancel(first)
    bench.cancel(third)
    bench.engine.step()
    assert result(bench, first).finish == result(bench, third).finish == "cancelled"
    assert len(result(bench, first).tokens) >= SLICE_STEPS
    assert result(bench, third).tokens == []
    assert bench.final(second) is None
    bench.engine.cancel_all()
    bench.idle()
    assert result(bench, second).finish == "cancelled"
    for session in sessions:
        bench.check_law(session)
    assert bench.engine.schedule.places.parked == 0


def test_waiting_for_a_place_counts_as_the_queue(bench: Bench) -> None:
    bench = Bench(bench.loaded, rows_max=1)
    first, second = decodes(bench, [bench.open(prompt) for prompt in prompts(2)], 10)
    bench.finish(first, second)
    assert result(bench, second).usage.queue_ms >= result(bench, first).usage.ms


def test_owners_share_a_single_place_by_weight(bench: Bench) -> None:
    """On a clock that each look advances by a millisecond, so that every step costs the same."""
    bench = Bench(bench.loaded, rows_max=1, weights={"heavy": 3.0})
    bench.engine.clock_ms = map(float, itertools.count()).__next__
    rids = {}
    for owner in ("heavy", "light"):
        session = open_as(bench, owner, PROMPT)
        rids[owner] = decodes(bench, [session], 15 * SLICE_STEPS, stream=False)[0]
    had = dict.fromkeys(rids.values(), 0)
    for _ in range(16 * SLICE_STEPS):
        bench.engine.step()
        for rid in bench.engine.decoding.launched:
            had[rid] += 1
    assert had[rids["heavy"]] == pytest.approx(3 * had[rids["light"]], rel=0.15)
    spent = bench.engine.gauges()
    assert spent["device_ms.heavy"] > 2 * spent["device_ms.light"] > 0


@pytest.mark.parametrize("seed", range(4))
def test_streams_come_go_stop_and_are_cancelled_while_places_change(family: LoadedModel, seed: int) -> None:
    """Ends that show while a row is parked, cancels at any moment: one answer each, and the law."""
    draw = random.Random(seed)
    bench = Bench(family, rows_max=draw.choice([1, 2, 3]))
    sessions = [
        bench.open(prompt, session_class=draw.choice(["interactive", "background"])) for prompt in prompts(7)
    ]
    free, open_rids = list(sessions), {}
    for _ in range(250):
        if free and draw.random() < 0.2:
            session = free.pop(draw.randrange(len(free)))
            stops = [draw.randrange(200) for _ in range(draw.choice([0, 40]))]
            request = p.Decode(
                session=session,
                max_tokens=draw.choice([1, 2, 30, 80]),
                ignore_eos=True,
                stop_tokens=stops,
                stream=draw.random() < 0.7,
                sampling=p.Sampling(temperature=1.0, seed=seed),
            )
            open_rids[bench.start(request)] = session
        if open_rids and draw.random() < 0.04:
            bench.cancel(draw.choice(list(open_rids)))
        bench.engine.step()
        for rid in [rid for rid in open_rids if bench.final(rid) is not None]:
            assert isinstance(bench.final(rid), p.DecodeResult)
            session = open_rids.pop(rid)
            assert bench.journal[session] == bench.session(session).tokens
            free.append(session)
    bench.idle()
    assert all(bench.final(rid) is not None for rid in open_rids)
    assert not bench.incidents
    assert not bench.engine.decoding.parked
    assert not bench.engine.schedule.places.running
    for session in sessions:
        bench.check_law(session)


# ---------------------------------------------------------------- prefills together


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass of a shared prefill."""
    seen: list[int] = []
    from stateroom.daemon.engine import filling

    whole = filling.launch_together

    def launch(model: Any, pieces: Any) -> list[mx.array]:
        seen.append(len(pieces))
        return whole(model, pieces)

    monkeypatch.setattr(filling, "launch_together", launch)
    return seen


def teach(bench: Bench) -> None:
    """Passes cost much by themselves, as on a device that reads large weights."""
    pace = bench.engine.schedule.pace = Pace()
    for tokens in (16, 100, 300, 500):
        pace.cost.add(tokens, 100.0 + 0.5 * tokens)


@pytest.mark.parametrize("kv", [None, p.KV(scheme="affine8", group_size=32), p.KV(scheme="turbo")])
def test_short_prompts_share_a_pass(passes: list[int], kv: p.KV | None) -> None:
    """B05: of different lengths, padded behind and trimmed; each as if it had come alone."""
    bench = Bench(make_tiny_model("llama", width=256))
    teach(bench)
    lengths = [20, 23, 19, 25]
    rids = [bench.start(p.Open(tokens=[(31 * n + k) % 200 for k in range(n)], kv=kv)) for n in lengths]
    bench.finish(*rids)
    assert passes == [4]
    for rid, length in zip(rids, lengths, strict=True):
        body = bench.final(rid)
        assert isinstance(body, p.OpenResult)
        assert body.receipt is not None
        assert (body.receipt.prefilled, body.receipt.reused) == (length, 0)
        bench.check_law(body.session)
        bench.decode(body.session, 5, ignore_eos=True)
        bench.check_law(body.session)


def prefilled(bench: Bench, sessions: list[str], lengths: list[int]) -> None:
    """All at once, so many tokens each."""
    requests = [
        p.Prefill(session=session, tokens=[(31 * n + k) % 200 for k in range(length)])
        for n, (session, length) in enumerate(zip(sessions, lengths, strict=True))
    ]
    bench.finish(*map(bench.start, requests))


@pytest.mark.parametrize("spare", [False, True])
def test_padding_takes_no_more_than_there_is(passes: list[int], spare: bool) -> None:
    """A row that comes to 250 tokens takes another step of columns when it is padded to 260."""
    bench = Bench(make_tiny_model("llama"))
    sessions = [bench.open([n, *range(199)]) for n in range(2)]
    teach(bench)
    step = bench.engine.schemes.dense.projected_bytes(256, 1)
    budget = bench.engine.memory.budget_bytes = bench.engine.kv_bytes + (2 if spare else 1) * step
    whole = bench.engine.step

    def step_within() -> bool:
        more = whole()
        assert bench.engine.kv_bytes <= budget
        return more

    bench.engine.step = step_within  # type: ignore[method-assign]
    prefilled(bench, sessions, [50, 60])
    assert passes == ([2] if spare else [])
    for session in sessions:
        bench.check_law(session)


def test_a_shared_pass_ends_where_a_checkpoint_is_due(passes: list[int]) -> None:
    """At the same lengths in all sessions, that they may lend from."""
    bench = Bench(make_tiny_model("gemma3_text"))
    sessions = [bench.open([n, *range(199)]) for n in range(2)]
    teach(bench)
    for session in sessions:
        bench.session(session).trail = Trail()  # as if their prompts hadn't ended there
    prefilled(bench, sessions, [100, 100])
    for session in sessions:
        assert CHECKPOINT_EVERY in bench.session(session).trail.lengths
        bench.check_law(session)


def test_layers_that_cannot_be_trimmed_share_level_passes(passes: list[int]) -> None:
    bench = Bench(make_tiny_model("gemma3_text"))
    teach(bench)
    rids = [
        bench.start(p.Open(tokens=[(31 * n + k) % 200 for k in range(length)]))
        for n, length in enumerate([20, 23, 20])
    ]
    bench.finish(*rids)
    assert passes == ([2] if bench.engine.schemes.groupable else [])
    for rid in rids:
        body = bench.final(rid)
        assert isinstance(body, p.OpenResult)
        bench.check_law(body.session)


def test_a_shared_pass_that_fails_ends_those_who_share_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B16: with an answer each; a fill that didn't share it goes on."""
    from stateroom.daemon.engine import filling

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    teach(bench)
    monkeypatch.setattr(filling, "launch_together", fail)
    rids = [bench.start(p.Open(tokens=[n + 1] * length)) for n, length in enumerate([20, 22, 200])]
    bench.finish(*rids)
    assert [isinstance(bench.final(rid), p.ErrorBody) for rid in rids] == [True, True, False]
    assert len(bench.engine.sessions) == 1
    bench.idle()
    assert bench.engine.schedule.filling == 0


# ---------------------------------------------------------------- what a step touches


class Watched(Session):
    """A session that notices when anybody looks at it."""

    __slots__ = ()
    touched: ClassVar[list[str]] = []

    def __getattribute__(self, name: str) -> Any:
        Watched.touched.append(name)
        return super().__getattribute__(name)


class WatchedDict(dict[str, Session]):
    """Counts what goes through all of its entries."""

    passes = 0

    def __iter__(self) -> Iterator[str]:
        WatchedDict.passes += 1
        return super().__iter__()

    def values(self) -> Any:
        WatchedDict.passes += 1
        return super().values()

    def items(self) -> Any:
        WatchedDict.passes += 1
        return super().items()


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_a_step_touches_no_session_that_has_no_request(kind: str) -> None:
    """10,000 of them: streams, prefills, checkpoints and the budget go on without a look at any."""
    assert IDLE <= SESSIONS_MAX
    bench = Bench(make_tiny_model(kind), rows_max=2, kv_budget_bytes=1 << 30)
    engine = bench.engine
    busy = [bench.open(prompt) for prompt in prompts(4)]
    kept = bench.open([3] * 300)
    for n in range(IDLE):
        bench.bodies[-n], bench.journal[f"idle{n}"] = [], [n % 200, 5, 6]
        bench.commands.take(Adopt(-n, f"idle{n}", [n % 200, 5, 6]))
    engine.sessions = WatchedDict(engine.sessions)
    rids = decodes(bench, busy, 40)
    rids.append(bench.start(p.Prefill(session=bench.open([9]), tokens=[n % 200 for n in range(700)])))
    for n in range(IDLE):
        dict.__getitem__(engine.sessions, f"idle{n}").__class__ = Watched
    dict.__getitem__(engine.sessions, kept).__class__ = Watched
    Watched.touched.clear()
    WatchedDict.passes = 0
    for _ in range(30):
        engine.step()
    assert WatchedDict.passes == 0
    assert Watched.touched == []
    bench.finish(*rids)
    assert not bench.incidents
