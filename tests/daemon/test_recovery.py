"""Who is suspected of a worker's death, in which order they go on, and who is found to be the cause."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateroom.client.protocol import (
    OPERATIONS,
    Close,
    Decode,
    Fork,
    Open,
    ReadTokens,
    Request,
    Sampling,
    Sync,
)
from stateroom.daemon.catalog import Catalog
from stateroom.daemon.recorder import Record
from stateroom.daemon.recovery import (
    AGAIN,
    CLEARED_TOKENS,
    DEATHS_MAX,
    LIFTS,
    QUARANTINED,
    RESUMES_MAX,
    SUSPECT_DEATHS,
    Suspicion,
    computes,
    goes_on,
    order,
    seeded,
)
from stateroom.daemon.session import Session
from stateroom.daemon.tickets import Ticket


def ticket_of(session: Session | None, request: Request, rid: int = 1, **fields: Any) -> Ticket:
    return Ticket(
        rid=rid,
        op=request.op,
        request=request,
        peer=None,
        owner="app",
        id=rid,
        delimited=False,
        started_s=0.0,
        record=Record(lambda: 0.0),
        session=session,
        **fields,
    )


@pytest.fixture
def session() -> Session:
    (made,) = Catalog(lambda: 0.0).add("app", "toy", [None], "interactive", None, [])
    return made


def test_a_session_alone_is_found_at_the_third_death() -> None:
    suspicion = Suspicion()
    assert [suspicion.died(["a"]) for _ in range(DEATHS_MAX)] == [None] * (DEATHS_MAX - 1) + ["a"]
    assert suspicion.is_suspect("a")
    suspicion.forget("a")
    assert not len(suspicion)


def test_one_in_company_is_never_found() -> None:
    suspicion = Suspicion()
    for _ in range(20):
        assert suspicion.died(["a", "b"]) is None
    assert suspicion.is_suspect("a")
    assert suspicion.died(["b"]) == "b"  # and this is enough, once it is alone


def test_one_beside_what_has_no_session_is_not_found_either() -> None:
    suspicion = Suspicion()
    for _ in range(20):
        assert suspicion.died(["a"], company=True) is None
    assert suspicion.died(["a"]) == "a"


def test_nobody_is_to_blame_for_a_death_without_requests() -> None:
    suspicion = Suspicion()
    assert suspicion.died([]) is None
    assert not len(suspicion)


def test_what_got_on_is_cleared() -> None:
    """By an answer, or by enough tokens since the last death; not by few of them each time."""
    suspicion = Suspicion()
    suspicion.died(["a"])
    assert suspicion.got_on("a")
    assert not suspicion.got_on("a")
    for _ in range(DEATHS_MAX - 1):
        suspicion.died(["a"])
        assert not suspicion.got_on("a", CLEARED_TOKENS - 1)
    assert suspicion.died(["a"]) == "a"
    assert not suspicion.got_on("a", 1)
    assert suspicion.got_on("a", CLEARED_TOKENS - 1)
    assert suspicion.deaths("a") == 0


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(0, 3))
def test_the_cause_is_found_and_nobody_else(seed: int, innocent: int, poisons: int) -> None:
    """As the broker goes about it, in any order: all at once, suspects one at a time; who lives gets on."""
    draw = random.Random(seed)
    suspicion = Suspicion()
    waiting = [f"good {n}" for n in range(innocent)] + [f"bad {n}" for n in range(poisons)]
    draw.shuffle(waiting)
    found: set[str] = set()
    deaths = 0
    while waiting:
        suspects = sorted(
            (each for each in waiting if suspicion.is_suspect(each)), key=lambda each: -suspicion.deaths(each)
        )
        queue = [[each] for each in suspects] + [[each for each in waiting if each not in suspects]]
        running: list[str] = []
        for step in queue:
            running += step
            draw.shuffle(running)
            if any(each.startswith("bad") for each in running):
                deaths += 1
                cause = suspicion.died(running)
                if cause is not None:
                    found.add(cause)
                    waiting.remove(cause)
                break
            for each in step:
                suspicion.got_on(each)
        else:
            waiting = []
    assert found == {f"bad {n}" for n in range(poisons)}
    assert deaths <= (DEATHS_MAX + 1) * poisons + SUSPECT_DEATHS * bool(poisons)


def test_what_computes_and_what_does_not(session: Session) -> None:
    assert computes(ticket_of(session, Decode(session="s", max_tokens=1)))
    assert computes(ticket_of(session, Open()))
    assert not computes(ticket_of(session, ReadTokens(session="s")))
    assert not computes(ticket_of(session, Close(session="s")))
    assert not computes(ticket_of(None, Open()))
    fork = ticket_of(session, Fork(trunk="t"))
    assert computes(fork)
    session.published_as = "shared"
    assert not computes(fork)


def test_the_order_in_which_they_go(session: Session) -> None:
    """What computes nothing first, then suspects, the most suspect before the others, then as they came."""
    catalog = Catalog(lambda: 0.0)
    sessions = catalog.add("app", "toy", [None] * 5, "interactive", None, [])
    suspicion = Suspicion()
    for number, deaths in enumerate([0, SUSPECT_DEATHS, SUSPECT_DEATHS + 1, SUSPECT_DEATHS - 1]):
        for _ in range(deaths):
            suspicion.died([sessions[number].id])
    tickets = [
        ticket_of(each, Decode(session=each.id, max_tokens=1), rid) for rid, each in enumerate(sessions)
    ]
    tickets.append(ticket_of(sessions[0], ReadTokens(session=sessions[0].id), 5))
    assert [ticket.rid for ticket in order(tickets, suspicion)] == [5, 2, 1, 0, 3, 4]


def test_a_request_does_not_go_on_for_ever(session: Session) -> None:
    request = Sync(session="s", tokens=[1])
    assert goes_on(ticket_of(session, request, resumes=RESUMES_MAX - 1))
    assert not goes_on(ticket_of(session, request, resumes=RESUMES_MAX))
    assert not goes_on(ticket_of(session, Close(session="s")))


def test_only_what_draws_by_chance_gets_a_seed() -> None:
    plain = Decode(session="s", max_tokens=1)
    assert seeded(plain, 5) is plain
    given_one = Decode(session="s", max_tokens=1, sampling=Sampling(temperature=1.0, seed=0))
    assert seeded(given_one, 5) is given_one
    made = seeded(Decode(session="s", max_tokens=1, sampling=Sampling(temperature=1.0)), 5)
    assert made.sampling == Sampling(temperature=1.0, seed=5)


def test_the_operations_that_are_named_exist() -> None:
    assert set(AGAIN) | set(QUARANTINED) | set(LIFTS) <= set(OPERATIONS)
    assert not set(QUARANTINED) & set(LIFTS)
