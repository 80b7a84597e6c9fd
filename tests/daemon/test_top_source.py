"""Where `top` looks: a real broker, through its socket and through the network with a key."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from tests.daemon.conftest import StartBroker
from tests.daemon.rig import Raw, Rig
from tests.daemon.test_network import Network

from stateroom.client import connect
from stateroom.client.errors import Disconnected, NoDaemon, NotFound, Unsupported
from stateroom.client.protocol import HelloResult, ServerLimits, SessionInfo
from stateroom.client.wire import to_wire
from stateroom.daemon.exits import Leave
from stateroom.daemon.top.snapshot import Snapshot
from stateroom.daemon.top.source import BUSY_PART, LOOKS_COUNTED, DaemonSource, Pace
from stateroom.daemon.top.view import Act

LONG = 100_000  # tokens
Use = Callable[[DaemonSource], Awaitable[Any]]


def used(endpoint: str, use: Use, **options: Any) -> Any:
    async def main() -> Any:
        source = DaemonSource(endpoint, options.pop("interval_s", 0.0), **options)
        try:
            return await use(source)
        finally:
            await source.close()

    return asyncio.run(main())


def begun(client: Raw) -> None:
    """A stream has: its first reply is there, and kept."""
    client.kept.append(client.receive())


async def looked(source: DaemonSource) -> Snapshot:
    """As `top` does: again and again, until there is an answer."""
    for _ in range(10):
        with contextlib.suppress(NoDaemon, Disconnected):
            return await source.look()
    raise AssertionError("no answer")


def named(snapshot: Snapshot, name: str) -> SessionInfo:
    (found,) = (session for session in snapshot.sessions if session.name == name)
    return found


# ---------------------------------------------------------------- looks and acts


def test_a_look_sees_everyones_sessions_and_requests(rig: Rig) -> None:
    editor, agents = rig.client("editor"), rig.client("agents")
    editor.open([1, 2, 3], name="buffer")
    decode = agents.send("decode", session=agents.open([4], name="plan"), max_tokens=LONG)
    begun(agents)
    seen = used(rig.endpoint, lambda source: source.look())
    assert {session.owner for session in seen.sessions} == {"editor", "agents"}
    running = next(request for request in seen.requests if request.op == "decode")
    assert (running.owner, running.session, running.state) == (
        "agents",
        named(seen, "plan").session,
        "running",
    )
    assert seen.stats.models[0]["id"] == "toy"
    assert seen.endpoint == rig.endpoint
    agents.ask("cancel", session="plan")
    assert agents.final(decode)["finish"] == "cancelled"


def test_acts_are_those_of_the_sessions_owner(rig: Rig) -> None:
    agents = rig.client("agents")
    agents.open([1], name="plan")
    decode = agents.send("decode", session="plan", max_tokens=LONG)
    begun(agents)

    async def use(source: DaemonSource) -> None:
        session = named(await source.look(), "plan")
        assert await source.act(Act.CANCEL, session) == "What ran in plan was cancelled."
        assert agents.final(decode)["finish"] == "cancelled"
        assert await source.act(Act.CANCEL, session) == "Nothing runs in plan."
        with pytest.raises(Unsupported):  # this broker has no place for it
            await source.act(Act.PARK, session)
        assert (await source.act(Act.CLOSE, session)).startswith("plan is closed: ")
        assert (await source.look()).sessions == []
        with pytest.raises(NotFound):
            await source.act(Act.CANCEL, session)

    used(rig.endpoint, use)


def test_a_park_tells_what_it_freed(start_broker: StartBroker, state: Path) -> None:
    rig = start_broker(state_dir=state)
    rig.client("agents").open([1, 2, 3], name="plan")

    async def use(source: DaemonSource) -> str:
        return await source.act(Act.PARK, named(await source.look(), "plan"))

    assert used(rig.endpoint, use).startswith("plan is parked (disk): ")


def test_with_a_key_one_sees_and_touches_what_is_the_keys(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner is `laptop/editor`; a client of that key is it by calling itself `editor`."""
    network = Network(start_broker, tmp_path)
    network.rig.client("editor").open([9], name="local")
    monkeypatch.setenv("STATEROOM_KEY_FILE", str(network.key("laptop")))

    async def use(source: DaemonSource) -> None:
        seen = await source.look()
        assert [(session.name, session.owner) for session in seen.sessions] == [("remote", "laptop/editor")]
        await source.act(Act.CLOSE, seen.sessions[0])
        assert (await source.look()).sessions == []

    with connect(network.endpoint, app="editor") as room:
        room.open(tokens=[1, 2], name="remote")
        used(network.endpoint, use)


