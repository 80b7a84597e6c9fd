"""Failures inside the engine: each ends what it hit by name, and leaves tokens and KV in agreement."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest
from tests.engine.harness import PROMPT, Bench, greedy
from tests.engine.speculating import LOOKUP, always
from tests.tiny import make_tiny_model

from stateroom.caches.session import SessionCache
from stateroom.client import protocol as p
from stateroom.daemon.engine.batch import Batch
from stateroom.daemon.engine.flight import Flight, Landed
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.engine.sampling import Drawn
from stateroom.daemon.engine.speculation.guesser import Guesser
from stateroom.daemon.engine.speculation.lookup import Draft, Lookup
from stateroom.daemon.engine.stream import Stream
from stateroom.daemon.scheduler.places import SLICE_STEPS


def test_a_session_of_nan_fails_alone_and_heals(bench: Bench) -> None:
    """X6: NaN in one row's KV ends that session's request by name; its neighbour never notices."""
    poisoned, clean = bench.open(PROMPT), bench.open([9] * 12)
    rids = [bench.start(p.Decode(session=s, max_tokens=20, ignore_eos=True)) for s in (poisoned, clean)]
    for _ in range(4):
        bench.engine.step()
    (batch,) = bench.engine.decoding.batches
    row = next(i for i, stream in enumerate(batch.members) if stream.session.id == poisoned)
    part, row = batch.cache.place(row)
    planes = part.stores[0].planes
    for i, plane in enumerate(planes):
        where = mx.arange(plane.shape[0])[:, None, None, None] == row
        planes[i] = mx.where(where, mx.array(float("nan")), plane)
    bench.finish(*rids)
    failed, went_on = bench.final(rids[0]), bench.final(rids[1])
    assert isinstance(failed, p.ErrorBody)
    assert failed.code == "numeric"
    assert failed.details["length"] == bench.session(poisoned).length
    assert isinstance(went_on, p.DecodeResult)
    assert went_on.tokens == greedy(bench, [9] * 12, 20)
    told = [t for e in bench.bodies[rids[0]] if isinstance(e, p.TokenEvent) for t in e.tokens]
    assert bench.session(poisoned).tokens == PROMPT + told
    rest = bench.decode(poisoned, 20 - len(told), ignore_eos=True).tokens
    assert told + rest == greedy(bench, PROMPT, 20)
    bench.check_law(clean)


def test_a_score_of_nan_fails_by_name_and_heals(bench: Bench) -> None:
    """X6: no NaN travels, and the next score is computed from the tokens."""
    session = bench.open(PROMPT)
    wanted = bench.call(p.Score(session=session, tokens=[1, 2, 3]))
    cache = bench.session(session).cache
    assert cache is not None
    planes = cache.stores[0].planes
    planes[:] = [mx.full(plane.shape, float("nan")) for plane in planes]
    failed = bench.call(p.Score(session=session, tokens=[1, 2, 3]))
    assert isinstance(failed, p.ErrorBody)
    assert (failed.code, failed.details) == ("numeric", {"length": len(PROMPT)})
    again = bench.call(p.Score(session=session, tokens=[1, 2, 3]))
    assert isinstance(wanted, p.ScoreResult)
    assert isinstance(again, p.ScoreResult)
    assert again.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
    bench.check_law(session)


@pytest.mark.parametrize("method", ["join", "launch", "leave"])
def test_a_failure_in_the_batch_ends_its_streams_by_name(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """B16: whatever raises half-way, sessions and KV still describe the same tokens."""
    first, second = bench.open(PROMPT), bench.open([9] * 12)
    rid = bench.start(p.Decode(session=first, max_tokens=8, ignore_eos=True))
    bench.engine.step()
    original = getattr(Batch, method)

    def fail(*arguments: object, **options: object) -> None:
        original(*arguments, **options)
        raise RuntimeError("injected")

    monkeypatch.setattr(Batch, method, fail)
    other = bench.start(p.Decode(session=second, max_tokens=4, ignore_eos=True))
    for _ in range(6):
        bench.engine.step()
    monkeypatch.undo()
    bench.finish(rid, other)
    codes = [body.code for body in (bench.final(rid), bench.final(other)) if isinstance(body, p.ErrorBody)]
    assert codes
    assert set(codes) == {"internal"}
    assert bench.incidents
    for session in (first, second):
        bench.check_law(session)
        assert bench.decode(session, 3, ignore_eos=True).tokens == greedy(
            bench, bench.session(session).tokens[:-3], 3
        )


def test_a_last_draw_that_can_not_be_read_ends_its_stream_by_name(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B16: by then its row has left the batch, and no step in flight names it any more."""
    short, long = bench.open(PROMPT), bench.open([9] * 12)
    rids = [
        bench.start(p.Decode(session=s, max_tokens=n, ignore_eos=True)) for s, n in ((short, 3), (long, 30))
    ]
    while len(bench.bodies[rids[0]]) < 2:
        bench.engine.step()

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(Drawn, "read_logprobs", fail)
    bench.engine.step()
    monkeypatch.undo()
    bench.idle()
    for rid in rids:
        body = bench.final(rid)
        assert isinstance(body, p.ErrorBody)
        assert body.code == "internal"
    for session in (short, long):
        bench.check_law(session)


