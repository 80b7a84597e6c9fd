"""What the broker counts of sessions whose KV leaves the device, and tells those who watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.daemon.rig import Raw, Rig

from stateroom.daemon.broker import Broker
from stateroom.daemon.lifecycle import EngineState
from stateroom.daemon.link import Journal, Journals, Left

StartBroker = Callable[..., Rig]
AFTER_S = 0.5


def counted(client: Raw, kind: str) -> dict[str, int]:
    """Counters of a kind that are not 0, by what stands behind the dot."""
    counters = client.ask("stats")["counters"]
    split = [(*name.partition("."), count) for name, count in counters.items()]
    return {rest: count for of, _, rest, count in split if of == kind and rest and count}


def move(rig: Rig, session: str, resident: bool, left: Left | None = None) -> None:
    """The worker tells that a session's KV left, or that it is there again."""

    def told(broker: Broker) -> None:
        found = broker.catalog.get(session)
        assert found is not None
        change = Journal(session, found.length, [], resident=resident, left=left)
        broker.work.on_journals(broker.supervisor.engine(found.model), Journals([change]))

    rig.look(told)


def test_a_reason_for_each(rig: Rig) -> None:
    client = rig.client("app")
    watch = client.send("watch", sessions=True)
    session = client.open()
    reasons: list[Left | None] = ["memory", "budget", "asked", "failed", "content", None]
    for left in reasons:
        move(rig, session, resident=False, left=left)
        move(rig, session, resident=False, left=left)  # it is away already
        move(rig, session, resident=True)
    rig.look(lambda broker: setattr(broker.memory.pressure, "most_bytes", 1))
    for left in ("budget", "memory"):
        move(rig, session, resident=False, left=left)
        move(rig, session, resident=True)
    wanted = {"memory": 2, "budget": 1, "pressure": 1, "asked": 1, "failed": 1, "content": 2}
    assert counted(client, "evicted") == wanted
    assert counted(client, "moved") == {"resident": 8, "tokens": 8}
    client.ask("cancel", request=watch)
    moved = [each["details"] for each in client.replies(watch)[:-1] if each["event"] == "session_moved"]
    away = [each["reason"] for each in moved if each["tier"] == "tokens"]
    assert away == ["memory", "budget", "asked", "failed", "content", "content", "pressure", "memory"]
    assert all("reason" not in each for each in moved if each["tier"] == "resident")


def test_with_its_engine(start_broker: StartBroker) -> None:
    rig = start_broker("", unload_after_s=AFTER_S)
    client = rig.client("app")
    session = client.open()

    def ended(count: int) -> None:
        rig.until(lambda broker: broker.supervisor.engine("toy").starts > count)

    rig.look(lambda broker: broker.supervisor.engine("toy").kill("a test"))
    ended(1)
    assert counted(client, "evicted") == {"lost": 1}
    client.ask("prefill", session=session, tokens=[7])
    counters = client.ask("stats")["counters"]
    assert (counters["sessions_recovered"], counters["engine_deaths"]) == (1, 1)
    client.ask("unload", model="toy")
    assert counted(client, "evicted") == {"lost": 1, "unloaded": 1}
    client.ask("prefill", session=session, tokens=[7])
    rig.until(lambda broker: broker.supervisor.engine("toy").state is EngineState.STOPPED)
    assert counted(client, "evicted") == {"lost": 1, "unloaded": 1, "unused": 1}
    # It was not lost this time.
    client.ask("prefill", session=session, tokens=[7])
    assert client.ask("stats")["counters"]["sessions_recovered"] == 1
    rig.stop()
    assert rig.broker.metrics.counters()["evicted.stopped"] == 1


def test_watches_hear_of_those_whom_they_may_see(rig: Rig) -> None:
    mine, other = rig.client("mine"), rig.client("other")
    own, all_of_them = mine.send("watch"), mine.send("watch", everyone=True)
    sessions = [mine.open(), other.open()]

    def opened(watch: int) -> list[dict[str, Any]]:
        mine.ask("cancel", request=watch)
        return [each for each in mine.replies(watch)[:-1] if each["event"] == "session_opened"]

    told = opened(all_of_them)
    assert [each["session"] for each in told] == sessions
    assert [each["details"] for each in told] == [{"owner": "mine"}, {"owner": "other"}]
    (told_own,) = opened(own)
    assert told_own["session"] == sessions[0]
    assert "owner" not in told_own["details"]


def test_receipts_by_source(rig: Rig) -> None:
    client = rig.client("app")
    session = client.open([1, 2, 3])
    client.ask("prefill", session=session, tokens=[4, 5])
    before = client.ask("stats")["counters"]
    receipts = counted(client, "receipts")
    assert sum(receipts.values()) == 2
    assert before["tokens_reused"] == sum(counted(client, "tokens_reused").values())