# ---------------------------------------------------------------- daemons that go, and old ones


def test_a_daemon_that_went_is_found_again_when_it_is_back(again: Callable[..., Rig]) -> None:
    rig = again()
    rig.client("editor").open([1], name="buffer")
    endpoint = rig.endpoint

    async def use(source: DaemonSource) -> None:
        assert named(await source.look(), "buffer").length == 1
        await asyncio.to_thread(rig.stop)
        with pytest.raises((NoDaemon, Disconnected)):  # the latter if it isn't known yet that it went
            await source.look()
        await asyncio.to_thread(again, endpoint=endpoint)
        assert named(await looked(source), "buffer").length == 1

    used(endpoint, use)


@pytest.fixture
def old_daemon(tmp_path: Path) -> Iterator[str]:
    """It says hello and knows no other operation."""
    endpoint, context, over = f"ipc://{tmp_path}/old.sock", zmq.Context(), threading.Event()
    hello = HelloResult(
        server="stateroom", version="0.0.9", protocol=[1], app="top", models=[], limits=ServerLimits()
    )

    def serve() -> None:
        router = context.socket(zmq.ROUTER)
        router.bind(endpoint)
        while not over.is_set():
            if not router.poll(50):
                continue
            who, frame = router.recv_multipart()
            asked = msgpack.unpackb(frame)
            reply = {"v": 1, "id": asked["id"], "seq": 0, "final": True}
            if asked["op"] == "hello":
                reply |= {"kind": "result", **to_wire(hello)}
            else:
                error = {"code": "unknown_op", "message": "There is no such operation.", "details": {}}
                reply |= {"kind": "error", "error": error}
            router.send_multipart([who, msgpack.packb(reply)])
        router.close(0)

    thread = threading.Thread(target=serve)
    thread.start()
    yield endpoint
    over.set()
    thread.join(10)
    context.term()


def test_a_daemon_that_is_too_old_is_told_in_one_line(old_daemon: str) -> None:
    with pytest.raises(Leave, match=r"^The daemon, of version 0\.0\.9, is too old .*\.$") as told:
        used(old_daemon, lambda source: source.look())
    assert "\n" not in told.value.message


# ---------------------------------------------------------------- its own load


@given(
    st.floats(0.0, 0.5),
    st.lists(st.floats(0.0, 2.0), min_size=1, max_size=60),
    st.floats(0.2, 5.0),
)
def test_looks_take_no_more_of_the_daemons_time_than_they_may(
    needed_s: float, waited_s: list[float], interval_s: float
) -> None:
    """However long some have to wait besides; and they are never more often than was asked for."""
    pace, now = Pace(interval_s), 0.0
    for waited in waited_s:
        pace.took(now, needed_s + waited)
        assert pace.every_s >= max(interval_s, needed_s / BUSY_PART * (1 - 1e-9))
        assert not pace.due(now)
        assert pace.due(now + pace.every_s)
        now += pace.every_s
    for _ in range(LOOKS_COUNTED):
        pace.took(now, needed_s)
    assert pace.every_s == max(interval_s, needed_s / BUSY_PART)  # what they waited is forgotten


def test_sessions_are_read_less_often_when_that_keeps_the_daemon_busy(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon says that each answer to `stats` finds it 0.1 s busier."""
    rig.client("editor").open([1], name="buffer")
    busy = itertools.count()
    monkeypatch.setattr("stateroom.daemon.broker.usage", lambda: {"cpu_s": next(busy) / 10})

    async def use(source: DaemonSource) -> tuple[Snapshot, Snapshot]:
        return await source.look(), await source.look()

    first, second = used(rig.endpoint, use)
    assert second.sessions_at_s == first.sessions_at_s < second.at_s  # not read again
    assert second.sessions == first.sessions
    assert second.sessions_every_s == pytest.approx(0.1 / BUSY_PART)
