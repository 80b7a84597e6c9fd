"""The engine in process: streams, company, prefills, reading. Case ids are those of docs/cases.md."""

from __future__ import annotations

import numpy as np
import pytest
from tests.engine.harness import PROMPT, Bench, greedy
from tests.tiny import make_tiny_model

from stateroom.client import protocol as p
from stateroom.daemon.scheduler.pace import QUANTUM_MIN, Pace

# ---------------------------------------------------------------- decode


def test_greedy_equals_the_plain_loop(bench: Bench) -> None:
    result = bench.decode(bench.open(PROMPT), 20, ignore_eos=True)
    assert result.tokens == greedy(bench, PROMPT, 20)
    assert result.finish == "length"
    assert result.length == len(PROMPT) + 20
    assert result.usage.decoded == 20
    assert result.usage.prefilled == 1


def test_decode_goes_on_where_it_stopped(bench: Bench) -> None:
    session = bench.open(PROMPT)
    pieces = [bench.decode(session, n, ignore_eos=True).tokens for n in (1, 2, 7, 1)]
    assert [token for piece in pieces for token in piece] == greedy(bench, PROMPT, 11)
    bench.check_law(session)


def test_every_token_is_told_as_it_is_drawn(bench: Bench) -> None:
    session = bench.open(PROMPT)
    rid = bench.start(p.Decode(session=session, max_tokens=9, ignore_eos=True))
    result = bench.finish(rid)
    events = [body for body in bench.bodies[rid] if isinstance(body, p.TokenEvent)]
    assert isinstance(result, p.DecodeResult)
    assert [event.tokens for event in events] == [[token] for token in result.tokens]
    assert "".join(event.text for event in events) == result.text
    assert len(bench.bodies[rid]) == 10


def test_unstreamed_decode_has_one_reply(bench: Bench) -> None:
    session = bench.open(PROMPT)
    rid = bench.start(p.Decode(session=session, max_tokens=9, ignore_eos=True, stream=False, logprobs=2))
    result = bench.finish(rid)
    assert isinstance(result, p.DecodeResult)
    assert len(bench.bodies[rid]) == 1
    assert result.logprobs is not None
    assert [entry.token for entry in result.logprobs] == result.tokens
    bench.check_law(session)


def test_stop_token_ends_and_belongs_to_the_session(bench: Bench) -> None:
    drawn = greedy(bench, PROMPT, 30)
    stop = drawn[4]
    expected = drawn[: drawn.index(stop) + 1]
    session = bench.open(PROMPT)
    result = bench.decode(session, 30, stop_tokens=[stop], ignore_eos=True)
    assert result.finish == "stop_token"
    assert result.tokens == expected
    assert bench.session(session).tokens == PROMPT + expected
    bench.check_law(session)


def test_context_ends_a_decode_and_refuses_the_next(bench: Bench) -> None:
    context = bench.loaded.context
    session = bench.open([t % 200 for t in range(context - 3)])
    result = bench.decode(session, 50, ignore_eos=True)
    assert (result.finish, len(result.tokens), result.length) == ("context", 3, context)
    refused = bench.call(p.Decode(session=session, max_tokens=1))
    assert isinstance(refused, p.ErrorBody)
    assert refused.code == "too_long"
    assert refused.details == {"limit": context, "length": context}
    bench.check_law(session)


def test_logprobs_are_the_models_own(bench: Bench) -> None:
    session = bench.open(PROMPT)
    sampling = p.Sampling(temperature=0.7, top_k=5, seed=4)
    result = bench.decode(session, 3, logprobs=4, stream=False, sampling=sampling, ignore_eos=True)
    assert result.logprobs is not None
    tokens = list(PROMPT)
    for entry in result.logprobs:
        logits = bench.fresh_logits(tokens).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert entry.logprob == pytest.approx(logprobs[entry.token], abs=1e-4)
        best = np.sort(logprobs)[::-1][:4]
        assert [value for _, value in entry.top] == pytest.approx(best.tolist(), abs=1e-4)
        tokens.append(entry.token)


