"""Draws against a float64 oracle in numpy, and their independence of the batch (B23, X6)."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateroom.client.errors import Invalid
from stateroom.client.protocol import Sampling
from stateroom.daemon.engine import sampling as drawing
from stateroom.daemon.engine.sampling import Row, _adjust, check, row_key, sample

V = 37
Array = np.ndarray


def logits_of(batch: int, vocab: int = V, seed: int = 0, scale: float = 3.0) -> Array:
    return (np.random.default_rng(seed).normal(size=(batch, vocab)) * scale).astype(np.float32)


def draw(logits: Array, rows: list[Row]) -> list[int]:
    drawn = sample(mx.array(logits), rows)
    tokens: list[int] = drawn.tokens.tolist()  # type: ignore[assignment]
    return tokens


# ---------------------------------------------------------------- the oracle


def log_softmax(logits: Array) -> Array:
    logits = logits.astype(np.float64)
    return logits - (logits.max() + np.log(np.exp(logits - logits.max()).sum()))


def adjusted(logits: Array, row: Row) -> Array:
    """Bias and penalties, one token at a time."""
    out = logits.astype(np.float64).copy()
    for token, bias in row.sampling.logit_bias or ():
        out[token] += bias
    history = [*row.history, *(row.last.tolist() if row.last is not None else ())]
    for token, count in Counter(history[-row.sampling.repetition_window :]).items():
        penalty = row.sampling.repetition_penalty
        out[token] = out[token] * penalty if out[token] < 0 else out[token] / penalty
        out[token] -= count * row.sampling.frequency_penalty + row.sampling.presence_penalty
    return out


def distribution(logits: Array, row: Row) -> Array:
    """Probabilities of every token, in float64, by the plainest reading of the options."""
    sampling = row.sampling
    logprobs = log_softmax(adjusted(logits, row))
    order = np.argsort(-logprobs, kind="stable")
    kept = []
    mass = 0.0
    for token in order:
        if mass >= sampling.top_p and sampling.top_p < 1:
            break
        kept.append(token)
        mass += math.exp(logprobs[token])
    kept = [token for token in kept if logprobs[token] >= logprobs.max() + math.log(sampling.min_p or 1e-300)]
    if 0 < sampling.top_k < len(logits):
        kept = kept[: sampling.top_k]
    made = np.zeros(len(logits))
    if sampling.temperature == 0:
        made[kept[0]] = 1
        return made
    scaled = log_softmax(logprobs[kept] / sampling.temperature)
    made[kept] = np.exp(scaled)
    return made


OPTIONS = {
    "plain": Sampling(temperature=1.0),
    "hot": Sampling(temperature=2.5),
    "cold": Sampling(temperature=0.3),
    "top_p": Sampling(temperature=1.0, top_p=0.7),
    "top_k": Sampling(temperature=1.0, top_k=5),
    "min_p": Sampling(temperature=1.0, min_p=0.15),
    "all": Sampling(temperature=0.8, top_p=0.9, top_k=7, min_p=0.02),
    "wide": Sampling(temperature=1.0, top_k=V, top_p=1.0),
    "penalties": Sampling(
        temperature=1.0, repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.5, top_k=20
    ),
    "window": Sampling(temperature=1.0, repetition_penalty=1.5, frequency_penalty=-0.5, repetition_window=3),
    "bias": Sampling(temperature=1.0, logit_bias=[(0, 4.0), (3, -8.0), (0, 0.5), (36, 2.0)]),
    "everything": Sampling(
        temperature=0.9,
        top_p=0.95,
        top_k=11,
        min_p=0.01,
        repetition_penalty=1.2,
        frequency_penalty=0.1,
        presence_penalty=-0.4,
        repetition_window=5,
        logit_bias=[(5, 3.0)],
    ),
}
HISTORY = [1, 2, 2, 5, 9, 1, 36]


# ---------------------------------------------------------------- distributions


@pytest.mark.parametrize("name", OPTIONS)
def test_draws_follow_the_distribution(name: str) -> None:
    """Chi-square over fixed seeds; a token that the filters drop is never drawn."""
    draws, batch = 6000, 500
    logits = logits_of(1, seed=3)[0]
    row = Row(OPTIONS[name], history=HISTORY, last=mx.array([8], dtype=mx.uint32))
    expected = distribution(logits, row) * draws
    seen = np.zeros(V)
    for start in range(0, draws, batch):
        rows = [replace(row, seed=7, position=start + i) for i in range(batch)]
        for token in draw(np.repeat(logits[None], batch, axis=0), rows):
            seen[token] += 1
    assert (seen[expected == 0] == 0).all()
    # Cells with few expected draws are put together.
    large = expected >= 5
    cells = [(seen[i], expected[i]) for i in np.flatnonzero(large)]
    if expected[~large].sum() > 0:
        cells.append((seen[~large].sum(), expected[~large].sum()))
    statistic = sum((a - b) ** 2 / b for a, b in cells)
    freedom = max(1, len(cells) - 1)
    # Wilson and Hilferty's cube-root form; 4 standard deviations.
    bound = freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound


@given(
    seed=st.integers(0, 2**32 - 1),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, V + 3),
    min_p=st.floats(0.0, 1.0),
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
)
@settings(max_examples=60, deadline=None)
def test_what_the_filters_keep(seed: int, top_p: float, top_k: int, min_p: float, temperature: float) -> None:
    """Exactly the oracle's tokens can be drawn: 400 draws of hot rows stay within it."""
    logits = logits_of(1, seed=seed, scale=1.0)[0]
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    allowed = distribution(logits, Row(sampling)) > 0
    loose = distribution(logits, Row(replace(sampling, top_p=min(1.0, top_p * 1.00001)))) > 0
    rows = [Row(sampling, seed=seed, position=i) for i in range(400)]
    drawn = set(draw(np.repeat(logits[None], 400, axis=0), rows))
    assert all(allowed[token] or loose[token] for token in drawn)
    if temperature == 3.0 and allowed.sum() <= 8:
        assert len(drawn) == allowed.sum()


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_takes_the_best_of_the_adjusted_logits(name: str) -> None:
    sampling = replace(OPTIONS[name], temperature=0.0)
    for seed in range(20):
        logits = logits_of(1, seed=seed)
        row = Row(sampling, history=HISTORY, last=mx.array([8], dtype=mx.uint32))
        assert draw(logits, [row]) == [int(adjusted(logits[0], row).argmax())]