def test_a_merge_that_fails_leaves_those_who_decode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """B16: the old pack is still valid. Of a model whose rows can't be stored apart."""
    bench = Bench(make_tiny_model("lfm2"))
    first, second = bench.open(PROMPT), bench.open([9] * 12)
    rid = bench.start(p.Decode(session=first, max_tokens=8, ignore_eos=True))
    bench.engine.step()

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(SessionCache, "merge_rows", fail)
    failed = bench.call(p.Decode(session=second, max_tokens=4, ignore_eos=True))
    monkeypatch.undo()
    body = bench.finish(rid)
    assert isinstance(failed, p.ErrorBody)
    assert isinstance(body, p.DecodeResult)
    assert body.tokens == greedy(bench, PROMPT, 8)
    for session in (first, second):
        bench.check_law(session)


def in_a_round(bench: Bench, *counts: int) -> tuple[list[str], list[int]]:
    """Streams of so many tokens, the second of which ends with the round that is in flight."""
    always(bench)
    sessions = [bench.open([9 + i] * 12) for i in range(len(counts))]
    rids = []
    for session, count in zip(sessions, counts, strict=True):
        bench.session(session).guesser = Guesser(lookup=Sevens())
        decode = p.Decode(session=session, max_tokens=count, ignore_eos=True, speculate=LOOKUP)
        rids.append(bench.start(decode))
    for _ in range(20):
        bench.engine.step()
        stream = bench.engine.requests[rids[1]]
        assert isinstance(stream, Stream)
        if bench.engine.decoding.batches[0].in_round and len(stream.drawn) == counts[1] - 1:
            return sessions, rids
    raise AssertionError("no round was its last")


class Sevens(Lookup):
    """Always guesses one token."""

    def draft(self, tokens: Sequence[int], most: int) -> Draft:
        return Draft([7][:most], 3)


def test_a_round_that_ends_a_stream_while_its_row_is_to_be_parked(loaded: LoadedModel) -> None:
    """It is read for the row that is parked before; the stream that ended in it is parked no more."""
    bench = Bench(loaded, rows_max=2)
    sessions, rids = in_a_round(bench, 60, 4, 60, 60)
    for row in bench.engine.schedule.places.running.values():
        row.steps = SLICE_STEPS
    bench.finish(*rids)
    assert all(isinstance(bench.final(rid), p.DecodeResult) for rid in rids)
    for session in sessions:
        bench.check_law(session)


