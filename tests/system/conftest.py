"""Fixtures of the tests over real processes. All of them are marked `system`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.conftest import MEASURED, RunningDaemon, StartDaemon
from tests.daemon.rig import Raw
from tests.tiny import write_tiny_model

from stateroom.client import Room, connect

LONG_CONTEXT = 16_384  # tokens: a stream that is to be caught running must not end first
LOAD_S = 60.0

Tell = Callable[[str], None]
RawClient = Callable[..., Raw]
ConnectTo = Callable[..., Room]
Restart = Callable[[RunningDaemon], RunningDaemon]


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Tell:
    """Takes a figure that a test measured, to be shown at the end of the run, whether it passed or not."""
    return lambda figure: request.node.user_properties.append((MEASURED, f"{request.node.name}: {figure}"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of two layers, as a directory."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context=LONG_CONTEXT)


@pytest.fixture(scope="module")
def tiny_daemon(start_shared_daemon: StartDaemon, tiny_folder: Path) -> RunningDaemon:
    """A daemon that all tests of a file share, its model loaded."""
    daemon = start_shared_daemon(model=tiny_folder)
    await_model(daemon)
    return daemon


@pytest.fixture
def raw_client() -> Iterator[RawClient]:
    """`raw_client(daemon, app=…, kind=…, receive_queue=…)`: a socket that speaks the protocol by hand."""
    context: zmq.Context[Any] = zmq.Context()

    def make(
        daemon: RunningDaemon,
        app: str | None = None,
        kind: int = zmq.DEALER,
        receive_queue: int | None = None,
    ) -> Raw:
        made = Raw(context, daemon.endpoint, kind, receive_queue=receive_queue)
        if app is not None:
            assert made.ask("hello", app=app)["app"] == app
        return made

    yield make
    context.destroy(linger=0)


@pytest.fixture
def connect_to() -> Iterator[ConnectTo]:
    """`connect_to(daemon, app=…)`: rooms that are closed at the test's end."""
    rooms: list[Room] = []

    def make(daemon: RunningDaemon, app: str = "test", **options: Any) -> Room:
        rooms.append(connect(endpoint=daemon.endpoint, app=app, **options))
        return rooms[-1]

    yield make
    for room in rooms:
        room.close()


@pytest.fixture
def restart() -> Iterator[Restart]:
    """Starts a daemon again as it was started first, in the same places."""
    started: list[RunningDaemon] = []

    def again(daemon: RunningDaemon) -> RunningDaemon:
        with daemon.log.open("ab") as log:
            process = subprocess.Popen(
                daemon.process.args, env=daemon.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        started.append(RunningDaemon(daemon.endpoint, process, daemon.folder, daemon.env))
        return started[-1]

    yield again
    for daemon in started:
        daemon.stop()


def await_model(daemon: RunningDaemon) -> None:
    """Waits until the daemon's first model is loaded."""
    with connect(endpoint=daemon.endpoint, app="fixture") as room:
        room.load(room.server.models[0].id, timeout_s=LOAD_S)
