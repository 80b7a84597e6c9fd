"""How many guesses pay: the width chosen is the best there is, chances and costs are learnt and forgotten."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateroom.daemon.engine.speculation.depth import (
    GAIN_MIN,
    RETRY_AFTER,
    RETRY_MOST,
    SLOWER_MOST,
    STALE_PASSES,
    TOKEN_COST,
    WIDTHS,
    Chance,
    Chances,
    Costs,
    Prospect,
    best_width,
)


class Table(Costs):
    """Costs that are known."""

    def __init__(self, by_width: dict[int, float]) -> None:
        super().__init__()
        self.by_width = by_width

    def of(self, rows: int, width: int) -> float:
        return self.by_width[width]


def costs_of(rows: int, by_width: dict[int, float]) -> Costs:
    costs = Costs()
    for width, ms in by_width.items():
        for _ in range(100):
            costs.measured(rows, width, ms)
    return costs


prospects_of = st.lists(st.builds(Prospect, st.integers(0, 20), st.floats(0, 1)), min_size=1, max_size=5)


@given(chance=st.floats(0, 1), guesses=st.integers(0, 9), width=st.integers(1, 9), seed=st.integers(0, 99))
def test_the_expected_tokens_of_a_round(chance: float, guesses: int, width: int, seed: int) -> None:
    """Against rounds that were played: the guesses before the first wrong one, and one token."""
    random = np.random.default_rng(seed)
    right = random.random((4_000, min(guesses, width - 1))) < chance
    played = 1 + np.cumprod(right, axis=1).sum(axis=1).mean()
    assert Prospect(guesses, chance).tokens(width) == pytest.approx(played, abs=0.35)


@given(
    prospects=prospects_of,
    steps=st.lists(st.floats(0, 40), min_size=len(WIDTHS), max_size=len(WIDTHS)),
    widest=st.integers(1, 70),
)
def test_no_other_width_brings_more_in_its_time(
    prospects: list[Prospect], steps: list[float], widest: int
) -> None:
    by_width = dict(zip(WIDTHS, itertools.accumulate(steps, initial=50.0), strict=False))
    costs = Table(by_width)
    width = best_width(prospects, costs, widest)
    useful = 1 + max(prospect.guesses for prospect in prospects)
    assert width == 1 or width <= min(widest, useful)
    rates = {
        w: sum(p.tokens(w) for p in prospects) / by_width[w] for w in by_width if w <= min(widest, useful)
    }
    if not all(prospect.guesses for prospect in prospects):
        rates = {w: rate for w, rate in rates.items() if by_width[w] <= SLOWER_MOST * by_width[1]}
    best = max(rates.values())
    if width > 1:
        assert rates[width] == best
        assert rates[width] > GAIN_MIN * rates[1]
    else:
        assert best <= GAIN_MIN * rates[1] * (1 + 1e-9)


def test_rows_with_nothing_to_guess_count() -> None:
    """One row's guesses pay alone, but not when seven others would wait for them."""
    costs = costs_of(1, {1: 10.0, 5: 14.0})
    for width, ms in ((1, 20.0), (5, 48.0)):
        for _ in range(40):
            costs.measured(8, width, ms)
    eager = Prospect(4, 0.9)
    assert best_width([eager], costs, 64) == 5
    assert best_width([eager, *[Prospect()] * 7], costs, 64) == 1
    assert best_width([eager] * 8, costs, 64) == 5


def test_before_anything_was_measured() -> None:
    """Guesses that are likely are tried, and so measured; others aren't."""
    assert best_width([Prospect(8, 0.9)], Costs(), 64) > 1
    assert best_width([Prospect(8, 0.05)], Costs(), 64) == 1
    assert best_width([Prospect()], Costs(), 64) == 1


class TestCosts:
    def test_the_first_of_a_shape_is_not_counted(self) -> None:
        costs = Costs()
        costs.measured(2, 1, 900.0)
        assert costs.of(2, 1) == 1.0
        costs.measured(2, 1, 10.0)
        assert costs.of(2, 1) == 10.0

    def test_between_and_beyond_what_was_measured(self) -> None:
        costs = costs_of(1, {1: 10.0, 5: 18.0})
        assert costs.of(1, 3) == pytest.approx(14.0, rel=0.01)
        assert costs.of(1, 9) == pytest.approx(18.0 + 4 * TOKEN_COST * 10.0, rel=0.01)  # hoped for
        assert costs_of(1, {1: 10.0, 5: 11.0}).of(1, 9) == pytest.approx(12.0, rel=0.01)
        assert costs_of(1, {1: 10.0}).of(1, 3) == pytest.approx(10.0 * (1 + 2 * TOKEN_COST))

    def test_other_work_in_between_tells_little(self) -> None:
        costs = costs_of(2, {1: 10.0})
        expected = costs.of(2, 5)
        costs.measured(2, 5, expected)
        costs.measured(2, 5, 50 * expected)
        assert costs.of(2, 5) < 1.4 * expected

    def test_what_was_dear_once_is_tried_again(self) -> None:
        costs = costs_of(1, {1: 10.0, 3: 500.0})
        assert costs.of(1, 3) == pytest.approx(500.0)
        for _ in range(STALE_PASSES):
            costs.measured(1, 1, 10.0)
        assert costs.of(1, 3) < 20.0

    @given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(WIDTHS), st.floats(0.1, 1e4)), max_size=60))
    def test_a_cost_is_a_cost(self, passes: list[tuple[int, int, float]]) -> None:
        costs = Costs()
        for rows, width, ms in passes:
            costs.measured(rows, width, ms)
        assert all(0 < costs.of(rows, width) < 1e6 for rows in range(1, 6) for width in WIDTHS)


class TestChance:
    def test_learns_what_is_true(self) -> None:
        random = np.random.default_rng(1)
        for true in (0.1, 0.5, 0.95):
            chance, values = Chance(0.5), []
            for _ in range(400):
                right = int(np.cumprod(random.random(4) < true).sum())
                chance.learn(4, right)
                values.append(chance.value)
            assert np.mean(values[50:]) == pytest.approx(true, abs=0.06)

    def test_forgets(self) -> None:
        chance = Chance(0.5)
        for _ in range(100):
            chance.learn(8, 8)
        assert chance.value > 0.9
        for _ in range(60):
            chance.learn(8, 0)
        assert chance.value < 0.2

    def test_what_lost_is_tried_again_later_and_later(self) -> None:
        chance, drawn = Chance(0.6), 0
        pauses = []
        for _ in range(8):
            for _ in range(20):
                chance.learn(4, 0)
            assert chance.value < 0.1
            assert not chance.rests(drawn)
            chance.lost(drawn)
            before = drawn
            while chance.rests(drawn):
                drawn += 1
            pauses.append(drawn - before)
            assert chance.value == 0.6
        assert pauses[:3] == [RETRY_AFTER, 2 * RETRY_AFTER, 4 * RETRY_AFTER]
        assert max(pauses) == RETRY_MOST
        chance.learn(4, 4)
        assert chance.pause == RETRY_AFTER

    def test_each_kind_of_guess_has_its_own(self) -> None:
        chances = Chances()
        before = chances.of(5).value
        chances.of(2).learn(4, 0)
        assert chances.of(5).value == before
        assert chances.of(2).value < Chances().of(2).value
