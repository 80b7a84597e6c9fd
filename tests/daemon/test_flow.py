"""Clients that don't read, clients that vanish, and those beside them who must not notice."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import msgpack
import pytest
import zmq
from tests.daemon.rig import Raw, Rig

from stateroom.client.limits import OUTBOX_MESSAGES_MAX
from stateroom.daemon.peers import FINALS_MAX
from stateroom.daemon.sockets import PEER_QUEUE_MESSAGES

StartBroker = Callable[..., Rig]


def deaf_client(rig: Rig, app: str) -> Raw:
    """One whose own socket takes few messages before the broker's fills."""
    client = Raw.__new__(Raw)
    socket = rig.context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVHWM, 8)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(rig.endpoint)
    client.__init__(rig.context, rig.endpoint)  # type: ignore[misc]
    client.socket.close()
    client.socket = socket
    assert client.ask("hello", app=app)["app"] == app
    return client


def test_a_stream_that_is_not_read_ends_with_slow_consumer(start_broker: StartBroker) -> None:
    """B61: no gap, the last word is the error with the length, others are not delayed, the session stays."""
    rig = start_broker("step_s=0,text=2000")
    slow, other = deaf_client(rig, "slow"), rig.client("other")
    session, others = slow.open(), other.open()
    decode = slow.send("decode", session=session, max_tokens=100_000)
    waits = []
    while rig.look(lambda broker: broker.metrics.counters()["streams_cut"]) == 0:
        began = time.monotonic()
        assert other.ask("list")["kind"] == "result"
        waits.append(time.monotonic() - began)
        assert other.ask("decode", session=others, max_tokens=2)["finish"] == "length"
    assert sorted(waits)[len(waits) // 2] < 0.05
    rig.until(lambda broker: broker.catalog.find("slow", session).running is None)
    length = rig.look(lambda broker: broker.catalog.find("slow", session).length)

    replies = slow.replies(decode)  # checks that seq has no gap
    assert replies[-1]["error"]["code"] == "slow_consumer"
    assert replies[-1]["error"]["details"]["length"] == length
    assert len(replies) > OUTBOX_MESSAGES_MAX
    assert slow.ask("info", session=session)["length"] == length
    assert slow.ask("decode", session=session, max_tokens=3)["finish"] == "length"
    slow.nothing_more()


def test_a_watch_that_is_not_read_ends_too(start_broker: StartBroker) -> None:
    rig = start_broker()
    slow, other = deaf_client(rig, "app"), rig.client("app")
    watch = slow.send("watch")
    for _ in range(10_000):
        other.ask("close", session=other.open())
        if rig.look(lambda broker: broker.metrics.counters()["streams_cut"]):
            break
    replies = slow.replies(watch)
    assert replies[-1]["error"]["code"] == "slow_consumer"
    assert rig.look(lambda broker: len(broker.watchers)) == 0


def test_a_client_that_asks_and_never_reads_is_bounded(start_broker: StartBroker) -> None:
    rig = start_broker()
    slow, other = deaf_client(rig, "slow"), rig.client("other")
    body = msgpack.packb({"v": 1, "id": 5, "op": "stats"})
    for _ in range(3 * FINALS_MAX + 20 * PEER_QUEUE_MESSAGES):
        slow.socket.send(body)
    rig.until(lambda broker: broker.metrics.counters()["requests_dropped"] > 0)
    assert other.ask("list")["kind"] == "result"
    assert rig.look(lambda broker: max(len(peer.outbox) for peer in broker.peers)) <= FINALS_MAX


@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_a_vanished_client_is_cancelled_and_its_session_stays(rig: Rig, op: str) -> None:
    """B59: also one whose request sends nothing while it runs, so that no send could fail."""
    client, other = rig.client("app"), rig.client("app")
    session = client.open()
    arguments = {"max_tokens": 100_000, "stream": False} if op == "decode" else {"tokens": [1] * 90_000}
    client.send(op, session=session, **arguments)
    rig.until(lambda broker: broker.catalog.find("app", session).running is not None)
    client.close()
    began = time.monotonic()
    rig.until(lambda broker: broker.view.stats("").gauges["running"] == 0)
    assert time.monotonic() - began < 1.0
    assert other.ask("info", session=session)["state"] == "idle"
    held = rig.look(lambda broker: broker.catalog.find("app", session).tokens.tolist())
    assert held == other.ask("tokens", session=session)["tokens"]


def test_the_last_wish_of_a_client_that_leaves_at_once_is_heard(rig: Rig) -> None:
    """A request whose sender is gone before it is read: a close closes, a decode does not run on."""
    other = rig.client("app")
    session, kept = other.open(), other.open()
    for op, arguments in (
        ("close", {"session": session}),
        ("decode", {"session": kept, "max_tokens": 100_000}),
    ):
        client = rig.client("app")
        client.socket.setsockopt(zmq.LINGER, 1000)
        client.send(op, **arguments)
        client.close()
    rig.until(lambda broker: broker.catalog.get(session) is None)
    rig.until(lambda broker: broker.metrics.counters().get("requests.decode.gone") == 1)
    assert other.ask("info", session=kept)["state"] == "idle"


MANY = """
    import itertools, os, random, sys
    import msgpack, zmq
    endpoint, seed = sys.argv[1], int(sys.argv[2])
    draw = random.Random(seed)
    context = zmq.Context()
    sockets = []
    for number in range(10):
        socket = context.socket(zmq.DEALER)
        socket.connect(endpoint)
        ask = lambda i, op, **more: socket.send(msgpack.packb({"v": 1, "id": i, "op": op, **more}))
        ask(1, "hello", app=f"crowd")
        ask(2, "open", tokens=[1, 2, 3], name=f"s{seed}-{number}")
        sockets.append(socket)
    for number, socket in enumerate(sockets):
        for _ in range(2):
            socket.recv()
        name = f"s{seed}-{number}"
        op = draw.choice(["decode", "prefill", "sync", "watch"])
        more = {"session": name, "tokens": [1] * 5000} if op != "watch" else {}
        more = {"session": name, "max_tokens": 100000} if op == "decode" else more
        socket.send(msgpack.packb({"v": 1, "id": 3, "op": op, **more}))
    print("running", flush=True)
    sys.stdin.read()
"""


def test_killed_clients_leave_nothing_running(rig: Rig) -> None:
    """B59: fifty connections whose processes are killed; running is 0 within a second, sessions stay."""
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(MANY), rig.endpoint, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for seed in range(5)
    ]
    try:
        for process in crowd:
            assert process.stdout is not None
            assert process.stdout.readline() == b"running\n"
        rig.until(lambda broker: broker.view.stats("").gauges["requests_open"] == 50)
    finally:
        for process in crowd:
            process.kill()
    began = time.monotonic()
    rig.until(lambda broker: len(broker.peers) == 0)
    assert time.monotonic() - began < 1.0
    rig.until(lambda broker: broker.view.stats("").gauges["requests_open"] == 0, 2.0)
    for process in crowd:
        process.communicate()
    client = rig.client("crowd")
    sessions = client.ask("list")["sessions"]
    assert len(sessions) == 50
    assert {session["state"] for session in sessions} == {"idle"}
    gauges = client.ask("stats")["gauges"]
    assert (gauges["running"], gauges["queued"], gauges["clients"], gauges["watchers"]) == (0, 0, 1, 0)


