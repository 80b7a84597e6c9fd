"""Sessions that an `open` or `fork` makes for a client that is gone by then."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tests.daemon.rig import Raw, Rig

StartBroker = Callable[..., Rig]


@contextmanager
def orphaned(rig: Rig, client: Raw) -> Iterator[None]:
    """What is asked in here is under way when the client goes, and is answered only then."""
    rig.until(lambda broker: broker.supervisor.engine("toy").ready)
    pid = rig.look(lambda broker: broker.supervisor.engine("toy").pid)
    assert pid is not None
    before = rig.look(lambda broker: len(broker.peers))
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
        client.close()
        rig.until(lambda broker: len(broker.peers) == before - 1)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    rig.until(lambda broker: len(broker.tickets) == 0)


def asked(rig: Rig, count: int) -> None:
    rig.until(lambda broker: len(broker.tickets) == count)


def test_what_nobody_can_reach_is_closed_and_what_has_a_name_stays(rig: Rig) -> None:
    """B59: in the catalog and in the worker alike."""
    stays = rig.client("app")
    parent = stays.open([1, 2, 3], name="parent")
    client = rig.client("app")
    with orphaned(rig, client):
        client.send("open", tokens=[1] * 5)
        client.send("open", tokens=[2] * 5, name="named")
        client.send("fork", session=parent, n=3)
        asked(rig, 3)
    assert {session["name"] for session in stays.ask("list")["sessions"]} == {"parent", "named"}
    rig.until(lambda broker: broker.supervisor.engine("toy").gauges.get("sessions") == 2)
    counters = stays.ask("stats")["counters"]
    assert (counters["sessions_opened"], counters["sessions_closed"]) == (6, 4)
    assert stays.ask("decode", session="parent", max_tokens=1)["length"] == 4
    with orphaned(rig, client := rig.client("app")):
        client.send("fork", session="parent", n=2, names=["left", "right"])
        asked(rig, 1)
    names = {session["name"] for session in stays.ask("list")["sessions"]}
    assert names == {"parent", "named", "left", "right"}
    assert stays.ask("tokens", session="left")["tokens"][:3] == [1, 2, 3]


def test_an_orphan_whose_worker_dies_leaves_nothing_either(rig: Rig) -> None:
    stays, client = rig.client("app"), rig.client("app")
    with orphaned(rig, client):
        client.send("open", tokens=[1])
        asked(rig, 1)
        os.kill(rig.look(lambda broker: broker.supervisor.engine("toy").pid) or 0, signal.SIGKILL)
    assert stays.ask("list")["sessions"] == []
    assert stays.open([1])