def test_one_candidate_is_greedy() -> None:
    logits = np.zeros((1, V), dtype=np.float32)
    logits[0, [4, 9]] = 5.0  # a tie
    rows = [Row(Sampling(temperature=5.0, top_k=1), seed=seed) for seed in range(20)]
    assert {draw(logits, [row])[0] for row in rows} == {4}


def test_ties_at_the_last_candidate_keep_their_number() -> None:
    logits = np.zeros((200, V), dtype=np.float32)
    rows = [Row(Sampling(temperature=1.0, top_k=5), position=i) for i in range(200)]
    assert len(set(draw(logits, rows))) == 5


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-6, 1e-3])
@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.5}, {"top_p": 1e-300}])
def test_tiny_temperatures_are_greedy(temperature: float, more: dict[str, float]) -> None:
    logits = logits_of(8, seed=5)
    logits[:, 0] = -0.0
    rows = [Row(Sampling(temperature=temperature, **more), seed=i) for i in range(8)]
    assert draw(logits, rows) == logits.argmax(axis=1).tolist()


def test_extreme_options_stay_in_the_vocabulary() -> None:
    logits = logits_of(1, seed=6, scale=1e4)
    for sampling in (
        Sampling(temperature=100.0),
        Sampling(temperature=100.0, top_p=1e-300),
        Sampling(temperature=1e-6, min_p=1.0),
        Sampling(temperature=1.0, logit_bias=[(i, -1e4) for i in range(V)]),
        Sampling(temperature=1.0, repetition_penalty=100.0, frequency_penalty=100.0, presence_penalty=100.0),
        Sampling(temperature=1.0, top_k=2**31 - 1),
    ):
        drawn = sample(mx.array(logits), [Row(sampling, history=list(range(V)))])
        assert 0 <= drawn.tokens.item() < V
        assert drawn.read_finite() == [True]


@given(
    history=st.lists(st.integers(0, V - 1), max_size=12),
    last=st.none() | st.integers(0, V - 1),
    bias=st.none() | st.lists(st.tuples(st.integers(0, V - 1), st.floats(-20, 20)), max_size=5),
    repetition=st.floats(0.1, 5.0),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
    window=st.integers(1, 14),
)
@settings(max_examples=150, deadline=None)
def test_bias_and_penalties(
    history: list[int],
    last: int | None,
    bias: list[tuple[int, float]] | None,
    repetition: float,
    frequency: float,
    presence: float,
    window: int,
) -> None:
    sampling = Sampling(
        logit_bias=bias,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_window=window,
    )
    row = Row(sampling, history=history, last=None if last is None else mx.array([last], dtype=mx.uint32))
    logits = logits_of(3, seed=2)
    made = np.array(_adjust(mx.array(logits), [Row(), row, Row()]))
    np.testing.assert_allclose(made[1], adjusted(logits[1], row), rtol=1e-5, atol=1e-5)
    assert (made[[0, 2]] == logits[[0, 2]]).all()


