"""Sessions in company, on every architecture: hard cases of batching that the law could pass by chance."""

from __future__ import annotations

import gc
import itertools

import mlx.core as mx
import pytest
from tests.engine.harness import Bench
from tests.tiny import WINDOW, make_tiny_model

from stateroom.client import protocol as p
from stateroom.daemon.engine.model import LoadedModel

ARCHITECTURES = ["llama", "qwen3", "gemma3_text", "lfm2", "falcon_h1", "mamba"]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def family(request: pytest.FixtureRequest) -> LoadedModel:
    return make_tiny_model(request.param)


def decode_together(bench: Bench, sessions: list[str], tokens: int, **more: object) -> list[p.DecodeResult]:
    rids = [
        bench.start(p.Decode(session=s, max_tokens=tokens, ignore_eos=True, stream=False, **more))  # type: ignore[arg-type]
        for s in sessions
    ]
    bench.finish(*rids)
    results = [bench.final(rid) for rid in rids]
    assert all(isinstance(result, p.DecodeResult) for result in results), results
    return results  # type: ignore[return-value]


def test_rows_of_equal_length_are_each_rotated(family: LoadedModel) -> None:
    """B01: level rows, one new token a step: every row as if it were alone, not only the first."""
    bench = Bench(family)
    prompts = [[13 * n + k for k in range(9)] for n in range(3)]
    alone = [bench.decode(bench.open(prompt), 8, ignore_eos=True).tokens for prompt in prompts]
    sessions = [bench.open(prompt) for prompt in prompts]
    together = decode_together(bench, sessions, 8)
    assert [result.tokens for result in together] == alone
    for session in sessions:
        bench.check_law(session)


def test_wrapped_and_unwrapped_windows_in_any_order() -> None:
    """B07: one window has wrapped token by token, one not at all, one within its prefill."""
    loaded = make_tiny_model("gemma3_text")
    for order in itertools.permutations(range(3)):
        bench = Bench(loaded)
        stepped = bench.open([5])
        bench.decode(stepped, WINDOW + 6, ignore_eos=True)
        short = bench.open([9, 8, 7])
        long = bench.open([(11 * k) % 97 for k in range(WINDOW + 7)])
        sessions = [stepped, short, long]
        decode_together(bench, [sessions[n] for n in order], 5)
        for session in sessions:
            bench.check_law(session)


def test_a_row_does_not_depend_on_what_its_neighbour_says(family: LoadedModel) -> None:
    """B15: with the same shapes and another neighbour, a row's numbers are the same to the last bit."""
    seen = []
    for filler in (3, 150):
        bench = Bench(family)
        row, neighbour = bench.open([10, 20, 30, 40, 50]), bench.open([filler] * 23)
        result = decode_together(bench, [row, neighbour], 6, logprobs=20)[0]
        assert result.logprobs is not None
        seen.append([(entry.token, entry.logprob, entry.top) for entry in result.logprobs])
    assert seen[0] == seen[1]


def test_the_length_of_a_neighbour_moves_a_row_by_rounding_only(family: LoadedModel) -> None:
    """B15, B05: other shapes round otherwise; no more than that."""
    seen = []
    for length in (5, 40):
        bench = Bench(family)
        row, neighbour = bench.open([10, 20, 30, 40, 50]), bench.open([77] * length)
        result = decode_together(bench, [row, neighbour], 6, logprobs=20)[0]
        assert result.logprobs is not None
        seen.append(result.logprobs)
    for one, other in zip(*seen, strict=True):
        assert one.token == other.token
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_memory_returns_when_sessions_go() -> None:
    """B51: sessions grow, are trimmed, forked and closed; nothing keeps their buffers afterwards."""
    bench = Bench(make_tiny_model("llama"))
    baseline = 0
    for turn in range(6):
        session = bench.open([turn + 1] * 300)
        body = bench.call(p.Fork(session=session, n=2))
        assert isinstance(body, p.ForkResult)
        children = list(body.sessions)
        decode_together(bench, children, 8)
        bench.call(p.Trim(session=session, to=10))
        bench.decode(session, 4, ignore_eos=True)
        for each in [session, *children]:
            assert isinstance(bench.call(p.Close(session=each)), p.CloseResult)
        bench.idle()
        gc.collect()
        held = mx.get_active_memory()
        if turn == 1:  # the first turns compile and keep constants
            baseline = held
        if turn > 1:
            assert held <= baseline + 64 * 1024
