"""`connect` and `connect_async` where there is no daemon, or not the one hoped for."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.client.peer import Peer
from tests.measured import best

from stateroom.client import connect, connect_async
from stateroom.client.errors import BadEndpoint, ClientError, Invalid, NoDaemon, WrongVersion
from stateroom.client.paths import IPC_PATH_BYTES_MAX
from stateroom.client.timeouts import CONNECT_TIMEOUT_S

Connect = Callable[..., object]


def blocking(endpoint: str | None = None, *, app: str = "tests", timeout_s: float = 1.5) -> str:
    with connect(endpoint, app=app, timeout_s=timeout_s) as room:
        return room.hello().app


def asynchronous(endpoint: str | None = None, *, app: str = "tests", timeout_s: float = 1.5) -> str:
    async def main() -> str:
        async with connect_async(endpoint, app=app, timeout_s=timeout_s) as room:
            return (await room.hello()).app

    return asyncio.run(main())


both = pytest.mark.parametrize("client_connect", [blocking, asynchronous])


def no_daemon(client_connect: Connect, endpoint: str, says: str) -> None:
    def fails() -> float:
        started = time.monotonic()
        with pytest.raises(NoDaemon, match="stateroom serve") as caught:
            client_connect(endpoint)
        took_s = time.monotonic() - started
        assert endpoint in str(caught.value)
        assert says in str(caught.value)
        assert isinstance(caught.value, ClientError)
        assert isinstance(caught.value, ConnectionError)
        return took_s

    assert best(fails, 2.0) < 2.0


@both
def test_no_socket(client_connect: Connect, client_endpoint: str) -> None:
    no_daemon(client_connect, client_endpoint, "No daemon answers")


@both
def test_a_socket_file_that_a_killed_daemon_left(client_connect: Connect, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "s"))
    assert (tmp_path / "s").is_socket()
    no_daemon(client_connect, f"ipc://{tmp_path}/s", "No daemon answers")


@both
def test_a_regular_file_in_the_place_of_the_socket(client_connect: Connect, tmp_path: Path) -> None:
    (tmp_path / "s").write_text("mine")
    no_daemon(client_connect, f"ipc://{tmp_path}/s", "No daemon answers")
    assert (tmp_path / "s").read_text() == "mine"


@both
def test_somebody_who_listens_and_is_silent(client_connect: Connect, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        no_daemon(client_connect, f"ipc://{tmp_path}/s", "did not answer within 1.5 s")


@both
def test_a_daemon_that_hangs(client_connect: Connect, client_peer: Peer) -> None:
    client_peer.on["hello"] = lambda call: None
    no_daemon(client_connect, client_peer.endpoint, "did not answer within 1.5 s")


@both
def test_nobody_at_a_tcp_port(client_connect: Connect) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and doesn't listen: nobody else gets the port meanwhile
        port = silent.getsockname()[1]
        no_daemon(client_connect, f"tcp://127.0.0.1:{port}", "No daemon answers")


@both
def test_the_time_to_wait_for_a_daemon_can_be_chosen(client_connect: Connect, client_endpoint: str) -> None:
    def fails() -> float:
        started = time.monotonic()
        with pytest.raises(NoDaemon):
            client_connect(client_endpoint, timeout_s=0.1)
        return time.monotonic() - started

    assert best(fails, CONNECT_TIMEOUT_S) < CONNECT_TIMEOUT_S  # which it would be if nothing were chosen


@both
def test_a_daemon_that_is_just_starting_is_waited_for(client_connect: Connect, client_endpoint: str) -> None:
    peers: list[Peer] = []
    starter = threading.Timer(0.3, lambda: peers.append(Peer(client_endpoint)))
    starter.start()
    try:
        assert client_connect(client_endpoint, timeout_s=4) == "tests"
    finally:
        starter.join()
        peers[0].stop()


@both
def test_a_daemon_that_refuses_is_not_taken_for_none(client_connect: Connect, client_peer: Peer) -> None:
    client_peer.on["hello"] = lambda call: call.error("version", "Speak 2.", supported=[2])
    with pytest.raises(WrongVersion, match="Speak 2") as caught:
        client_connect(client_peer.endpoint)
    assert caught.value.details == {"supported": [2]}


@both
def test_the_endpoint_of_the_environment(
    client_connect: Connect, client_peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATEROOM_ENDPOINT", client_peer.endpoint)
    assert client_connect(app="mine") == "mine"


@both
def test_endpoints_that_cannot_work(client_connect: Connect) -> None:
    """B64."""
    with pytest.raises(BadEndpoint, match="STATEROOM_RUNTIME_DIR"):
        client_connect("ipc:///" + "x" * IPC_PATH_BYTES_MAX)
    with pytest.raises(BadEndpoint, match="no endpoint"):
        client_connect("/run/stateroom.sock")
    with pytest.raises(BadEndpoint, match="can't connect to tcp://nowhere"):
        client_connect("tcp://nowhere")


@both
def test_an_app_that_cannot_travel(client_connect: Connect, client_peer: Peer) -> None:
    """B73."""
    with pytest.raises(Invalid) as caught:
        client_connect(client_peer.endpoint, app="\ud800")
    assert caught.value.field == "app"