def test_descriptors_are_used_again_without_confusion(rig: Rig) -> None:
    """Connections that come and go at once: each vanishes once, and none takes its successor along."""
    stays = rig.client("stays")
    watch = stays.send("watch")
    for _ in range(100):
        client = rig.client("passes")
        session = client.open()
        client.send("decode", session=session, max_tokens=100_000)
        client.close()
    rig.until(lambda broker: len(broker.peers) == 1 and len(broker.tickets) == 1)
    assert rig.look(lambda broker: broker.metrics.counters()["clients_vanished"]) == 100
    assert stays.ask("cancel", request=watch)["cancelled"] is True


def test_quick_answers_while_an_engine_works(start_broker: StartBroker) -> None:
    """B58: what the broker answers itself never waits for an engine."""
    rig = start_broker("chunk_s=0.05")
    client, other = rig.client("app"), rig.client("app")
    session = client.open()
    prefill = client.send("prefill", session=session, tokens=[1] * 2000, progress=True)
    waits = []
    while rig.look(lambda broker: broker.catalog.find("app", session).length) != 2003:
        for op in ("hello", "list", "stats", "info"):
            began = time.monotonic()
            other.ask(op, **({"session": session} if op == "info" else {}))
            waits.append(time.monotonic() - began)
    assert len(waits) > 100
    assert sorted(waits)[int(len(waits) * 0.99)] < 0.05
    assert [reply["done"] for reply in client.replies(prefill)[:-1]][-1] == 2000