# ---------------------------------------------------------------- independence


def mixed_rows() -> list[Row]:
    rows = [
        Row(sampling, seed=1000 + i, position=50 + i, history=HISTORY[: i + 1])
        for i, sampling in enumerate([Sampling(), *OPTIONS.values()])
    ]
    rows[3] = replace(rows[3], logprobs=4)
    return rows


def test_a_draw_is_the_same_alone_and_in_any_company() -> None:
    """B23: alone, in a batch, at any index, with any neighbours, twice."""
    rows = mixed_rows()
    logits = logits_of(len(rows), seed=9)
    alone = [draw(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert draw(logits, rows) == alone
    assert draw(logits, rows) == alone
    order = np.random.default_rng(1).permutation(len(rows))
    assert draw(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]
    for keep in ([0, 5], [7, 2, 12], [1], [3, 3, 3]):
        assert draw(logits[keep], [rows[i] for i in keep]) == [alone[i] for i in keep]


def test_draws_ignore_and_leave_the_global_random_state() -> None:
    row = Row(Sampling(temperature=1.0), seed=3)
    logits = logits_of(1)
    mx.random.seed(1)
    first = draw(logits, [row])
    after = mx.random.uniform(shape=(3,)).tolist()
    mx.random.seed(1)
    assert mx.random.uniform(shape=(3,)).tolist() == after
    mx.random.seed(2)
    assert draw(logits, [row]) == first


def test_seeds_and_positions_differ() -> None:
    """B23: different seeds differ, and so do the positions of one seed."""
    logits = np.zeros((40, 1000), dtype=np.float32)
    by_seed = draw(logits, [Row(Sampling(temperature=1.0), seed=i) for i in range(40)])
    by_position = draw(logits, [Row(Sampling(temperature=1.0), position=i) for i in range(40)])
    assert len(set(by_seed)) > 30
    assert len(set(by_position)) > 30
    assert by_seed[1:] != by_position[1:]


def test_keys_do_not_collide() -> None:
    near = {row_key(seed, position) for seed in range(100) for position in range(100)}
    assert len(near) == 10_000
    far = [0, 1, 2**32, 2**63, 2**64 - 1]
    assert len({row_key(seed, position) for seed in far for position in (0, 1, 2**31)}) == 15
    assert all(0 <= word < 2**32 for key in near for word in key)


def test_a_nonfinite_row_is_told_and_harms_no_other() -> None:
    """X6: NaN or infinity anywhere in a row; its neighbours draw what they would have drawn."""
    rows = mixed_rows()[:8]
    logits = logits_of(8, seed=4)
    clean = draw(logits, rows)
    poisoned = logits.copy()
    poisoned[1, 5] = np.nan
    poisoned[3, :] = np.nan
    poisoned[4, V - 1] = np.inf
    poisoned[6, 0] = -np.inf
    drawn = sample(mx.array(poisoned), rows)
    bad = {1, 3, 4, 6}
    assert drawn.read_finite() == [i not in bad for i in range(8)]
    tokens: list[int] = drawn.tokens.tolist()  # type: ignore[assignment]
    assert all(0 <= token < V for token in tokens)
    assert [tokens[i] for i in range(8) if i not in bad] == [clean[i] for i in range(8) if i not in bad]


def test_half_precision_logits_of_a_large_vocabulary_are_finite() -> None:
    """Their plain sum would pass 65504."""
    logits = mx.full((1, 50_000), 12.0, dtype=mx.float16)
    assert sample(logits, [Row()]).read_finite() == [True]


# ---------------------------------------------------------------- log-probabilities


def test_logprobs_are_of_the_models_own_distribution() -> None:
    sampling = Sampling(temperature=0.7, top_k=3, logit_bias=[(2, 9.0)], repetition_penalty=1.5)
    rows = [
        Row(),
        Row(logprobs=0),
        Row(sampling, seed=5, history=HISTORY, logprobs=4),
        Row(Sampling(temperature=1.0), seed=6, logprobs=20),
    ]
    logits = logits_of(4, seed=8)
    drawn = sample(mx.array(logits), rows)
    mx.eval(*drawn.arrays())
    told = drawn.read_logprobs()
    assert sorted(told) == [1, 2, 3]
    tokens: list[int] = drawn.tokens.tolist()  # type: ignore[assignment]
    for row, count in ((1, 0), (2, 4), (3, 20)):
        oracle = log_softmax(logits[row])
        assert told[row].token == tokens[row]
        assert told[row].logprob == pytest.approx(oracle[tokens[row]], abs=1e-5)
        best = np.argsort(-oracle)[:count]
        assert [token for token, _ in told[row].top] == best.tolist()
        assert [value for _, value in told[row].top] == pytest.approx(oracle[best].tolist(), abs=1e-5)


def test_more_logprobs_than_tokens() -> None:
    told = sample(mx.array(logits_of(1, vocab=5)), [Row(logprobs=20)]).read_logprobs()
    assert len(told[0].top) == 5
    assert sum(math.exp(value) for _, value in told[0].top) == pytest.approx(1.0, abs=1e-5)


# ---------------------------------------------------------------- ids


@pytest.mark.parametrize("token", [V, 10**6, 2**31 - 1])
def test_ids_past_the_vocabulary_are_refused(token: int) -> None:
    """B25: written out of range they would corrupt memory."""
    with pytest.raises(Invalid) as caught:
        check(Sampling(logit_bias=[(0, 1.0), (token, 1.0)]), V)
    assert caught.value.field == "sampling.logit_bias"
    with pytest.raises(Invalid) as caught:
        check(Sampling(), V, stop_tokens=[token])
    assert caught.value.field == "stop_tokens"
    check(Sampling(logit_bias=[(V - 1, 1.0)]), V, stop_tokens=[0])


def test_tokens_without_a_logit_are_passed_over() -> None:
    """A model may have more embeddings than logits: a session's token can lie between."""
    sampling = Sampling(temperature=0.0, repetition_penalty=2.0, logit_bias=[(V + 5, 1.0), (1, 100.0)])
    assert draw(logits_of(1), [Row(sampling, history=[V, V + 1, 2])]) == [1]


def test_the_greedy_path_is_one_argmax(tmp_path: Path) -> None:
    """Rows without temperature, bias or penalty cost two reductions, whatever else they say."""
    logits = mx.array(logits_of(4))
    drawn = sample(logits, [Row(Sampling(top_p=0.5, min_p=0.1, seed=3), history=HISTORY)] * 4)
    mx.export_to_dot(str(tmp_path / "graph.dot"), *drawn.arrays())
    steps = re.findall(r'label ="(\w+)', (tmp_path / "graph.dot").read_text())
    assert steps.count("ArgReduce") == 1
    assert sorted(step for step in steps if step != "Squeeze") == ["ArgReduce", "Sum"]
    assert drawn.tokens.tolist() == mx.argmax(logits, axis=-1).tolist()


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="on a GPU all are put in order")
@pytest.mark.parametrize("steps", [0.0, 0.5])
@pytest.mark.parametrize("spreads", [(3.0, 3.0, 3.0), (0.05, 0.05, 0.05), (0.05, 3.0, 0.05)])
def test_the_head_of_a_nucleus_draws_what_the_whole_order_draws(
    steps: float, spreads: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narrow and flat distributions, with many equal logits and without, beside a floor and without one."""
    vocab, found = 4 * drawing.RANKED + 7, []
    head = drawing._head_of_nucleus

    def spied(*args: Any) -> Any:
        found.append(head(*args))
        return found[-1]

    monkeypatch.setattr(drawing, "_head_of_nucleus", spied)
    random = np.random.default_rng(11)
    numbers = random.standard_normal((3, vocab)) * np.array(spreads)[:, None]
    logits = mx.array((np.round(numbers / steps) * steps if steps else numbers).astype(np.float32))
    options = [
        Sampling(temperature=0.9, top_p=0.4),
        Sampling(temperature=1.7, top_p=0.8, min_p=0.01),
        Sampling(temperature=0.4, top_p=0.6),
    ]
    for seed in range(8):
        rows = [Row(sampling=option, seed=seed + i, position=3) for i, option in enumerate(options)]
        drawn = sample(logits, rows).tokens.tolist()
        with monkeypatch.context() as patched:
            patched.setattr(drawing, "RANKED", vocab)
            assert drawn == sample(logits, rows).tokens.tolist()
    # A flat distribution has no small nucleus, and is put in order whole.
    assert [whole for _, whole in found] == [[spread > 1 for spread in spreads]] * 8


def test_a_top_p_of_nothing_among_equal_logits_draws_the_first() -> None:
    row = Row(sampling=Sampling(temperature=1.0, top_p=1e-300))
    assert sample(mx.zeros((1, 4 * drawing.RANKED)), [row]).tokens.tolist() == [0]
