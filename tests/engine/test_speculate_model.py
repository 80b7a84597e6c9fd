"""A second model that guesses: what is said is what is said without it, and its KV follows the session's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.engine.harness import PROMPT, Bench, greedy
from tests.engine.speculating import always
from tests.tiny import make_tiny_model

from stateroom.client import protocol as p
from stateroom.client.errors import Unsupported
from stateroom.daemon.engine.memory import STEP
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.engine.problem import ModelError
from stateroom.daemon.engine.speculation.drafter import FEED_MAX, Drafter
from stateroom.daemon.engine.text import Tokenizer
from stateroom.daemon.scheduler.pace import QUANTUM_MAX

ROUNDS = 200  # tokens are drawn for at least so many
BY_MODEL = p.Speculate(kind="model", model="small", max_draft=3)


def drafted_by(served: LoadedModel, drafter: LoadedModel, **options: object) -> Bench:
    return always(Bench(served, load_drafter=lambda _: drafter, **options))


@pytest.fixture(scope="module")
def small() -> LoadedModel:
    return make_tiny_model("llama", layers=1, width=16)


@pytest.mark.parametrize("sampling", [p.Sampling(), p.Sampling(temperature=0.9, top_p=0.95, seed=5)])
def test_a_model_that_drafts_for_itself_is_always_right(sampling: p.Sampling) -> None:
    """B28: over 200 rounds. Whenever it guesses, its KV is of all tokens but the pending one."""
    loaded = make_tiny_model("llama", context=1024)
    bench = drafted_by(loaded, loaded)
    session = bench.open(PROMPT)
    held = bench.session(session)
    drafter = bench.engine.drafter("small")
    whole, lengths = drafter._caught_up, []

    def caught_up(own, tokens):  # type: ignore[no-untyped-def]
        missing = len(tokens) - 1 - own.held
        done = whole(own, tokens)
        lengths.append((missing, own.held, len(tokens) - 1))
        return done

    drafter._caught_up = caught_up  # type: ignore[method-assign]
    plain = bench.decode(bench.open(PROMPT), 4 * ROUNDS, ignore_eos=True, sampling=sampling)
    result = bench.decode(session, 4 * ROUNDS, ignore_eos=True, sampling=sampling, speculate=BY_MODEL)
    assert result.tokens == plain.tokens
    assert len(lengths) >= ROUNDS
    assert result.usage.accepted >= 0.98 * result.usage.drafted
    assert all(there == wanted for _, there, wanted in lengths)
    assert all(missing == 1 for missing, *_ in lengths[1:])  # all of a round was right: its last guess
    assert held.guesser is not None
    assert held.guesser.drafts is not None
    assert held.guesser.drafts.held <= held.length - 1
    bench.check_law(session)


def test_a_smaller_model_is_right_now_and_then(small: LoadedModel) -> None:
    """Its KV is cut by what was wrong and no more; rows of a group keep their own numbers."""
    served = make_tiny_model("llama")
    bench = drafted_by(served, small)
    prompts = [PROMPT, [9] * 12, [4, 5, 6]]
    biased = p.Sampling(logit_bias=[(token, 100.0) for token in (5, 6, 7)])  # of three tokens some are right
    plain = [bench.decode(bench.open(q), 60, ignore_eos=True, sampling=biased).tokens for q in prompts]
    sessions = [bench.open(prompt) for prompt in prompts]
    rids = [
        bench.start(p.Decode(session=s, max_tokens=60, ignore_eos=True, sampling=biased, speculate=speculate))
        for s, speculate in zip(sessions, (BY_MODEL, BY_MODEL, p.Speculate(kind="lookup")), strict=True)
    ]
    bench.finish(*rids)
    for rid, session, wanted in zip(rids, sessions, plain, strict=True):
        body = bench.final(rid)
        assert isinstance(body, p.DecodeResult)
        assert body.tokens == wanted
        assert 0 < body.usage.accepted < body.usage.drafted
        bench.check_law(session)


def test_it_follows_trims_syncs_and_long_prompts(small: LoadedModel) -> None:
    served = make_tiny_model("llama", context=1024)
    bench = drafted_by(served, served)
    long = [(7 * k) % 190 for k in range(2 * FEED_MAX + 50)]
    session = bench.open(long)
    wanted = greedy(bench, long, 30)
    result = bench.decode(session, 30, ignore_eos=True, speculate=BY_MODEL)
    assert result.tokens == wanted
    assert result.usage.accepted > 10
    bench.call(p.Trim(session=session, to=100))
    bench.call(p.Sync(session=session, tokens=[*long[:50], 3, 4]))
    held = bench.session(session)
    assert held.guesser is not None
    assert held.guesser.drafts is not None
    assert held.guesser.drafts.held == 49
    result = bench.decode(session, 12, ignore_eos=True, speculate=BY_MODEL)
    assert result.tokens == greedy(bench, [*long[:50], 3, 4], 12)
    assert result.usage.accepted == result.usage.drafted > 6
    bench.check_law(session)


def test_its_kv_is_in_the_budget(small: LoadedModel) -> None:
    served = make_tiny_model("llama")
    bench = drafted_by(served, small)
    session = bench.open(PROMPT)
    before = bench.engine.kv_bytes
    bench.decode(session, 8, ignore_eos=True, speculate=BY_MODEL)
    drafts = bench.session(session).guesser
    assert drafts is not None
    assert drafts.drafts is not None
    assert bench.engine.kv_bytes == before + drafts.drafts.nbytes
    bench.call(p.Close(session=session))
    assert bench.engine.kv_bytes == 0
    need = bench.engine.schemes.dense.projected_bytes(20, 1)
    poor = drafted_by(served, small, kv_budget_bytes=need + 1)
    session = poor.open(PROMPT)
    refused = poor.call(p.Decode(session=session, max_tokens=8, speculate=BY_MODEL))
    assert isinstance(refused, p.ErrorBody)
    assert refused.code == "capacity"
    assert poor.decode(session, 8, ignore_eos=True).finish == "length"


class TestRefused:
    """By name, and nothing changes."""

    def asked(self, bench: Bench, model: str = "small") -> p.ErrorBody:
        session = bench.open(PROMPT)
        body = bench.call(
            p.Decode(session=session, max_tokens=4, speculate=p.Speculate(kind="model", model=model))
        )
        assert isinstance(body, p.ErrorBody)
        assert bench.session(session).tokens == PROMPT
        assert bench.decode(session, 2, ignore_eos=True).finish == "length"
        return body

    def test_other_tokens(self, small: LoadedModel) -> None:
        """B35: a drafter of another vocabulary."""
        own = small.tokenizer
        for spelled, vocab in (("x", own.vocab), (None, own.vocab - 1)):
            other = Tokenizer(
                lambda text: own.encode(text, first=False),
                lambda tokens, spelled=spelled: spelled or own.decode(tokens, first=False),
                prefix=own.prefix,
                eos=own.eos,
                vocab=vocab,
            )
            body = self.asked(drafted_by(make_tiny_model("llama"), replace(small, tokenizer=other)))
            assert (body.code, body.field) == ("unsupported", "speculate.model")
            assert "other tokens" in body.message

    @pytest.mark.parametrize("architecture", ["lfm2", "mamba", "gemma3_text"])
    def test_layers_that_cannot_go_back(self, architecture: str) -> None:
        bench = drafted_by(make_tiny_model("llama"), make_tiny_model(architecture))
        body = self.asked(bench)
        assert (body.code, body.field) == ("unsupported", "speculate.model")

    def test_a_second_one(self, small: LoadedModel) -> None:
        bench = drafted_by(make_tiny_model("llama"), small)
        bench.engine.drafter("small")
        assert self.asked(bench, "another").field == "speculate.model"
        with pytest.raises(Unsupported):
            bench.engine.drafter("another")
        assert isinstance(bench.engine.drafter("small"), Drafter)

    def test_one_that_cannot_be_loaded(self, small: LoadedModel) -> None:
        def load(_: str) -> LoadedModel:
            raise ModelError("There is no such folder.", permanent=True)

        body = self.asked(Bench(make_tiny_model("llama"), load_drafter=load))
        assert (body.code, body.field) == ("unsupported", "speculate.model")


@pytest.mark.parametrize("lost", [False, True])
def test_both_models_are_admitted_together(small: LoadedModel, lost: bool) -> None:
    """Room for either isn't room for both; and what a session's drafts hold already isn't asked for again."""
    bench = drafted_by(make_tiny_model("llama", context=2048), small)
    session = "lost" if lost else bench.open([3] * 200)
    if lost:
        bench.adopt(session, [3] * 200)
    ask = p.Decode(session=session, max_tokens=800, ignore_eos=True, speculate=BY_MODEL)
    memory, held = bench.engine.memory, bench.session(session)
    drafts = bench.engine.drafter("small").projected_bytes(1000)
    if lost:
        own = held.served.projected_bytes(1000, QUANTUM_MAX)
    else:
        own = held.served.projected_bytes(1000, STEP) - bench.engine.kv_bytes
    memory.budget_bytes = bench.engine.kv_bytes + own + drafts - 1
    refused = bench.call(ask)
    assert isinstance(refused, p.ErrorBody)
    assert refused.details["needed_bytes"] == own + drafts
    memory.budget_bytes += 1
    rid = bench.start(ask)
    while bench.final(rid) is None:
        bench.engine.step()
        assert bench.engine.kv_bytes <= memory.budget_bytes
    assert isinstance(bench.final(rid), p.DecodeResult)
    assert isinstance(bench.call(replace(ask, max_tokens=1)), p.DecodeResult)
