from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.client.peer import Peer, end_as_cancelled, endless

from stateroom.client import Room, connect


@pytest.fixture
def client_endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def client_peer(client_endpoint: str) -> Iterator[Peer]:
    """A peer at `client_endpoint`."""
    peer = Peer(client_endpoint)
    yield peer
    peer.stop()


@pytest.fixture
def client_room(client_peer: Peer) -> Iterator[Room]:
    with connect(client_peer.endpoint, app="tests") as room:
        yield room


@pytest.fixture
def endless_peer(client_peer: Peer) -> Peer:
    client_peer.on |= {"decode": endless, "cancelled": end_as_cancelled}
    return client_peer
