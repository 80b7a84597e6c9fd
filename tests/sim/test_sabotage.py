"""The simulation notices what it is there for: each of these breaks one thing, and some seed must fail."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
from tests.sim.kv import Pool
from tests.sim.network import Link, Network
from tests.sim.world import World

from stateroom.client.connection import Connection
from stateroom.client.protocol import LengthResult
from stateroom.daemon import work
from stateroom.daemon.catalog import Catalog
from stateroom.daemon.link import Adopt, CancelCommand, Command, decode_to_worker
from stateroom.daemon.peers import Delivery, Peer, Peers
from stateroom.daemon.queues import Queues
from stateroom.daemon.recovery import DEATHS_MAX, Suspicion
from stateroom.daemon.session import Session
from stateroom.daemon.tickets import Tickets

SEEDS = 100
Sabotage = Callable[[], AbstractContextManager[Any]]


def every(count: int, of: type, name: str, instead: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Every so many calls of a method go to `instead(original, self, …)`."""
    original = getattr(of, name)
    calls = 0

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % count:
            return original(*arguments, **named)
        return instead(original, *arguments, **named)

    return patch.object(of, name, call)


def always(of: type, name: str, instead: Callable[..., Any]) -> AbstractContextManager[Any]:
    return every(1, of, name, instead)


def a_reply_is_lost() -> AbstractContextManager[Any]:
    return every(101, Network, "send", lambda send, *_: Delivery.SENT)


def a_reply_is_sent_twice() -> AbstractContextManager[Any]:
    def twice(send: Any, *arguments: Any) -> Any:
        send(*arguments)
        return send(*arguments)

    return every(101, Network, "send", twice)


def a_final_reply_is_forgotten() -> AbstractContextManager[Any]:
    def forget(reply: Any, tickets: Tickets, ticket: Any, body: Any) -> None:
        if not isinstance(body, LengthResult):
            reply(tickets, ticket, body)

    return every(31, Tickets, "reply", forget)


def a_journal_is_skipped() -> AbstractContextManager[Any]:
    return every(31, work.Work, "_journal", lambda *_: None)


def a_journal_is_cut_short() -> AbstractContextManager[Any]:
    def cut(journal: Any, works: work.Work, engine: Any, change: Any) -> None:
        journal(works, engine, change)
        session = works._catalog.get(change.session)
        if session is not None:
            del session.tokens[len(session.tokens) - 1 :]

    return every(31, work.Work, "_journal", cut)


def an_adoption_is_lost() -> AbstractContextManager[Any]:
    def lose(send: Any, link: Link, frame: bytes) -> bool:
        return isinstance(decode_to_worker(frame), Adopt) or send(link, frame)

    return always(Link, "send", lose)


def cancels_are_lost() -> AbstractContextManager[Any]:
    def lose(send: Any, link: Link, frame: bytes) -> bool:
        return isinstance(decode_to_worker(frame), CancelCommand) or send(link, frame)

    return always(Link, "send", lose)


def orphans_are_kept() -> AbstractContextManager[Any]:
    return patch.object(work, "abandoned", lambda ticket, body: [])


def a_full_outbox_takes_more() -> AbstractContextManager[Any]:
    return patch.object(Peer, "full", False)


def those_who_vanished_are_not_buried() -> AbstractContextManager[Any]:
    return every(2, Peers, "lost", lambda *_: None)


def names_are_never_free_again() -> AbstractContextManager[Any]:
    def remove(original: Any, catalog: Catalog, session: Session) -> None:
        del catalog._sessions[session.id]

    return always(Catalog, "remove", remove)


def what_waits_for_an_engine_is_forgotten() -> AbstractContextManager[Any]:
    return every(5, Queues, "going", lambda going, *a: list(going(*a))[1:])


def a_trunk_leaks() -> AbstractContextManager[Any]:
    return every(3, Pool, "release", lambda *_: None)


def clients_lose_count() -> AbstractContextManager[Any]:
    return every(101, Connection, "receive", lambda *_: [])


def what_was_drawn_before_a_death_is_forgotten() -> AbstractContextManager[Any]:
    return patch.object(work, "Command", lambda *arguments, base=None: Command(*arguments))


def whoever_was_there_is_blamed() -> AbstractContextManager[Any]:
    def died(original: Any, suspicion: Suspicion, session_ids: Any) -> str | None:
        original(suspicion, session_ids)
        return next((each for each in session_ids if suspicion.deaths(each) >= DEATHS_MAX), None)

    return always(Suspicion, "died", died)


def a_death_is_forgotten() -> AbstractContextManager[Any]:
    return always(Suspicion, "died", lambda *_: None)


SABOTAGE: list[Sabotage] = [
    what_was_drawn_before_a_death_is_forgotten,
    whoever_was_there_is_blamed,
    a_death_is_forgotten,
    a_reply_is_lost,
    a_reply_is_sent_twice,
    a_final_reply_is_forgotten,
    a_journal_is_skipped,
    a_journal_is_cut_short,
    an_adoption_is_lost,
    cancels_are_lost,
    orphans_are_kept,
    a_full_outbox_takes_more,
    those_who_vanished_are_not_buried,
    names_are_never_free_again,
    what_waits_for_an_engine_is_forgotten,
    a_trunk_leaks,
    clients_lose_count,
]


@pytest.mark.parametrize("sabotage", SABOTAGE, ids=lambda sabotage: sabotage.__name__)
def test_it_is_noticed(sabotage: Sabotage) -> None:
    with sabotage():
        for seed in range(SEEDS):
            try:
                World(seed).run()
            except Exception:
                return
    raise AssertionError(f"{SEEDS} runs, and nobody noticed")
