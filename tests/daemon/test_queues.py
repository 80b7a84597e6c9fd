"""What waits for an engine: its order, and what a suspect on trial keeps from going."""

from __future__ import annotations

import pytest
from tests.daemon.test_recovery import ticket_of

from stateroom.client.protocol import Decode, Load, ReadTokens
from stateroom.daemon.catalog import Catalog
from stateroom.daemon.queues import TRIAL_S, Queues
from stateroom.daemon.recovery import CLEARED_TOKENS, DEATHS_MAX, SUSPECT_DEATHS
from stateroom.daemon.tickets import Ticket


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queues(clock: Clock) -> Queues:
    return Queues(clock)


def decodes(count: int) -> list[Ticket]:
    sessions = Catalog(lambda: 0.0).add("app", "toy", [None] * count, "interactive", None, [])
    made = [ticket_of(s, Decode(session=s.id, max_tokens=1), rid) for rid, s in enumerate(sessions)]
    for ticket in made:
        ticket.model = "toy"
    return made


def suspect(queues: Queues, ticket: Ticket, deaths: int = SUSPECT_DEATHS) -> None:
    assert ticket.session is not None
    for _ in range(deaths):
        queues.suspicion.died([ticket.session.id, "another"])


def going(queues: Queues) -> list[int]:
    """Sends all that may go."""
    sent = []
    for ticket in queues.going("toy"):
        queues.sent(ticket, "toy")
        sent.append(ticket.rid)
    return sent


def test_without_suspects_all_go_as_they_came_but_those_put_first(queues: Queues) -> None:
    tickets = decodes(5)
    for ticket in tickets[:3]:
        queues.add("toy", ticket)
    queues.put_first("toy", tickets[3:])
    assert [ticket.rid for ticket in queues.of("toy")] == [3, 4, 0, 1, 2]
    queues.drop(tickets[1])
    queues.drop(tickets[1])  # nothing
    assert going(queues) == [3, 4, 0, 2]
    assert list(queues) == []
    assert going(queues) == []


def test_suspects_go_one_at_a_time_and_before_the_others(queues: Queues) -> None:
    tickets = decodes(4)
    for ticket in tickets:
        queues.add("toy", ticket)
    suspect(queues, tickets[1])
    suspect(queues, tickets[2], DEATHS_MAX)
    read = ticket_of(tickets[0].session, ReadTokens(session="s"), 9, model="toy")
    queues.add("toy", read)
    assert going(queues) == [9, 2]  # a read computes nothing
    assert not queues.open_to(tickets[0], "toy")
    assert queues.open_to(read, "toy")
    assert queues.open_to(tickets[0], "other")
    first, second = tickets[2].session, tickets[1].session
    assert first is not None
    assert second is not None
    assert not queues.got_on(first, CLEARED_TOKENS - 1)
    assert queues.got_on(first, 1)
    assert going(queues) == [1]
    assert not queues.got_on(first, None)  # it is no longer the one
    assert queues.got_on(second, None)
    assert going(queues) == [0, 3]


def test_a_trial_ends_with_its_request_its_worker_or_in_time(queues: Queues, clock: Clock) -> None:
    one, two, three = decodes(3)
    for ticket in (one, two):
        suspect(queues, ticket)
        queues.add("toy", ticket)
    queues.add("toy", three)
    assert going(queues) == [0]
    assert not queues.ended(two)
    assert queues.ended(one)
    assert not queues.ended(one)
    assert going(queues) == [1]
    clock.now_s = TRIAL_S - 0.1
    assert queues.overdue() == []
    clock.now_s = TRIAL_S
    assert queues.overdue() == ["toy"]
    assert queues.overdue() == []
    assert going(queues) == [2]
    suspect(queues, two)
    queues.sent(two, "toy")
    assert not queues.open_to(three, "toy")
    clock.now_s = 100 * TRIAL_S  # who may be the cause by the number of deaths is let go by nothing else
    assert queues.overdue() == []
    queues.down("toy")
    assert queues.open_to(three, "toy")


def test_all_of_one_kind_are_taken_out(queues: Queues) -> None:
    tickets = decodes(2)
    load = ticket_of(None, Load(model="toy"), 7, model="toy")
    for ticket in (tickets[0], load, tickets[1]):
        queues.add("toy", ticket)
    assert queues.take("toy", only="load") == [load]
    assert queues.take("nothing") == []
    assert queues.take("toy") == tickets
    assert queues.of("toy") == []
