from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.client.peer import Peer


@pytest.fixture
def client_endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def client_peer(client_endpoint: str) -> Iterator[Peer]:
    """A peer at `client_endpoint`."""
    peer = Peer(client_endpoint)
    yield peer
    peer.stop()
