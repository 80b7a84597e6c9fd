"""Speculation in the engine: what is said with it is what is said without, whoever else is served."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import mlx.core as mx
import pytest
from tests.engine.harness import PROMPT, Bench, greedy
from tests.engine.speculating import LOOKUP, always, events, tell
from tests.tiny import CONTEXT, WINDOW, make_tiny_model

from stateroom.client import protocol as p
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.engine.session import Session
from stateroom.daemon.engine.speculation.depth import MEMORY_GUESSES, Costs
from stateroom.daemon.engine.speculation.guesser import Guesser, Guessers
from stateroom.daemon.engine.speculation.lookup import GRAM_MAX, Draft, Lookup

SPECULATIVE = ["llama", "qwen3", "gemma3_text"]
WRONG_FIRST = 150  # tokens
REPEATING = [5, 6, 7, 8, 9] * 4
OPTIONS = {
    "greedy": {},
    "logprobs": {"logprobs": 3},
    "sampled": {"sampling": p.Sampling(temperature=0.8, seed=7)},
    "filtered": {"sampling": p.Sampling(temperature=1.5, top_p=0.8, top_k=20, min_p=0.01, seed=8)},
    "penalised": {
        "sampling": p.Sampling(
            repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.2, repetition_window=12
        )
    },
    "penalised and sampled": {
        "sampling": p.Sampling(temperature=0.9, seed=9, repetition_penalty=1.3, repetition_window=3)
    },
    "biased": {
        "sampling": p.Sampling(logit_bias=[(t, 2.0) for t in range(0, 200, 9)], temperature=0.5, seed=3)
    },
}


@pytest.fixture(scope="module", params=SPECULATIVE)
def family(request: pytest.FixtureRequest) -> LoadedModel:
    return make_tiny_model(request.param)


def said(bench: Bench, rid: int) -> p.DecodeResult:
    body = bench.final(rid)
    assert isinstance(body, p.DecodeResult), body
    told = events(bench, rid)
    assert [token for event in told for token in event.tokens] == body.tokens
    assert "".join(event.text for event in told) == body.text
    return body


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_tokens_as_without(family: LoadedModel, name: str, wrong: float) -> None:
    """B26: rounds of up to 16 guesses, over windows of 16 tokens; none, most or all of them right."""
    bench = always(Bench(family))
    plain = bench.decode(bench.open(PROMPT), 60, ignore_eos=True, **OPTIONS[name])
    session = bench.open(PROMPT)
    tell(bench, session, plain.tokens, wrong)
    steps = bench.engine.decoding.steps
    rid = bench.start(
        p.Decode(session=session, max_tokens=60, ignore_eos=True, speculate=LOOKUP, **OPTIONS[name])
    )
    bench.finish(rid)
    result = said(bench, rid)
    assert (result.tokens, result.text, result.finish) == (plain.tokens, plain.text, plain.finish)
    assert result.usage.accepted <= result.usage.drafted
    if wrong < 1:
        assert result.usage.accepted > 10
        assert bench.engine.decoding.steps - steps < 55
    bench.check_law(session)


def test_log_probabilities_are_those_of_each_place(bench: Bench) -> None:
    always(bench)
    plain = bench.decode(bench.open(PROMPT), 30, ignore_eos=True, logprobs=4, stream=False)
    session = bench.open(PROMPT)
    tell(bench, session, plain.tokens, 0.2)
    result = bench.decode(session, 30, ignore_eos=True, logprobs=4, stream=False, speculate=LOOKUP)
    assert result.usage.accepted > 0
    assert plain.logprobs is not None
    assert result.logprobs is not None
    for one, other in zip(plain.logprobs, result.logprobs, strict=True):
        assert (one.token, [t for t, _ in one.top]) == (other.token, [t for t, _ in other.top])
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_rows_of_every_kind_in_one_group(family: LoadedModel) -> None:
    """Some speculate, some don't, each with options of its own; they come and go. All as if alone."""
    bench = always(Bench(family))
    prompts = {name: [(7 * k + 3 * n) % 190 for k in range(4 + 5 * n)] for n, name in enumerate(OPTIONS)}
    plain = {
        name: bench.decode(bench.open(prompts[name]), 24 + n, ignore_eos=True, **options).tokens
        for n, (name, options) in enumerate(OPTIONS.items())
    }
    rids = {}
    for n, (name, options) in enumerate([*OPTIONS.items(), *OPTIONS.items()]):
        session = bench.open(prompts[name])
        speculate = LOOKUP if n % 3 else None
        if speculate:
            tell(bench, session, plain[name], wrong=0.2 * (n % 4), seed=n)
        rids[n, name, session] = bench.start(
            p.Decode(
                session=session,
                max_tokens=24 + n % len(OPTIONS),
                ignore_eos=True,
                speculate=speculate,
                **options,
            )
        )
        bench.engine.step()
    bench.idle()
    assert not bench.incidents
    accepted = 0
    for (_, name, session), rid in rids.items():
        result = said(bench, rid)
        assert result.tokens == plain[name]
        accepted += result.usage.accepted
        bench.check_law(session)
    assert accepted > 60


