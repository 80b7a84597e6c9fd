"""tcp:// on loopback, with real sockets and keys: who gets in, who doesn't, and what a key lets one be."""

from __future__ import annotations

import asyncio
import io
import itertools
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from tests.daemon.conftest import StartBroker
from tests.daemon.rig import Raw, Rig

from stateroom.client import connect, connect_async
from stateroom.client.errors import ClientError, KeyRefused, NotFound
from stateroom.daemon.blas import Blas
from stateroom.daemon.broker import Broker
from stateroom.daemon.config import Config
from stateroom.daemon.curve import make_pair
from stateroom.daemon.exits import Leave
from stateroom.daemon.keys import Keys, write_key_file
from stateroom.daemon.logs import make_log

IMPATIENT_S = 0.7  # for those who wait in vain


class Network:
    """A broker that listens at a socket and, for those with a key, at a port of this machine."""

    def __init__(self, start_broker: StartBroker, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.keys = Keys(folder / "keys")
        self.pair = make_pair()
        self.keys.keep_server(self.pair)
        self.rig: Rig = start_broker(keys_dir=self.keys.folder, listen="tcp://127.0.0.1:*", **options)
        self.endpoint: str = self.rig.look(lambda broker: broker.listening)
        self._numbers = itertools.count()

    def key(self, name: str, *, allowed: bool = True, server: str | None = None) -> Path:
        """The file of a new client."""
        pair = make_pair()
        if allowed:
            self.keys.allow(name, pair.public)
        path = self.folder / f"{name}-{next(self._numbers)}.key"
        fields = {"name": name, "public": pair.public, "secret": pair.secret}
        write_key_file(path, fields | {"server": server or self.pair.public})
        return path


@pytest.fixture
def network(start_broker: StartBroker) -> Iterator[Network]:
    folder = Path(tempfile.mkdtemp(prefix="srk-", dir="/tmp"))
    yield Network(start_broker, folder)
    shutil.rmtree(folder, ignore_errors=True)


def blocking(endpoint: str, key: Path | None) -> str:
    with connect(endpoint, app="tests", key=key, timeout_s=IMPATIENT_S) as room:
        return room.hello().app


def asynchronous(endpoint: str, key: Path | None) -> str:
    async def main() -> str:
        async with connect_async(endpoint, app="tests", key=key, timeout_s=IMPATIENT_S) as room:
            return (await room.hello()).app

    return asyncio.run(main())


both = pytest.mark.parametrize("client_connect", [blocking, asynchronous])
Connect = Callable[[str, Path | None], str]


@both
def test_a_key_that_is_allowed_gets_in(network: Network, client_connect: Connect) -> None:
    assert client_connect(network.endpoint, network.key("laptop")) == "laptop/tests"
    assert client_connect(network.rig.endpoint, None) == "tests"  # the socket beside it demands none


@both
def test_others_do_not_get_in_and_hear_why(
    network: Network, client_connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B76: a key that isn't allowed, none at all, and one for another daemon. Nothing of theirs is read."""
    stranger = network.key("stranger", allowed=False)
    with pytest.raises(KeyRefused, match=re.escape(str(stranger))):
        client_connect(network.endpoint, stranger)
    with pytest.raises(KeyRefused, match="without a key"):
        client_connect(network.endpoint, None)
    astray = network.key("astray", server=make_pair().public)
    with pytest.raises(ClientError):
        client_connect(network.endpoint, astray)
    assert network.rig.look(lambda broker: broker.metrics.counters()["clients_seen"]) == 0
    monkeypatch.setenv("STATEROOM_KEY_FILE", str(network.key("laptop")))
    assert client_connect(network.endpoint, None) == "laptop/tests"


def test_nothing_that_is_no_handshake_gets_through(network: Network) -> None:
    """Frames without encryption, and bytes that are no ZMTP: the daemon answers others as before."""
    raw = Raw(network.rig.context, network.endpoint)
    raw.send("hello")
    assert not raw.socket.poll(300)
    raw.close()
    stream = network.rig.context.socket(zmq.STREAM)
    stream.set(zmq.LINGER, 0)
    stream.connect(network.endpoint)
    peer, _ = stream.recv_multipart()
    stream.send_multipart([peer, b"\x80\x04\x95cposix\nsystem\n" * 100])
    stream.close()
    assert blocking(network.endpoint, network.key("laptop")) == "laptop/tests"
    assert network.rig.look(lambda broker: broker.metrics.counters()["frames_refused"]) == 0


def test_a_key_is_nobody_but_itself(network: Network) -> None:
    """Whatever `app` it says, it sees nothing of a local program's, nor of another key's."""
    local = network.rig.client("editor")
    theirs = local.open([1, 2, 3], name="plan")
    with (
        connect(network.endpoint, app="editor", key=network.key("laptop")) as laptop,
        connect(network.endpoint, app="editor", key=network.key("phone")) as phone,
    ):
        mine = laptop.open(tokens=[4, 5], name="plan")
        for room, reference in ((laptop, theirs), (phone, theirs), (phone, mine.id), (phone, "plan")):
            with pytest.raises(NotFound):
                room.session(reference).info()
        assert [info.owner for info in laptop.list()] == ["laptop/editor"]
        assert phone.list() == []
        for app in ("laptop/editor", "../laptop/editor", "/laptop/editor"):
            with connect(network.endpoint, app=app, key=network.key(f"k{len(app)}")) as room:
                assert room.list() == []
                assert room.hello().app.startswith(f"k{len(app)}/")
    assert [info["session"] for info in local.ask("list")["sessions"]] == [theirs]
    local.close()


def test_everyone_is_who_came_with_the_same_key(network: Network) -> None:
    """Sessions, trunks and requests of all its apps, and of nobody else, whose names may begin alike."""
    local, mimic = network.rig.client("editor"), network.rig.client("laptop")
    theirs = [local.open(name="plan"), mimic.open(name="plan")]
    local.ask("publish", session="plan", as_="rules")
    key = network.key("laptop")
    with (
        connect(network.endpoint, app="editor", key=key) as editor,
        connect(network.endpoint, app="agent", key=key) as agent,
        connect(network.endpoint, app="editor", key=network.key("laptop2")) as phone,
    ):
        mine, other = editor.open(tokens=[4, 5]), agent.open(tokens=[6])
        other.publish("shown")
        theirs.append(phone.open(tokens=[7]).id)
        assert [info.session for info in editor.list()] == [mine.id]
        owners = {"laptop/editor", "laptop/agent"}
        assert {info.session for info in editor.list(everyone=True)} == {mine.id, other.id}
        assert {info.owner for info in editor.list(everyone=True)} == owners
        assert [trunk.owner for trunk in editor.trunks(everyone=True)] == ["laptop/agent"]
        assert editor.trunks() == []
        assert {info.owner for info in editor.requests()} == {"laptop/editor"}
        assert {info.owner for info in editor.requests(everyone=True)} == owners
        assert {info.session for info in editor.requests(other.id, everyone=True)} == {other.id}
        for reference in (*theirs, "plan"):
            with pytest.raises(NotFound):
                editor.requests(reference, everyone=True)
        for room in (editor, agent, phone):
            told = [info.owner for info in (*room.list(everyone=True), *room.requests(everyone=True))]
            assert {owner.rpartition("/")[0] for owner in told} == {room.server.app.rpartition("/")[0]}
    everyone = {info["session"] for info in local.ask("list", everyone=True)["sessions"]}
    assert everyone == {mine.id, other.id, *theirs}  # over the local socket
    local.close()
    mimic.close()


def test_a_key_that_is_revoked_is_not_heard_any_more(network: Network) -> None:
    """Its streams and connections end, and it gets no other; other keys notice nothing."""
    network.rig.until(lambda broker: any(engine.ready for engine in broker.supervisor.engines))
    key = network.key("laptop")
    with (
        connect(network.endpoint, key=key, timeout_s=IMPATIENT_S) as room,
        connect(network.endpoint, key=network.key("phone")) as other,
    ):
        session = room.open(tokens=[1, 2, 3])
        stream = iter(session.decode(max_tokens=1_000_000, ignore_eos=True))
        next(stream)
        network.keys.revoke("laptop")
        assert network.rig.look(lambda broker: len(broker.tickets)) == 1
        network.rig.until(lambda broker: len(broker.tickets) == 0)
        with pytest.raises(KeyRefused):
            room.list()  # its connection was ended, and it gets no other
        with pytest.raises(KeyRefused):
            blocking(network.endpoint, key)
        assert other.list() == []
        # Another key under the old name gets in, and has what was its name's; the old one stays out.
        again = network.key("laptop")
        with connect(network.endpoint, key=again) as renewed:
            assert [info.session for info in renewed.list()] == [session.id]
        with pytest.raises(KeyRefused):
            room.list()
    entries = [entry for entry in network.rig.entries() if entry["event"] == "keys revoked"]
    assert [entry["connections"] for entry in entries] == [1]


@pytest.mark.parametrize("place", ["endpoint", "listen"])
def test_without_keys_there_is_no_network(tmp_path: Path, place: str) -> None:
    """A broker that is told to listen and has no key is not made at all."""
    places = {"endpoint": f"ipc://{tmp_path}/s", "runtime_dir": tmp_path, "models_dir": tmp_path}
    config = Config(**places | {"keys_dir": tmp_path, place: "tcp://127.0.0.1:*"})  # type: ignore[arg-type]

    async def main() -> None:
        Broker(config, make_log("json", "info", io.StringIO()), Blas(None))

    with pytest.raises(Leave, match="keys init"):
        asyncio.run(main())


def test_a_routing_id_that_a_client_chose_is_refused(rig: Rig) -> None:
    """Another could choose the same, and get the replies that come late."""
    chosen = rig.context.socket(zmq.DEALER)
    chosen.set(zmq.LINGER, 0)
    chosen.set(zmq.ROUTING_ID, b"me")
    chosen.connect(rig.endpoint)
    chosen.send(msgpack.packb({"v": 1, "id": 7, "op": "list"}))
    assert chosen.poll(5_000)
    reply = msgpack.unpackb(chosen.recv())
    chosen.close()
    assert (reply["id"], reply["final"], reply["error"]["code"]) == (7, True, "invalid")
    assert "ZMQ_ROUTING_ID" in reply["error"]["message"]
