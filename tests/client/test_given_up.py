"""Sessions made by a request that nobody waits for any more: closed, unless they have a name."""

from __future__ import annotations

import asyncio

import pytest
from tests.client.test_connection import reply, sent

from stateroom.client.connection import GIVEN_UP_MAX, Connection
from stateroom.client.inbox import AsyncInbox, Exchange, Inbox
from stateroom.client.protocol import (
    Body,
    Caps,
    Fork,
    ForkResult,
    Open,
    OpenResult,
    Prefill,
    Receipt,
    Request,
    Restore,
    Result,
    TokensResult,
)
from stateroom.client.timeouts import Wait

CAPS = Caps(trim="any", trim_floor=0, fork="shared", batch=True, speculative=True, kv=[], bytes_per_token=1.0)
OPENED = OpenResult(session="made", length=1, caps=CAPS, receipt=Receipt())
FORKED = ForkResult(sessions=["one", "two"], length=1, shared_bytes=0, copied_bytes=0)
MAKERS: list[tuple[Request, Result, list[str]]] = [
    (Open(tokens=[1]), OPENED, ["made"]),
    (Restore(snapshot="s"), OPENED, ["made"]),
    (Fork(session="s", n=2), FORKED, ["one", "two"]),
]
OTHERS: list[tuple[Request, Result]] = [
    (Open(tokens=[1], name="mine"), OPENED),
    (Restore(snapshot="s", name="mine"), OPENED),
    (Fork(session="s", n=2, names=["a", "b"]), FORKED),
]
WAIT = Wait(1.0)


def closed(connection: Connection) -> list[object]:
    return [frame["session"] for frame in sent(connection) if frame["op"] == "close"]


@pytest.mark.parametrize(("request_", "result", "made"), MAKERS)
def test_after_a_timeout(request_: Request, result: Body, made: list[str]) -> None:
    connection = Connection()
    number = connection.start(request_, WAIT, 0.0)
    connection.expire(2.0)
    assert closed(connection) == []
    connection.receive(reply(number, 0, result), 3.0)
    assert closed(connection) == made
    connection.receive(reply(number, 0, result), 3.0)
    assert closed(connection) == [], "once"


@pytest.mark.parametrize(("request_", "result"), OTHERS)
def test_what_has_a_name_stays(request_: Request, result: Body) -> None:
    connection = Connection()
    number = connection.start(request_, WAIT, 0.0)
    connection.expire(2.0)
    connection.receive(reply(number, 0, result), 3.0)
    assert closed(connection) == []


def test_what_is_remembered_of_them_is_bounded() -> None:
    connection = Connection()
    numbers = []
    for at in range(GIVEN_UP_MAX + 10):
        numbers.append(connection.start(Open(tokens=[1]), WAIT, 2.0 * at))
        connection.expire(2.0 * at + 2)
    assert len(connection._given_up) == len(connection._ops) == GIVEN_UP_MAX
    connection.receive(reply(numbers[0], 0, OPENED), 0.0)
    assert closed(connection) == [], "of the oldest nothing is known any more"


@pytest.mark.parametrize("delivered_first", [False, True])
@pytest.mark.parametrize(("request_", "result", "made"), MAKERS)
def test_after_a_cancel(request_: Request, result: Body, made: list[str], delivered_first: bool) -> None:
    """Also when the result had come, and its reader was gone before it looked."""
    exchange: Exchange[Inbox] = Exchange(Connection())
    inbox = Inbox(lambda inbox: exchange.cancel(inbox, 0.0))
    exchange.start(request_, WAIT, inbox, 0.0)
    assert inbox.request_id is not None
    answer = reply(inbox.request_id, 0, result)
    if delivered_first:
        exchange.receive(answer, 0.0)
        inbox.cancel()
    else:
        inbox.cancel()
        exchange.receive(answer, 0.0)
    assert closed(exchange.connection) == made


def test_what_was_read_is_its_reader_s() -> None:
    exchange: Exchange[Inbox] = Exchange(Connection())
    inbox = Inbox(lambda inbox: exchange.cancel(inbox, 0.0))
    exchange.start(Open(tokens=[1]), WAIT, inbox, 0.0)
    assert inbox.request_id is not None
    exchange.receive(reply(inbox.request_id, 0, OPENED), 0.0)
    assert inbox.take() == OPENED
    inbox.cancel()
    assert closed(exchange.connection) == []


def test_other_requests_close_nothing() -> None:
    connection = Connection()
    number = connection.start(Prefill(session="s"), WAIT, 0.0)
    connection.expire(2.0)
    connection.receive(reply(number, 0, TokensResult(tokens=[], text="")), 3.0)
    assert closed(connection) == []


def test_a_task_that_is_cancelled_leaves_nothing_behind() -> None:
    async def run() -> list[object]:
        exchange: Exchange[AsyncInbox] = Exchange(Connection())
        inbox = AsyncInbox(asyncio.get_running_loop(), lambda inbox: exchange.cancel(inbox, 0.0))
        exchange.start(Fork(session="s", n=2), WAIT, inbox, 0.0)

        async def read() -> None:
            try:
                await inbox.take()
            finally:
                inbox.cancel()

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        assert inbox.request_id is not None
        exchange.receive(reply(inbox.request_id, 0, FORKED), 0.0)
        task.cancel()  # its result is there, and it hasn't run since
        await asyncio.wait([task])
        return closed(exchange.connection)

    assert asyncio.run(run()) == ["one", "two"]