def test_looking_up_what_repeats_itself(bench: Bench) -> None:
    """The real drafter. Of three tokens to choose from, runs come again soon."""
    always(bench)
    narrow = p.Sampling(logit_bias=[(token, 100.0) for token in (5, 6, 7)])
    wanted = bench.decode(bench.open(REPEATING), 120, ignore_eos=True, sampling=narrow).tokens
    session = bench.open(REPEATING)
    result = bench.decode(session, 120, ignore_eos=True, sampling=narrow, speculate=LOOKUP)
    assert result.tokens == wanted
    assert result.usage.accepted > 40
    bench.check_law(session)


def test_what_a_sync_replaced_is_guessed(bench: Bench) -> None:
    """The previous version of the buffer, also by its forks; whether or not it had speculated before."""
    always(bench)
    base = [(17 * k + k * k) % 190 for k in range(30)]
    follows = greedy(bench, [*base, 3], 12)
    for before in (False, True):
        session = bench.open([*base, 3, *follows, 4])
        if before:
            bench.decode(session, 2, ignore_eos=True, speculate=LOOKUP)
        assert isinstance(bench.call(p.Sync(session=session, tokens=[*base, 3])), p.LengthResult)
        fork = bench.call(p.Fork(session=session, n=1))
        assert isinstance(fork, p.ForkResult)
        for each in (session, *fork.sessions):
            result = bench.decode(each, 8, ignore_eos=True, speculate=p.Speculate(kind="lookup", max_draft=4))
            assert result.tokens == follows[:8]
            assert result.usage.accepted >= 6
            bench.check_law(each)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9])
def test_never_more_than_was_asked_for(bench: Bench, count: int) -> None:
    always(bench)
    wanted = greedy(bench, PROMPT, 20)
    session = bench.open(PROMPT)
    tell(bench, session, wanted)
    result = bench.decode(session, count, ignore_eos=True, speculate=LOOKUP)
    assert (result.tokens, result.finish) == (wanted[:count], "length")
    assert result.usage.accepted < count
    bench.check_law(session)


def test_the_context_ends_within_a_round(bench: Bench) -> None:
    """Also for a row beside it that has all the room."""
    always(bench)
    prompt = [(3 * k) % 190 for k in range(CONTEXT - 9)]
    wanted, other = greedy(bench, prompt, 9), greedy(bench, PROMPT, 30)
    long, short = bench.open(prompt), bench.open(PROMPT)
    tell(bench, long, wanted)
    tell(bench, short, other)
    rids = [
        bench.start(p.Decode(session=s, max_tokens=30, ignore_eos=True, speculate=LOOKUP))
        for s in (long, short)
    ]
    bench.finish(*rids)
    assert (said(bench, rids[0]).tokens, said(bench, rids[0]).finish) == (wanted, "context")
    assert said(bench, rids[1]).tokens == other
    for session in (long, short):
        bench.check_law(session)


