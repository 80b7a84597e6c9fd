"""Which session is verified next, rounds over all of them, and what a result means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from stateroom.client.errors import NotFound
from stateroom.client.protocol import VerifyResult
from stateroom.daemon.catalog import Catalog
from stateroom.daemon.checks import Checks
from stateroom.daemon.clock import ManualClock
from stateroom.daemon.lifecycle import SessionEvent
from stateroom.daemon.metrics import Metrics
from stateroom.daemon.session import Session


@dataclass
class Toy:
    """An engine as far as checks look at one."""

    generation: int = 1
    ready: bool = True


class Rig:
    def __init__(self, every_s: float | None = None) -> None:
        self.clock, self.metrics = ManualClock(), Metrics()
        self.catalog = Catalog(self.clock)
        self.engine = Toy()
        self.checks = Checks(
            self.catalog,
            lambda model: self.engine if model == "toy" else None,
            self.clock,
            self.metrics,
            every_s,
        )

    def add(self, owner: str = "app", model: str = "toy", length: int = 5) -> Session:
        (session,) = self.catalog.add(owner, model, [None], "interactive", None, [])
        session.advance(SessionEvent.OPENED)
        session.tokens.extend(range(length))
        session.resident, session.generation = length > 0, 1
        return session


def result(error: float, largest: float = 10.0, **more: Any) -> VerifyResult:
    given = {"max_abs_logit": largest, "argmax_agree": True, "length": 5, "bound": 0.1}
    return VerifyResult(max_abs_logit_error=error, **{**given, **more})


def test_sessions_of_all_owners_take_turns() -> None:
    rig = Rig()
    sessions = [rig.add("a"), rig.add("b"), rig.add("a")]
    first = [rig.checks.pick() for _ in range(3)]
    assert {session.id for session in first} == {session.id for session in sessions}
    assert [rig.checks.pick() for _ in range(3)] == first
    late = rig.add("c")
    assert rig.checks.pick() is late


def test_only_what_is_idle_and_resident_is_picked() -> None:
    rig = Rig()
    running, parked, elsewhere, empty = rig.add(), rig.add(), rig.add(model="gone"), rig.add(length=0)
    running.advance(SessionEvent.START)
    parked.resident = False
    with pytest.raises(NotFound):
        rig.checks.pick()
    old = rig.add()
    old.generation = 0  # of a worker that is gone
    with pytest.raises(NotFound):
        rig.checks.pick()
    good = rig.add()
    assert {rig.checks.pick() for _ in range(4)} == {good}
    assert good not in (running, parked, elsewhere, empty, old)
    rig.engine.ready = False
    with pytest.raises(NotFound):
        rig.checks.pick()


def test_a_round_begins_when_its_time_has_come_and_looks_at_each_once() -> None:
    rig = Rig(every_s=3600.0)
    sessions = [rig.add() for _ in range(4)]
    assert rig.checks.due() is None
    rig.clock.advance(3600.0)
    seen = [rig.checks.due(), rig.checks.due()]
    sessions[2].advance(SessionEvent.START)  # busy by now
    late = rig.add()
    rig.clock.advance(10.0)
    seen += [rig.checks.due(), rig.checks.due(), rig.checks.due()]
    assert seen == [sessions[0], sessions[1], sessions[3], None, None]
    rig.clock.advance(3590.0)
    assert rig.checks.due() in (sessions[2], late)  # never seen before those that were


def test_without_a_time_there_are_no_rounds() -> None:
    rig = Rig()
    rig.add()
    rig.clock.advance(1e9)
    assert rig.checks.due() is None


def test_what_was_picked_is_forgotten_with_its_sessions() -> None:
    rig = Rig()
    for _ in range(200):
        session = rig.add()
        rig.checks.pick()
        session.advance(SessionEvent.CLOSE)
        session.advance(SessionEvent.END)
        rig.catalog.remove(session)
    assert len(rig.checks._last) <= 3


def test_a_result_within_its_bound_is_counted_and_no_more() -> None:
    rig = Rig()
    session = rig.add("mine")
    assert rig.checks.judge(session, result(0.9)) == []
    ((event, owner),) = rig.checks.judge(session, result(1.1))
    assert (event.event, event.session, event.model, owner) == ("verify_failed", session.id, "toy", "mine")
    assert event.details == {
        "max_abs_logit_error": 1.1,
        "max_abs_logit": 10.0,
        "argmax_agree": True,
        "bound": 0.1,
    }
    assert rig.metrics.counters()["verified"] == 2
    assert rig.metrics.counters()["verify_failed"] == 1


def test_a_cancelled_one_says_nothing() -> None:
    rig = Rig()
    assert rig.checks.judge(rig.add(), result(99.0, finish="cancelled")) == []
    assert rig.metrics.counters().get("verified", 0) == 0