def test_a_round_that_can_not_be_read_for_who_joins_fails_alone(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own streams end by name, none goes on behind guesses that nobody took back; who joins is served."""
    bench = Bench(loaded)
    sessions, rids = in_a_round(bench, 60, 4)
    late = bench.open([5] * 12)
    while not bench.engine.decoding.batches[0].in_round:
        bench.engine.step()
    rids.append(bench.start(p.Decode(session=late, max_tokens=9, ignore_eos=True)))
    read = Flight.read

    def fail_once(flight: Flight) -> list[Landed]:
        monkeypatch.setattr(Flight, "read", read)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(Flight, "read", fail_once)
    bench.finish(*rids)
    failed, served = bench.final(rids[0]), bench.final(rids[-1])
    assert isinstance(failed, p.ErrorBody)
    assert isinstance(served, p.DecodeResult)
    assert served.tokens == greedy(bench, [5] * 12, 9)
    for session in (*sessions, late):
        bench.check_law(session)


def test_a_row_that_can_not_be_made_ready_fails_alone(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as for want of memory when it is quantised."""
    bench = Bench(make_tiny_model("llama", width=256))
    late = bench.open([5] * 12, kv=p.KV(scheme="affine8", quantise_after=11))
    other = bench.open([6] * 12)

    def fail(cache: SessionCache) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(SessionCache, "quantise", fail)
    rids = [bench.start(p.Decode(session=s, max_tokens=5, ignore_eos=True)) for s in (late, other)]
    bench.finish(*rids)
    monkeypatch.undo()
    failed, served = bench.final(rids[0]), bench.final(rids[1])
    assert isinstance(failed, p.ErrorBody)
    assert isinstance(served, p.DecodeResult)
    assert served.tokens == greedy(bench, [6] * 12, 5)
    bench.check_law(late)


def test_a_failure_in_a_quantum_ends_that_prefill_by_name(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = bench.open(PROMPT)

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(SessionCache, "forward", fail)
    body = bench.call(p.Prefill(session=session, tokens=[1, 2, 3]))
    monkeypatch.undo()
    assert isinstance(body, p.ErrorBody)
    assert body.code == "internal"
    assert body.details["incident"] == "incident"
    bench.check_law(session)
    assert bench.session(session).tokens[: len(PROMPT)] == PROMPT


def test_an_open_that_fails_leaves_no_session(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(SessionCache, "forward", fail)
    body = bench.call(p.Open(tokens=PROMPT))
    assert isinstance(body, p.ErrorBody)
    assert not bench.engine.sessions


def test_a_launch_that_fails_ends_those_who_were_about_to_leave_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their last draws are out, and they are no members any more."""
    short, long = bench.open(PROMPT), bench.open([9] * 12)
    rids = [
        bench.start(p.Decode(session=short, max_tokens=3, ignore_eos=True)),
        bench.start(p.Decode(session=long, max_tokens=30, ignore_eos=True)),
    ]
    whole, steps = SessionCache.forward, []

    def failing(cache: SessionCache, model: object, inputs: mx.array) -> mx.array:
        steps.append(inputs.shape)
        if len(steps) == 4:
            raise RuntimeError("injected")
        return whole(cache, model, inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(SessionCache, "forward", failing)
    bench.idle()
    monkeypatch.undo()
    for rid in rids:
        assert isinstance(bench.final(rid), p.ErrorBody | p.DecodeResult), "one final reply each"
    bench.incidents.clear()
    for session in (short, long):
        bench.check_law(session)


def test_padding_is_held_to_the_budget() -> None:
    """A long row beside short ones would make them as wide as itself."""
    model = make_tiny_model(context=4096)
    probe = Bench(model)
    served = probe.engine.schemes.dense
    budget = served.projected_bytes(1100, 1) + 7 * served.projected_bytes(60, 1)
    bench = Bench(model, kv_budget_bytes=budget)
    sessions = [bench.open([5] * 1000), *(bench.open([n + 1] * 4) for n in range(7))]
    rids = [bench.start(p.Decode(session=s, max_tokens=40, ignore_eos=True)) for s in sessions]
    while any(bench.final(rid) is None for rid in rids):
        bench.engine.step()
        assert bench.engine.kv_bytes <= budget
    assert all(isinstance(bench.final(rid), p.DecodeResult) for rid in rids)