@pytest.mark.parametrize("at", [0, 1, 4, 5])
def test_a_stop_within_a_round(bench: Bench, at: int) -> None:
    """What was guessed beyond it is gone, from text, tokens and KV."""
    always(bench)
    wanted = greedy(bench, PROMPT, 20)
    stop = wanted[at]
    end = wanted.index(stop) + 1
    for options in ({"stop_tokens": [stop]}, {"stop": [bench.loaded.tokenizer.decode([stop], first=False)]}):
        plain = bench.decode(bench.open(PROMPT), 20, ignore_eos=True, **options)
        session = bench.open(PROMPT)
        tell(bench, session, wanted)
        rid = bench.start(
            p.Decode(session=session, max_tokens=20, ignore_eos=True, speculate=LOOKUP, **options)
        )
        bench.finish(rid)
        result = said(bench, rid)
        assert (result.tokens, result.text, result.finish) == (plain.tokens, plain.text, plain.finish)
        if "stop_tokens" in options:
            assert (len(result.tokens), result.finish) == (end, "stop_token")
        bench.check_law(session)


def test_one_event_tells_a_whole_round(bench: Bench) -> None:
    always(bench)
    wanted = greedy(bench, PROMPT, 30)
    session = bench.open(PROMPT)
    held = bench.session(session)
    held.guesser = Guesser()
    held.guesser.lookup.remember([*PROMPT, *wanted])
    rid = bench.start(p.Decode(session=session, max_tokens=30, ignore_eos=True, logprobs=1, speculate=LOOKUP))
    bench.finish(rid)
    told = events(bench, rid)
    assert [len(event.tokens) for event in told] == [17, 13]
    assert all([entry.token for entry in event.logprobs or []] == event.tokens for event in told)
    usage = said(bench, rid).usage
    assert (usage.decoded, usage.drafted, usage.accepted) == (30, 28, 28)


def test_cancelled_within_a_round(bench: Bench) -> None:
    """It ends with the next token, though more were right."""
    always(bench)
    wanted = greedy(bench, PROMPT, 60)
    session = bench.open(PROMPT)
    tell(bench, session, wanted)
    rid = bench.start(p.Decode(session=session, max_tokens=60, ignore_eos=True, speculate=LOOKUP))
    while not bench.engine.decoding.batches or not bench.engine.decoding.batches[0].in_round:
        bench.engine.step()
    before = bench.session(session).length
    bench.cancel(rid)
    bench.finish(rid)
    result = said(bench, rid)
    assert result.finish == "cancelled"
    assert bench.session(session).length <= before + 1
    assert result.tokens == wanted[: len(result.tokens)]
    bench.check_law(session)
    assert bench.decode(session, 5, ignore_eos=True).tokens == wanted[len(result.tokens) :][:5]


def spoiled(token: int) -> Bench:
    """An engine whose model makes NaN of everything behind one token."""
    bench = always(Bench(make_tiny_model("llama")))
    embedding = bench.loaded.model.model.embed_tokens
    embedding.weight[token] = mx.full(embedding.weight.shape[1], float("nan"))
    return bench