# ---------------------------------------------------------------- company


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2"])
def test_seed_draws_the_same_alone_in_company_and_after_a_fork(architecture: str) -> None:
    """B23: a draw depends on session, seed and position, not on who else is served."""
    bench = Bench(make_tiny_model(architecture))
    sampling = p.Sampling(temperature=1.0, seed=77)
    alone = bench.decode(bench.open(PROMPT), 12, sampling=sampling, ignore_eos=True).tokens
    parent = bench.open(PROMPT)
    body = bench.call(p.Fork(session=parent, n=2))
    assert isinstance(body, p.ForkResult)
    others = [bench.open([3 * n + 1] * (5 + 11 * n)) for n in range(3)]
    rids = [
        bench.start(
            p.Decode(session=s, max_tokens=30, sampling=p.Sampling(temperature=1.0, seed=n), ignore_eos=True)
        )
        for n, s in enumerate(others)
    ]
    for _ in range(3):
        bench.engine.step()
    in_company = bench.decode(parent, 12, sampling=sampling, ignore_eos=True).tokens
    forked = bench.decode(body.sessions[0], 12, sampling=sampling, ignore_eos=True).tokens
    other_seed = bench.decode(
        body.sessions[1], 12, sampling=p.Sampling(temperature=1.0, seed=78), ignore_eos=True
    ).tokens
    bench.finish(*rids)
    assert in_company == alone
    assert forked == alone
    assert other_seed != alone


def test_ragged_sessions_join_and_leave_at_any_step(bench: Bench) -> None:
    """B14: after a merge each row keeps its own positions."""
    sessions = {bench.open([7 * n + 3] * length): (n, length) for n, length in enumerate((2, 25, 9, 40))}
    rids = {}
    for count, session in enumerate(sessions):
        rids[session] = bench.start(p.Decode(session=session, max_tokens=4 + 5 * count, ignore_eos=True))
        bench.engine.step()
    bench.finish(*rids.values())
    for count, (session, (n, length)) in enumerate(sessions.items()):
        body = bench.final(rids[session])
        assert isinstance(body, p.DecodeResult)
        assert body.tokens == greedy(bench, [7 * n + 3] * length, 4 + 5 * count)
        bench.check_law(session)


