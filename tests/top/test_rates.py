"""Tokens a second out of counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.top.scripted import model, session, snapshot, stats

from stateroom.daemon.top.rates import POINTS_MAX, Rates
from stateroom.daemon.top.snapshot import Snapshot


def test_a_sessions_rate_is_by_how_much_it_grew() -> None:
    rates = Rates()
    rates.take(snapshot(session("a", length=100), session("b", length=50), at_s=10.0))
    assert rates.sessions == {}
    rates.take(snapshot(session("a", length=130), session("b", length=20), session("c"), at_s=12.0))
    assert rates.sessions == {session("a").session: 15.0}  # shorter, or new: it has none


def test_sessions_read_earlier_are_not_taken_for_idle() -> None:
    rates = Rates()
    rates.take(snapshot(session("a", length=100), at_s=10.0))
    rates.take(snapshot(session("a", length=200), at_s=20.0))
    rates.take(snapshot(session("a", length=200), at_s=21.0, sessions_at_s=20.0))
    assert rates.sessions == {session("a").session: 10.0}


def at(second: float, decoded: int, prefilled: int = 0, age_s: float = 0.0) -> Snapshot:
    worker = model(tokens_decoded=decoded, tokens_prefilled=prefilled) | {"pulse_age_s": age_s}
    return snapshot(at_s=second, stats=stats(worker))


@pytest.mark.parametrize("age_s", [0.0, 0.7])
def test_an_engines_rate_is_that_of_the_last_seconds(age_s: float) -> None:
    rates = Rates()
    for second in range(20):
        rates.take(at(second, 40 * second + 1_000, 300 * second, age_s))
    assert rates.engine("tiny") == pytest.approx((40.0, 300.0))
    for second in range(20, 40):
        rates.take(at(second, 40 * 19 + 1_000, 300 * 19, age_s))
    assert rates.engine("tiny") == (0.0, 0.0)


def test_a_new_worker_counts_from_the_start() -> None:
    rates = Rates()
    rates.take(at(0, 9_000))
    rates.take(at(1, 9_100))
    rates.take(at(2, 10))
    assert rates.engine("tiny") == (0.0, 0.0)
    rates.take(at(3, 60))
    assert rates.engine("tiny") == (50.0, 0.0)


def test_an_engine_that_nobody_knows_has_no_rate() -> None:
    assert Rates().engine("other") == (0.0, 0.0)


@given(st.lists(st.tuples(st.floats(0.01, 3.0), st.integers(0, 500)), min_size=2, max_size=200))
def test_rates_are_never_beyond_what_was_counted(steps: list[tuple[float, int]]) -> None:
    rates, second, count, most = Rates(), 0.0, 0, 0.0
    for passed, more in steps:
        second, count = second + passed, count + more
        most = max(most, more / passed)
        rates.take(at(second, count))
    decoded, _ = rates.engine("tiny")
    assert 0.0 <= decoded <= most * (1 + 1e-9)
    assert len(rates._points["tiny"]) <= POINTS_MAX