@pytest.mark.parametrize("at", [0, 1, 3])
def test_nan_within_a_round_ends_it_at_the_last_good_token(bench: Bench, at: int) -> None:
    """X6: as plain decode does, with the token whose successor can't be drawn; the row beside it goes on."""
    wanted, other = greedy(bench, PROMPT, 20), greedy(bench, [9] * 12, 20)
    bad = wanted[at]
    assert bad not in [*PROMPT, 9, *other]
    bench = spoiled(bad)
    clean, session = bench.open([9] * 12), bench.open(PROMPT)
    tell(bench, session, wanted)
    tell(bench, clean, other)
    rids = [
        bench.start(p.Decode(session=s, max_tokens=20, ignore_eos=True, speculate=LOOKUP))
        for s in (session, clean)
    ]
    bench.finish(*rids)
    failed = bench.final(rids[0])
    assert isinstance(failed, p.ErrorBody)
    assert failed.code == "numeric"
    good = wanted[: wanted.index(bad) + 1]
    assert [token for event in events(bench, rids[0]) for token in event.tokens] == good
    assert bench.session(session).tokens == bench.journal[session] == PROMPT + good
    assert failed.details["length"] == len(PROMPT + good)
    assert said(bench, rids[1]).tokens == other
    bench.check_law(clean)


def test_nan_behind_a_wrong_guess_is_nobodys(bench: Bench) -> None:
    """What was never drawn is as if it had never been fed, also for the rows beside it."""
    prompts = [PROMPT, [9] * 12, [4] * 3]
    wanted = [greedy(bench, prompt, 20) for prompt in prompts]
    bad = next(token for token in range(200) if not any(token in row for row in [*wanted, *prompts]))
    bench = spoiled(bad)
    sessions = [bench.open(prompt) for prompt in prompts]
    for session, row in zip(sessions, wanted, strict=True):
        tell(bench, session, [bad if k % 3 == 1 else token for k, token in enumerate(row)])
    rids = [
        bench.start(p.Decode(session=s, max_tokens=20, ignore_eos=True, speculate=LOOKUP)) for s in sessions
    ]
    bench.finish(*rids)
    assert [said(bench, rid).tokens for rid in rids] == wanted
    for session in sessions:
        bench.check_law(session)


@pytest.mark.parametrize("architecture", ["lfm2", "falcon_h1", "mamba"])
def test_models_with_states_refuse_by_name(architecture: str) -> None:
    """A state can't be taken back by single tokens. The session is as it was."""
    bench = Bench(make_tiny_model(architecture))
    opened = bench.call(p.Open(tokens=PROMPT))
    assert isinstance(opened, p.OpenResult)
    assert not opened.caps.speculative
    body = bench.call(p.Decode(session=opened.session, max_tokens=4, speculate=LOOKUP))
    assert isinstance(body, p.ErrorBody)
    assert (body.code, body.field) == ("unsupported", "speculate")
    assert bench.session(opened.session).tokens == PROMPT


def test_caps_say_so(family: LoadedModel) -> None:
    opened = Bench(family).call(p.Open(tokens=PROMPT))
    assert isinstance(opened, p.OpenResult)
    assert opened.caps.speculative


@pytest.mark.parametrize("scheme", [{"scheme": "affine8"}, {"scheme": "affine8", "quantise_after": 20}])
def test_quantised_sessions_too(scheme: dict[str, object]) -> None:
    """Also across the point from which they are quantised, which ends a round early."""
    bench = always(Bench(make_tiny_model("llama", width=256)))
    plain = bench.decode(bench.open(PROMPT, kv=p.KV(**scheme)), 40, ignore_eos=True)
    session = bench.open(PROMPT, kv=p.KV(**scheme))
    tell(bench, session, plain.tokens, 0.1)
    result = bench.decode(session, 40, ignore_eos=True, speculate=LOOKUP)
    assert result.tokens == plain.tokens
    assert result.usage.accepted > 5
    bench.check_law(session)


def test_forks_of_one_trunk_keep_their_own_numbers() -> None:
    bench = always(Bench(make_tiny_model("llama"), shared_min=1))
    wanted = greedy(bench, PROMPT, 30)
    session = bench.open(PROMPT)
    fork = bench.call(p.Fork(session=session, n=3))
    assert isinstance(fork, p.ForkResult)
    sessions = [session, *fork.sessions]
    for n, each in enumerate(sessions):
        tell(bench, each, wanted, wrong=0.3 * n, seed=n)
    rids = [
        bench.start(p.Decode(session=s, max_tokens=30, ignore_eos=True, speculate=LOOKUP)) for s in sessions
    ]
    bench.finish(*rids)
    assert all(said(bench, rid).tokens == wanted for rid in rids)
    for each in sessions:
        bench.check_law(each)
        bench.call(p.Trim(session=each, to=20))
        bench.check_law(each)