def test_a_lone_session_is_never_copied(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from stateroom.caches.session import SessionCache

    def refuse(*_: object) -> None:
        raise AssertionError("a lone session pays nothing for batching")

    session = bench.open(PROMPT)
    for name in ("merge_rows", "extract_row", "filter_rows"):
        monkeypatch.setattr(SessionCache, name, refuse)
    assert len(bench.decode(session, 8, ignore_eos=True).tokens) == 8


def test_more_streams_than_rows_share_the_turns(loaded: object) -> None:
    bench = Bench(loaded, rows_max=2)  # type: ignore[arg-type]
    sessions = [bench.open([n + 1] * 6) for n in range(5)]
    rids = [bench.start(p.Decode(session=s, max_tokens=6, ignore_eos=True)) for s in sessions]
    bench.engine.step()
    assert bench.engine.decoding.rows == 2
    assert bench.engine.gauges()["parked"] == 3
    bench.finish(*rids)
    for n, (session, rid) in enumerate(zip(sessions, rids, strict=True)):
        body = bench.final(rid)
        assert isinstance(body, p.DecodeResult)
        assert body.tokens == greedy(bench, [n + 1] * 6, 6)
        bench.check_law(session)


# ---------------------------------------------------------------- prefill


def test_nothing_left_to_process_is_no_dead_end(bench: Bench) -> None:
    """B18: exact hits, empty prefills, and a decode after a trim to nothing."""
    session = bench.open(PROMPT)
    again = bench.call(p.Sync(session=session, tokens=PROMPT))
    assert isinstance(again, p.LengthResult)
    assert (again.receipt.reused, again.receipt.prefilled, again.receipt.trimmed) == (len(PROMPT), 0, 0)
    empty = bench.call(p.Prefill(session=session, tokens=[]))
    assert isinstance(empty, p.LengthResult)
    assert empty.length == len(PROMPT)
    assert bench.decode(session, 5, ignore_eos=True).tokens == greedy(bench, PROMPT, 5)
    trimmed = bench.call(p.Trim(session=session, to=0))
    assert isinstance(trimmed, p.LengthResult)
    assert (trimmed.length, trimmed.receipt.trimmed) == (0, len(PROMPT) + 5)
    refused = bench.call(p.Decode(session=session, max_tokens=1))
    assert isinstance(refused, p.ErrorBody)
    assert refused.code == "invalid"
    bench.call(p.Prefill(session=session, tokens=PROMPT))
    assert bench.decode(session, 5, ignore_eos=True).tokens == greedy(bench, PROMPT, 5)


def test_prefill_and_streams_do_not_starve_each_other(loaded: object) -> None:
    """B19: while a long prefill runs, every turn has a token for the stream and a quantum for the prefill."""
    bench = Bench(loaded, pace=Pace(gap_ms=1e-9, idle_ms=1e-9, floor_max=QUANTUM_MIN))  # type: ignore[arg-type]
    streaming = bench.open(PROMPT)
    long, short = bench.open(), bench.open()
    decode = bench.start(p.Decode(session=streaming, max_tokens=60, ignore_eos=True))
    bench.engine.step()
    first = bench.start(p.Prefill(session=long, tokens=[5] * 100, progress=True))
    second = bench.start(p.Prefill(session=short, tokens=[6] * QUANTUM_MIN))
    turns = 0
    while bench.final(first) is None:
        before = len(bench.bodies[decode])
        bench.engine.step()
        turns += 1
        assert len(bench.bodies[decode]) == before + 1
        if turns == 4:
            assert bench.final(second) is not None  # the short one isn't held up behind the long one
    assert turns <= 100 // QUANTUM_MIN + 4
    progress = [body for body in bench.bodies[first] if isinstance(body, p.Progress)]
    assert [body.done for body in progress] == [16, 32, 48, 64, 80, 96, 99]
    bench.idle()
    bench.check_law(long)
    bench.check_law(short)


def test_cancelled_prefill_keeps_whole_chunks(bench: Bench) -> None:
    """B20, B22: tokens and KV agree after a cancel at any chunk."""
    bench.engine.schedule.pace = Pace(idle_ms=1e-9)
    session = bench.open(PROMPT)
    rid = bench.start(p.Prefill(session=session, tokens=list(range(100))))
    for _ in range(3):
        bench.engine.step()
    bench.cancel(rid)
    body = bench.finish(rid)
    assert isinstance(body, p.LengthResult)
    assert body.finish == "cancelled"
    assert body.length == len(PROMPT) + 3 * QUANTUM_MIN == bench.session(session).length
    bench.check_law(session)


def test_prefill_cancelled_before_its_turn_changes_nothing(bench: Bench) -> None:
    session = bench.open(PROMPT)
    rid = bench.start(p.Sync(session=session, tokens=[1, 2, 3]))
    bench.cancel(rid)
    body = bench.finish(rid)
    assert isinstance(body, p.LengthResult)
    assert body.finish == "cancelled"
    assert bench.session(session).tokens == PROMPT
    bench.check_law(session)


def test_cancelled_stream_keeps_what_it_told(bench: Bench) -> None:
    session = bench.open(PROMPT)
    rid = bench.start(p.Decode(session=session, max_tokens=100, ignore_eos=True))
    for _ in range(5):
        bench.engine.step()
    bench.cancel(rid)
    turns = 0
    while bench.final(rid) is None:
        bench.engine.step()
        turns += 1
    body = bench.final(rid)
    assert turns <= 2
    assert isinstance(body, p.DecodeResult)
    assert body.finish == "cancelled"
    told = [t for event in bench.bodies[rid] if isinstance(event, p.TokenEvent) for t in event.tokens]
    assert bench.session(session).tokens == PROMPT + told == PROMPT + greedy(bench, PROMPT, len(told))
    bench.check_law(session)


# ---------------------------------------------------------------- score, tokens, recovery


def test_score_is_the_log_probability_of_the_continuation(bench: Bench) -> None:
    session = bench.open(PROMPT)
    continuation = [(31 * n) % 200 for n in range(40)]
    body = bench.call(p.Score(session=session, tokens=continuation))
    assert isinstance(body, p.ScoreResult)
    tokens = list(PROMPT)
    for token, logprob in zip(continuation, body.logprobs, strict=True):
        logits = bench.fresh_logits(tokens).astype(np.float64)
        wanted = logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert logprob == pytest.approx(wanted, abs=2e-4)
        tokens.append(token)
    assert body.total == pytest.approx(sum(body.logprobs))
    assert bench.session(session).tokens == PROMPT
    bench.check_law(session)


def test_tokens_tells_a_range(bench: Bench) -> None:
    session = bench.open(PROMPT)
    body = bench.call(p.ReadTokens(session=session, start=2, to=4))
    assert isinstance(body, p.TokensResult)
    assert body.tokens == [30, 40]
    assert body.text == bench.loaded.tokenizer.decode([30, 40])
    refused = bench.call(p.ReadTokens(session=session, to=99))
    assert isinstance(refused, p.ErrorBody)
    assert refused.field == "to"


def test_adopted_session_is_computed_when_touched(bench: Bench) -> None:
    """A session that another worker held comes back from its tokens, and the receipt says so."""
    bench.adopt("lost", PROMPT)
    assert bench.engine.kv_bytes == 0
    rid = bench.start(p.Decode(session="lost", max_tokens=4, ignore_eos=True))
    body = bench.finish(rid)
    assert isinstance(body, p.DecodeResult)
    assert body.tokens == greedy(bench, PROMPT, 4)
    assert body.usage.prefilled == len(PROMPT)
    bench.adopt("idle", PROMPT)
    nothing = bench.call(p.Prefill(session="idle", tokens=[]))
    assert isinstance(nothing, p.LengthResult)
    assert (nothing.receipt.reused, nothing.receipt.prefilled) == (0, len(PROMPT))
    bench.adopt("other", PROMPT, background=True)
    assert bench.session("other").background
    synced = bench.call(p.Sync(session="other", tokens=[*PROMPT, 1]))
    assert isinstance(synced, p.LengthResult)
    assert (synced.receipt.reused, synced.receipt.prefilled) == (0, len(PROMPT) + 1)
    assert "no longer on the device" in str(synced.receipt.why)
    bench.check_law("other")


def test_a_trim_of_a_session_without_kv_computes_nothing(bench: Bench) -> None:
    """The receipt claims neither reuse nor work; the decode that follows tells what it computed."""
    bench.adopt("lost", PROMPT)
    body = bench.call(p.Trim(session="lost", to=5))
    assert isinstance(body, p.LengthResult)
    assert (body.length, body.receipt.reused, body.receipt.prefilled, body.receipt.trimmed) == (5, 0, 0, 2)
    assert bench.decode("lost", 2).usage.prefilled == 5
    bench.check_law("lost")


def test_idle_engine_holds_nothing_but_its_sessions(bench: Bench) -> None:
    """Conservation: what is held is what the sessions hold; closing all gives all back."""
    sessions = [bench.open([n + 1] * (20 + n)) for n in range(4)]
    rids = [bench.start(p.Decode(session=s, max_tokens=5, ignore_eos=True)) for s in sessions]
    bench.finish(*rids)
    assert bench.engine.kv_bytes == sum(bench.session(s).kv_bytes for s in sessions) > 0
    freed = 0
    for session in sessions:
        body = bench.call(p.Close(session=session))
        assert isinstance(body, p.CloseResult)
        freed += body.freed_bytes
    assert bench.engine.kv_bytes == 0
    assert freed > 0
    assert not bench.engine.sessions
