"""What the engine refuses: by name, with figures, before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mlx_lm.models.cache import ConcatenateKVCache, KVCache
from tests.engine.harness import PROMPT, Bench
from tests.tiny import CONTEXT, make_tiny_model

from stateroom.client import protocol as p
from stateroom.daemon.engine import engine, kv
from stateroom.daemon.engine.problem import ModelError

LONG = "word " * 1_500_000


@pytest.mark.parametrize("token", [300, 10**6, 2**31 - 1])
@pytest.mark.parametrize(
    "request_of",
    [
        lambda s, t: p.Prefill(session=s, tokens=[1, t]),
        lambda s, t: p.Sync(session=s, tokens=[t]),
        lambda s, t: p.Score(session=s, tokens=[t]),
        lambda s, t: p.Decode(session=s, max_tokens=1, stop_tokens=[t]),
        lambda s, t: p.Decode(session=s, max_tokens=1, sampling=p.Sampling(logit_bias=[(t, 1.0)])),
    ],
)
def test_ids_past_the_vocabulary_are_refused(
    bench: Bench, request_of: Callable[[str, int], p.Request], token: int
) -> None:
    """B25: before a tensor is built; nothing changes."""
    token = max(token, bench.loaded.vocab)
    session = bench.open(PROMPT)
    body = bench.call(request_of(session, token))
    assert isinstance(body, p.ErrorBody)
    assert body.code == "invalid"
    assert str(token) in body.message
    assert bench.session(session).tokens == PROMPT
    bench.check_law(session)


def test_a_model_with_layers_not_understood_is_refused_by_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """For good: the worker tells the broker so, instead of dying again and again."""
    loaded = make_tiny_model("llama")
    monkeypatch.setattr(
        type(loaded.model), "make_cache", lambda _: [KVCache(), ConcatenateKVCache()], raising=False
    )
    with pytest.raises(ModelError, match="ConcatenateKVCache") as refused:
        Bench(loaded)
    assert refused.value.permanent


@pytest.mark.usefixtures("refusing")
def test_budget_refuses_by_projected_bytes(loaded: object) -> None:
    probe = Bench(loaded)  # type: ignore[arg-type]
    row = int(256 * probe.engine.bytes_per_token)
    bench = Bench(loaded, kv_budget_bytes=2 * row)  # type: ignore[arg-type]
    first, second = bench.open(PROMPT), bench.open(PROMPT)
    third = bench.call(p.Open(tokens=PROMPT))
    assert isinstance(third, p.ErrorBody)
    assert third.code == "capacity"
    assert third.details["needed_bytes"] == row
    assert third.details["free_bytes"] == 0
    assert isinstance(bench.call(p.Fork(session=first, n=1)), p.ErrorBody)
    assert len(bench.engine.sessions) == 2
    bench.call(p.Close(session=second))
    bench.open(PROMPT)


@pytest.mark.usefixtures("refusing")
def test_budget_counts_what_was_admitted_and_is_not_there_yet(loaded: object) -> None:
    row = int(256 * Bench(loaded).engine.bytes_per_token)  # type: ignore[arg-type]
    bench = Bench(loaded, kv_budget_bytes=2 * row)  # type: ignore[arg-type]
    rids = [bench.start(p.Open(tokens=PROMPT)) for _ in range(5)]
    bench.idle()
    assert [isinstance(bench.final(rid), p.OpenResult) for rid in rids] == [True, True, False, False, False]
    assert bench.engine.kv_bytes <= 2 * row


@pytest.mark.usefixtures("refusing")
def test_over_budget_what_takes_nothing_more_is_let_through() -> None:
    """Padding took more than foreseen; a client can still shorten its session, and go on in what it has."""
    model = make_tiny_model(context=1024)
    row = int(256 * Bench(model).engine.bytes_per_token)
    bench = Bench(model)
    session, other = bench.open(PROMPT), bench.open()
    bench.decode(session, 600, ignore_eos=True)
    bench.engine.memory.budget_bytes = 2 * row
    assert bench.engine.kv_bytes > 2 * row
    assert isinstance(bench.call(p.Prefill(session=other, tokens=[1])), p.ErrorBody)
    for request in (
        p.Sync(session=session, tokens=PROMPT),
        p.Decode(session=session, max_tokens=1),
        p.Trim(session=session, to=1, replay=True),
    ):
        assert not isinstance(bench.call(request), p.ErrorBody)
    bench.check_law(session)


@pytest.mark.usefixtures("refusing")
def test_a_decode_is_admitted_by_what_it_may_come_to() -> None:
    """B48: refused early, so that streams together never grow past the budget."""
    model = make_tiny_model(context=1024)
    row = int(256 * Bench(model).engine.bytes_per_token)
    bench = Bench(model, kv_budget_bytes=4 * row)
    first, second = bench.open(PROMPT), bench.open(PROMPT)
    rid = bench.start(p.Decode(session=first, max_tokens=600, ignore_eos=True))
    refused = bench.call(p.Decode(session=second, max_tokens=300, ignore_eos=True))
    assert isinstance(refused, p.ErrorBody)
    assert (refused.code, refused.details["needed_bytes"], refused.details["free_bytes"]) == (
        "capacity",
        row,
        0,
    )
    assert bench.session(second).tokens == PROMPT
    small = bench.start(p.Decode(session=second, max_tokens=100, ignore_eos=True))
    while bench.final(rid) is None:
        bench.engine.step()
        # Rows that share padding may take a step more than was foreseen while both are in.
        assert bench.engine.kv_bytes <= 4 * row or bench.final(small) is None
    assert isinstance(bench.final(rid), p.DecodeResult)
    assert bench.engine.kv_bytes <= 4 * row


@pytest.mark.parametrize("architecture", ["lfm2", "falcon_h1", "mamba"])
def test_the_budget_counts_recurrent_states(architecture: str) -> None:
    """They take the same at any length, and a child soon has its own; checkpoints give way."""
    model = make_tiny_model(architecture)
    probe = Bench(model)
    session = probe.session(probe.open(PROMPT))
    one = session.kv_bytes
    assert session.cache is not None
    each = session.cache.branch_bytes()
    assert 0 < each <= one
    bench = Bench(model, kv_budget_bytes=one + 2 * each)
    parent = bench.open(PROMPT)
    assert bench.engine.kv_bytes > one or 2 * each < one
    body = bench.call(p.Fork(session=parent, n=3))
    assert isinstance(body, p.ErrorBody)
    assert (body.code, body.details["needed_bytes"]) == ("capacity", 3 * each)
    assert isinstance(bench.call(p.Fork(session=parent, n=2)), p.ForkResult)
    assert bench.engine.kv_bytes <= one + 2 * each


def test_a_budget_for_the_whole_context_is_enough_for_its_last_tokens(loaded: object) -> None:
    bench = Bench(loaded, kv_budget_bytes=int(CONTEXT * Bench(loaded).engine.bytes_per_token))  # type: ignore[arg-type]
    session = bench.open([5] * (CONTEXT - 12))
    body = bench.call(p.Decode(session=session, max_tokens=100, ignore_eos=True))
    assert isinstance(body, p.DecodeResult)
    assert (body.finish, body.length) == ("context", CONTEXT)


@pytest.mark.parametrize(
    "arguments",
    [{"text": "word " * 1_500_000}, {"messages": [p.Message(role="user", content="word " * 1_500_000)]}],
)
def test_a_hopeless_text_is_refused_by_its_beginning(
    bench: Bench, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams wait while a text is cut into tokens, so megabytes of it are never cut."""
    tokenizer = bench.loaded.tokenizer
    cut: list[int] = []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **o: (cut.append(len(text)), encode(text, **o))[1])
    body = bench.call(p.Open(**arguments))
    assert isinstance(body, p.ErrorBody)
    assert body.code == "too_long"
    assert body.details["length"] > body.details["limit"] == bench.loaded.context
    assert sum(cut) <= 16 * bench.loaded.context


