"""The tables walked: every state meets every event, and either moves as drawn or refuses and stays."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest

from stateroom.daemon.lifecycle import (
    ENGINES,
    REQUESTS,
    SESSIONS,
    EngineEvent,
    EngineState,
    IllegalEvent,
    RequestEvent,
    RequestState,
    SessionEvent,
    SessionState,
    after,
)

Table = Mapping[Any, Mapping[Any, Any]]
ALL = [
    (SESSIONS, SessionState, SessionEvent, SessionState.OPENING, {SessionState.CLOSED}),
    (REQUESTS, RequestState, RequestEvent, RequestState.HELD, {RequestState.DONE}),
    (ENGINES, EngineState, EngineEvent, EngineState.STOPPED, set()),
]
each_table = pytest.mark.parametrize(("table", "states", "events", "first", "last"), ALL)


@each_table
def test_every_pair_moves_as_drawn_or_is_refused(
    table: Table, states: type[Enum], events: type[Enum], first: Enum, last: set[Enum]
) -> None:
    moved = 0
    for state in states:
        for event in events:
            if event in table[state]:
                assert after(table, state, event) is table[state][event]
                moved += 1
            else:
                with pytest.raises(IllegalEvent):
                    after(table, state, event)
    assert moved == sum(len(row) for row in table.values())


@each_table
def test_every_state_is_reached_and_only_the_last_is_an_end(
    table: Table, states: type[Enum], events: type[Enum], first: Enum, last: set[Enum]
) -> None:
    assert set(table) == set(states)
    reached, edge = {first}, [first]
    while edge:
        for following in table[edge.pop()].values():
            if following not in reached:
                reached.add(following)
                edge.append(following)
    assert reached == set(states)
    assert {state for state in states if not table[state]} == last
    assert {event for row in table.values() for event in row} == set(events)


def test_a_request_ends_once_whatever_happens_to_it() -> None:
    """`FINAL` is possible in every state but the last, leads there from everywhere, and nothing leads out."""
    for state in RequestState:
        if state is RequestState.DONE:
            assert REQUESTS[state] == {}
        else:
            assert REQUESTS[state][RequestEvent.FINAL] is RequestState.DONE
            others = {event: to for event, to in REQUESTS[state].items() if event is not RequestEvent.FINAL}
            assert RequestState.DONE not in others.values()


def test_one_request_at_a_time_has_a_session() -> None:
    """Nothing starts in a session but from `IDLE`, and what ended it leads back there or to its close."""
    assert [state for state in SessionState if SessionEvent.START in SESSIONS[state]] == [SessionState.IDLE]
    for state in (SessionState.RUNNING, SessionState.REPLACING):
        assert SESSIONS[state][SessionEvent.END] is SessionState.IDLE


def test_an_engine_can_be_stopped_wherever_it_is() -> None:
    for state in EngineState:
        if state not in (EngineState.STOPPED, EngineState.STOPPING):
            assert EngineEvent.STOP in ENGINES[state]
