"""Accounts of owners: who is behind whom, and what is forgotten."""

from __future__ import annotations

import random

import pytest

from stateroom.daemon.scheduler.fairness import DEBT_MS, OWNERS_KEPT, Ledger


def test_whoever_has_had_less_by_its_weight_is_behind() -> None:
    ledger = Ledger({"heavy": 4.0})
    ledger.wait("heavy")
    ledger.wait("light")
    ledger.charge("heavy", 300.0)
    ledger.charge("light", 100.0)
    assert ledger.had("heavy") == 75.0 < ledger.had("light") == 100.0


def test_idleness_earns_nothing() -> None:
    ledger = Ledger()
    ledger.wait("busy")
    ledger.charge("busy", 60_000.0)
    ledger.wait("late")
    assert ledger.had("late") == ledger.had("busy")


def test_a_debt_is_bounded_and_lasts_while_others_wait() -> None:
    ledger = Ledger()
    ledger.wait("a")
    ledger.wait("b")
    ledger.charge("b", 100.0)
    ledger.waits_no_more("b")
    ledger.wait("b")  # gone for a moment only
    assert ledger.had("b") == 100.0
    ledger.waits_no_more("b")
    ledger.charge("b", 60_000.0)  # by streams that have places
    ledger.wait("b")
    assert ledger.had("b") == ledger.had("a") + DEBT_MS


def test_accounts_are_void_when_nobody_waits() -> None:
    ledger = Ledger()
    ledger.wait("a")
    ledger.charge("a", 500.0)
    ledger.waits_no_more("a")
    ledger.charge("a", 3_600_000.0)  # runs on, and keeps nobody waiting
    ledger.wait("b")
    ledger.wait("a")
    assert ledger.had("a") == ledger.had("b") == 0.0


def test_what_is_booked_counts_until_it_is_taken_back() -> None:
    ledger = Ledger({"a": 2.0})
    ledger.wait("a")
    ledger.book("a", 80.0)
    assert ledger.had("a") == 40.0
    ledger.wait("b")
    ledger.waits_no_more("a")
    ledger.wait("a")  # a lift counts what is booked, so that it isn't had twice
    ledger.book("a", -80.0)
    ledger.charge("a", 60.0)
    assert ledger.had("a") == pytest.approx(30.0)


def test_owners_are_forgotten() -> None:
    ledger = Ledger()
    ledger.wait("stays")
    draw = random.Random(3)
    for n in range(3 * OWNERS_KEPT):
        ledger.wait(f"passes{n}")
        ledger.charge(f"passes{n}", draw.random())
        ledger.waits_no_more(f"passes{n}")
        assert ledger.known <= OWNERS_KEPT + 1
    ledger.charge("stays", 1.0)
    assert ledger.had("stays") == 1.0
