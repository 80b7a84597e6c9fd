"""A decode that one worker began and another ends: the same tokens and text as if there had been one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.engine.harness import PROMPT, Bench
from tests.engine.speculating import LOOKUP, events
from tests.tiny import CONTEXT

from stateroom.client import protocol as p
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.engine.stream import TOLD_EVERY

MOST = 48
CUTS = (0, 1, 2, 7, 23, 46, 47)  # tokens that the first worker told
SAMPLED = p.Sampling(temperature=1.2, top_p=0.9, seed=11)
PENALISED = p.Sampling(
    temperature=0.7, seed=5, repetition_penalty=1.4, frequency_penalty=0.2, repetition_window=10
)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampling": SAMPLED},
    "penalised": {"sampling": PENALISED},
    "logprobs": {"sampling": SAMPLED, "logprobs": 2},
    "speculating": {"sampling": SAMPLED, "speculate": LOOKUP},
}


def streamed(bench: Bench, rid: int) -> tuple[list[int], str]:
    told = events(bench, rid)
    return [token for event in told for token in event.tokens], "".join(event.text for event in told)


def resumed(loaded: LoadedModel, request: p.Decode, held: list[int], base: int) -> tuple[Bench, int]:
    """Another worker ends it: the session holds `held`, the first `base` of them since before it began."""
    bench = Bench(loaded)
    bench.adopt("s", held)
    rid = bench.start(replace(request, session="s"), base=base)
    bench.finish(rid)
    return bench, rid


@pytest.mark.parametrize("name", OPTIONS)
def test_another_worker_goes_on_at_the_next_token(loaded: LoadedModel, name: str) -> None:
    """Whatever it draws by; text that was told is neither told again nor lost; counts are of the whole."""
    bench = Bench(loaded)
    request = p.Decode(session=bench.open(PROMPT), max_tokens=MOST, ignore_eos=True, **OPTIONS[name])
    whole = bench.start(request)
    result = bench.finish(whole)
    assert isinstance(result, p.DecodeResult)
    told = events(bench, whole)
    for cut in CUTS:
        before, text = [], ""
        for event in told:
            if len(before) + len(event.tokens) > cut:
                break
            before += event.tokens
            text += event.text
        other, rid = resumed(loaded, request, [*PROMPT, *before], len(PROMPT))
        ended = other.final(rid)
        assert isinstance(ended, p.DecodeResult), ended
        assert (ended.tokens, ended.text, ended.finish) == (result.tokens, result.text, result.finish)
        assert (ended.length, ended.usage.decoded) == (result.length, result.usage.decoded)
        tokens, more = streamed(other, rid)
        assert before + tokens == result.tokens
        assert text + more == result.text
        assert all((event.logprobs is not None) == ("logprobs" in name) for event in events(other, rid))
        assert other.journal["s"] == [*PROMPT, *result.tokens]
        other.check_law("s")


def test_a_stop_string_across_the_seam_is_found(loaded: LoadedModel) -> None:
    """Its first part was drawn by the first worker, and held back; so was half of a character."""
    bench = Bench(loaded)
    text = bench.decode(bench.open(PROMPT), MOST, ignore_eos=True, sampling=SAMPLED).text
    stop = text[9:14]
    assert len(stop) == 5
    request = p.Decode(
        session=bench.open(PROMPT), max_tokens=MOST, ignore_eos=True, sampling=SAMPLED, stop=[stop]
    )
    whole = bench.start(request)
    result = bench.finish(whole)
    assert isinstance(result, p.DecodeResult)
    assert result.finish == "stop"
    assert stop not in result.text
    for cut in range(len(result.tokens)):
        before = result.tokens[:cut]
        shown = "".join(event.text for event in events(bench, whole)[:cut])
        other, rid = resumed(loaded, request, [*PROMPT, *before], len(PROMPT))
        ended = other.final(rid)
        assert isinstance(ended, p.DecodeResult)
        assert (ended.tokens, ended.text, ended.finish) == (result.tokens, result.text, "stop")
        assert shown + streamed(other, rid)[1] == result.text


@pytest.mark.parametrize("ends", ["length", "stop_token", "context"])
def test_one_that_had_ended_ends_at_once(loaded: LoadedModel, ends: str) -> None:
    """The first worker died between its last token and its result: nothing is computed for that."""
    bench = Bench(loaded)
    prompt = [(7 * k) % 200 for k in range(CONTEXT - 5)] if ends == "context" else PROMPT
    plain = bench.decode(bench.open(prompt), 5, ignore_eos=True).tokens
    stops = [plain[-1]] if ends == "stop_token" else None
    most = 5 if ends == "length" else 40
    request = p.Decode(session=bench.open(prompt), max_tokens=most, ignore_eos=True, stop_tokens=stops)
    result = bench.call(request)
    assert isinstance(result, p.DecodeResult)
    assert result.finish == ends
    other, rid = resumed(loaded, request, [*prompt, *result.tokens], len(prompt))
    ended = other.final(rid)
    assert isinstance(ended, p.DecodeResult), ended
    assert (ended.tokens, ended.text, ended.finish) == (result.tokens, result.text, ends)
    assert ended.usage.prefilled == 0
    assert not events(other, rid)
    assert other.engine.filling.tokens == 0


def test_one_that_is_not_streamed_is_told_now_and_then(loaded: LoadedModel) -> None:
    """So that another worker needs to draw but the last few again, and the session gets on for the broker."""
    bench = Bench(loaded)
    session = bench.open(PROMPT)
    request = p.Decode(session=session, max_tokens=MOST, stream=False, ignore_eos=True, sampling=SAMPLED)
    rid = bench.start(request)
    result = bench.finish(rid)
    assert isinstance(result, p.DecodeResult)
    asides = [journal for journal in bench.asides if journal.session == session]
    assert [len(journal.tokens) for journal in asides] == [TOLD_EVERY] * (MOST // TOLD_EVERY - 1)
    assert bench.bodies[rid] == [result]
    assert bench.journal[session] == [*PROMPT, *result.tokens]
    other, again = resumed(loaded, request, [*PROMPT, *result.tokens[:TOLD_EVERY]], len(PROMPT))
    ended = other.final(again)
    assert isinstance(ended, p.DecodeResult)
    assert (ended.tokens, ended.text) == (result.tokens, result.text)
    assert other.journal["s"] == [*PROMPT, *result.tokens]


def test_log_probabilities_of_one_that_is_not_streamed_are_whole(loaded: LoadedModel) -> None:
    """They can't be told again, so nothing is told before the end, and another worker begins at the base."""
    bench = Bench(loaded)
    request = p.Decode(session=bench.open(PROMPT), max_tokens=MOST, stream=False, ignore_eos=True, logprobs=1)
    result = bench.call(request)
    assert isinstance(result, p.DecodeResult)
    assert not bench.asides
    other, rid = resumed(loaded, request, PROMPT, len(PROMPT))
    ended = other.final(rid)
    assert isinstance(ended, p.DecodeResult)
    assert ended.tokens == result.tokens
    assert len(ended.logprobs or ()) == MOST


def test_one_that_is_cancelled_while_its_kv_comes_back_keeps_what_it_had(loaded: LoadedModel) -> None:
    bench = Bench(loaded)
    prompt = PROMPT * 10
    request = p.Decode(session=bench.open(prompt), max_tokens=MOST, ignore_eos=True)
    result = bench.call(request)
    assert isinstance(result, p.DecodeResult)
    other = Bench(loaded)
    other.adopt("s", [*prompt, *result.tokens[:10]])
    rid = other.start(replace(request, session="s"), base=len(prompt))
    other.cancel(rid)
    ended = other.finish(rid)
    assert isinstance(ended, p.DecodeResult)
    assert (ended.finish, ended.tokens) == ("cancelled", result.tokens[:10])
    assert result.text.startswith(ended.text)
    assert ended.text
    assert ended.usage.decoded == 10