def test_a_second_request_of_a_session_is_busy(bench: Bench) -> None:
    session = bench.open(PROMPT)
    rid = bench.start(p.Decode(session=session, max_tokens=5, ignore_eos=True))
    body = bench.call(p.Trim(session=session, to=2))
    assert isinstance(body, p.ErrorBody)
    assert body.code == "busy"
    bench.finish(rid)


@pytest.mark.parametrize("architecture", ["lfm2", "falcon_h1", "mamba"])
def test_layers_that_cannot_be_trimmed_say_so(architecture: str) -> None:
    """B26, B29, B32: refused whole, with the nearest length, or computed again when asked to."""
    bench = Bench(make_tiny_model(architecture))
    tokens = [(13 * n) % 200 for n in range(30)]
    session = bench.open(tokens)
    assert bench.engine.schemes.dense.caps.trim == "checkpoints"
    body = bench.call(p.Trim(session=session, to=12))
    assert isinstance(body, p.ErrorBody)
    assert body.code == "unsupported"
    assert body.details == {"nearest": 1, "replayed": 12}, "the 30 that it has are further away"
    bench.check_law(session)
    body = bench.call(p.Trim(session=session, to=12, replay=True))
    assert isinstance(body, p.LengthResult)
    assert (body.receipt.reused, body.receipt.prefilled, body.receipt.trimmed) == (0, 12, 18)
    assert body.receipt.why is not None
    assert body.receipt.source == "none"
    bench.check_law(session)


