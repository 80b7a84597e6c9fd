"""What was trimmed, closed or forgotten is on no disk afterwards."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import pytest
from tests.conftest import StartDaemon
from tests.system.conftest import ConnectTo, await_model

from stateroom.client import Session

pytestmark = pytest.mark.system

SEED = 31
TOKENS = 200  # of each secret
VOCAB = 256  # of the tiny model


def holds(folder: Path, secret: list[int]) -> list[str]:
    """The files in which some eight tokens of the secret stand in a row."""
    words = [array("I", secret[at : at + 8]).tobytes() for at in range(0, len(secret) - 8, 4)]
    return [
        path.name
        for path in folder.rglob("*")
        if path.is_file() and (data := path.read_bytes()) and any(word in data for word in words)
    ]


def rewritten(session: Session) -> None:
    """A parked session that was made shorter is on disk as it was until it is touched and parked again."""
    session.prefill(tokens=[3])
    session.park()


@pytest.mark.parametrize("end", ["trim", "sync", "close", "forget"])
def test_no_file_holds_what_was_taken_back(
    start_daemon: StartDaemon, tiny_folder: Path, connect_to: ConnectTo, end: str
) -> None:
    """B31: a secret was saved, and is gone from snapshots and database once it is taken back."""
    daemon = start_daemon(model=tiny_folder)
    await_model(daemon)
    draw = random.Random(SEED)
    public, secret = ([draw.randrange(VOCAB) for _ in range(TOKENS)] for _ in range(2))
    state = daemon.folder / "home" / ".stateroom" / "state"
    with connect_to(daemon) as room:
        other = room.open(tokens=public)
        other.save("public")
        session = room.open(tokens=public + secret)
        session.park()
        if end == "forget":
            session.save("private")
            session.trim(to=TOKENS)
            rewritten(session)
            assert holds(state, secret), "it was never there: the search finds nothing"
            room.forget("private")
        elif end == "close":
            assert holds(state, secret)
            session.close()
        else:
            assert holds(state, secret)
            if end == "trim":
                session.trim(to=TOKENS)
            else:
                session.sync(tokens=[*public, 1, 2])
            rewritten(session)
        assert other.length == TOKENS
    assert daemon.stop() == 0  # the log of the database is folded in
    assert holds(state, public), "what was kept is there"
    assert holds(state, secret) == []