class Steep(Costs):
    """Each token more of a row costs a third of a pass."""

    def of(self, rows: int, width: int) -> float:
        return 1.0 + (width - 1) / 3


class WrongAtFirst(Lookup):
    """Guesses four of the tokens that it was told, each wrong at first."""

    def __init__(self, start: int, tokens: list[int]) -> None:
        super().__init__()
        self._start, self._tokens = start, tokens

    def draft(self, tokens: Sequence[int], most: int) -> Draft:
        at = len(tokens) - self._start
        guesses = self._tokens[at : at + min(most, 4)]
        return Draft([token + 1 for token in guesses] if at < WRONG_FIRST else guesses, 3)


def test_what_loses_is_switched_off_and_comes_back(bench: Bench) -> None:
    """Guesses that aren't right are verified no more, but looked at all the same: soon they are again."""
    bench.engine.decoding.rounds.costs = Steep()
    wanted = greedy(bench, PROMPT, 400)
    session = bench.open(PROMPT)
    bench.session(session).guesser = Guesser(lookup=WrongAtFirst(len(PROMPT), wanted))
    rid = bench.start(p.Decode(session=session, max_tokens=400, ignore_eos=True, speculate=LOOKUP))
    bench.finish(rid)
    result = said(bench, rid)
    assert result.tokens == wanted
    sizes = [len(event.tokens) for event in events(bench, rid)]
    began = next(at for at, size in zip(itertools.accumulate(sizes), sizes, strict=True) if size > 1)
    assert WRONG_FIRST < began <= WRONG_FIRST + 2 * MEMORY_GUESSES
    assert 0 < result.usage.drafted - result.usage.accepted < 10
    assert result.usage.accepted > 0.7 * (400 - began)


def test_guessers_are_bounded() -> None:
    guessers = Guessers(most=3)
    served = Bench(make_tiny_model("llama")).engine.schemes.dense
    sessions = [Session(str(n), served, tokens=[1, 2, 3]) for n in range(5)]
    for session in sessions:
        assert guessers.of(session) is session.guesser
    assert [session.guesser is not None for session in sessions] == [False, False, True, True, True]
    guessers.of(sessions[2])
    guessers.of(sessions[0])
    assert [session.guesser is not None for session in sessions] == [True, False, True, False, True]
    guessers.forget(sessions[0])
    guessers.of(sessions[1])
    assert sessions[2].guesser is not None


def test_a_session_remembers_what_its_last_cut_dropped(bench: Bench) -> None:
    session = bench.session(bench.open([*range(20)]))
    session.cut(15)
    assert session.tokens == [*range(15)]
    assert session.replaced == [*range(15 - GRAM_MAX, 20)]
    session.cut(15)
    assert session.replaced == [*range(15 - GRAM_MAX, 20)]


def test_rounds_respect_windows_that_wrap() -> None:
    """B26: window 16, rounds across its edge, most of each taken back."""
    bench = always(Bench(make_tiny_model("gemma3_text")))
    wanted = greedy(bench, PROMPT[:3], 4 * WINDOW)
    session = bench.open(PROMPT[:3])
    tell(bench, session, wanted, wrong=0.6, seed=2)
    speculate = p.Speculate(kind="lookup", max_draft=4)
    result = bench.decode(session, 4 * WINDOW, ignore_eos=True, speculate=speculate)
    assert result.tokens == wanted
    assert 0 < result.usage.accepted < result.usage.drafted
    bench.check_law(session)