def test_a_scheme_that_this_build_of_mlx_gets_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """B36: at `open`, and again at the next."""
    bench = Bench(make_tiny_model("llama", width=256))
    monkeypatch.setattr(kv, "slices_decode", lambda codec, width: False)
    for _ in range(2):
        body = bench.call(p.Open(tokens=PROMPT, kv=p.KV(scheme="affine8")))
        assert isinstance(body, p.ErrorBody)
        assert (body.code, body.field) == ("unsupported", "kv.scheme")
    assert not bench.engine.sessions
    monkeypatch.undo()
    bench.check_law(bench.open(PROMPT, kv=p.KV(scheme="affine8")))


def test_a_model_whose_pieces_differ_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is kept of it could be right."""
    monkeypatch.setattr(engine, "pieces_agree", lambda model: False)
    with pytest.raises(ModelError, match="in pieces") as refused:
        Bench(make_tiny_model())
    assert refused.value.permanent


def test_a_session_that_is_quantised_later_is_admitted_by_what_it_takes_before() -> None:
    model = make_tiny_model("llama", width=256, context=4096)
    dense = Bench(model).engine.schemes.dense
    budget = dense.projected_bytes(1000, 1)
    for after in (0, 100, 10**6):
        bench = Bench(model, kv_budget_bytes=budget)
        kv = p.KV(scheme="affine4", quantise_after=after)
        opened = {n: bench.call(p.Open(tokens=[1] * n, kv=kv)) for n in (2000, 900)}
        assert isinstance(opened[2000], p.ErrorBody) == (after > 1000)
        assert bench.engine.kv_bytes <= budget


def test_schemes_are_remembered_by_what_they_store() -> None:
    """From which length on has a million values, and anybody may ask for each."""
    bench = Bench(make_tiny_model("llama", width=256))
    for after in range(40):
        session = bench.open([1, 2, 3], kv=p.KV(scheme="affine8", quantise_after=after))
        bench.check_law(session)
        bench.call(p.Close(session=session))
        bench.call(p.Open(tokens=[10**6], kv=p.KV(scheme="affine8", quantise_after=1000 + after)))
    assert len(bench.engine.schemes._served_by) == 2


def test_a_session_whose_tokens_are_none_of_the_models_is_not_adopted(bench: Bench) -> None:
    body = bench.adopt("x", [10**6])
    assert isinstance(body, p.ErrorBody)
    assert body.field == "tokens"
    assert not bench.engine.sessions
