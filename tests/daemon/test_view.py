"""What the daemon shows of requests and of everyone's sessions: to whom, and why something waits."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from tests.daemon.conftest import StartBroker
from tests.daemon.rig import Raw, Rig
from tests.daemon.test_recovery import ticket_of

from stateroom.client.protocol import Decode, Export, Load, Waiting
from stateroom.daemon import tickets
from stateroom.daemon.broker import Broker
from stateroom.daemon.catalog import Catalog
from stateroom.daemon.config import Patience
from stateroom.daemon.lifecycle import RequestState
from stateroom.daemon.recovery import SUSPECT_DEATHS
from stateroom.daemon.shown import request_shown
from stateroom.daemon.waiting import waits_for

LONG = 100_000  # tokens


def asked(client: Raw, **arguments: Any) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = client.ask("requests", **arguments)["requests"]
    return made


def open_now(client: Raw, **arguments: Any) -> dict[int | None, dict[str, Any]]:
    """Those that haven't ended, by the client's own number."""
    return {info.get("id"): info for info in asked(client, **arguments) if info["state"] != "done"}


def ready(broker: Broker) -> bool:
    return broker.supervisor.engine("toy").ready


def waits(client: Raw, session: str) -> tuple[str, str | None]:
    """What `info` and `list` say of a session, which is the same."""
    info = client.ask("info", session=session)
    (listed,) = (each for each in client.ask("list")["sessions"] if each["session"] == session)
    assert listed.get("waiting") == info.get("waiting")
    assert listed["state"] == info["state"]
    return info["state"], info.get("waiting")


# ---------------------------------------------------------------- why something waits


@pytest.mark.parametrize(
    ("state", "held", "model", "op", "ready", "told", "why"),
    [
        (RequestState.HELD, True, None, Decode(session="s", max_tokens=1), True, None, "session"),
        (RequestState.HELD, False, "toy", Decode(session="s", max_tokens=1), False, "turn", "engine"),
        (RequestState.HELD, False, "toy", Decode(session="s", max_tokens=1), True, None, "trial"),
        (RequestState.HELD, False, None, Export(snapshot="s"), False, None, "disk"),
        (RequestState.HELD, False, None, Load(model="toy"), False, None, None),
        (RequestState.SENT, False, "toy", Decode(session="s", max_tokens=1), True, "yielded", "yielded"),
        (RequestState.CANCELLING, False, "toy", Decode(session="s", max_tokens=1), True, None, None),
    ],
)
def test_one_word_for_each_reason(
    state: RequestState,
    held: bool,
    model: str | None,
    op: Any,
    ready: bool,
    told: Waiting | None,
    why: Waiting | None,
) -> None:
    (session,) = Catalog(lambda: 0.0).add("app", "toy", [None], "interactive", None, [])
    ticket = ticket_of(session, op, 7, model=model)
    ticket.state, session.held = state, 7 if held else None
    assert waits_for(ticket, ready=ready, told=told) == why


def test_what_waits_for_its_engine(start_broker: StartBroker) -> None:
    """While that is started, and again when it died; a stream that goes on says so, too."""
    rig = start_broker("load_s=0.6,step_s=0.05", patience=Patience(restart_first_s=0.5))
    client = rig.client("app")
    opening = client.send("open", tokens=[1, 2, 3])
    (told,) = open_now(client).values()
    assert (told["op"], told["state"], told["waiting"], told["model"]) == ("open", "queued", "engine", "toy")
    assert waits(client, told["session"]) == ("queued", "engine")
    session = client.final(opening)["session"]
    assert waits(client, session) == ("idle", None)
    stream = client.send("decode", session=session, max_tokens=LONG, ignore_eos=True)
    client.begun(stream)
    assert waits(client, session) == ("running", None)
    os.kill(rig.look(lambda broker: broker.supervisor.engine("toy").pid or 0), signal.SIGKILL)
    rig.until(lambda broker: not ready(broker))
    assert waits(client, session) == ("queued", "engine")
    rig.until(ready)
    assert waits(client, session) == ("running", None)
    client.ask("cancel", request=stream)


def test_what_waits_for_its_session(start_broker: StartBroker) -> None:
    """A newer sync, until the one before has ended: this worker is slow to hear that it should."""
    rig = start_broker("chunk_s=0.5")
    client = rig.client("app")
    session = client.open()
    old = client.send("sync", session=session, tokens=[1] * 1000)
    rig.until(lambda broker: any(ticket.generation for ticket in broker.tickets))
    new = client.send("sync", session=session, tokens=[2])
    told = open_now(client, session=session)
    assert (told[old]["state"], told[old].get("waiting")) == ("ending", None)
    assert (told[new]["state"], told[new]["waiting"]) == ("queued", "session")
    assert client.final(new)["length"] == 1
    assert [info["id"] for info in asked(client, session=session)[:2]] == [new, old]


def test_what_waits_for_a_trial(start_broker: StartBroker) -> None:
    """The later one of two that were there when engines died goes first, by itself."""
    rig = start_broker("step_s=0.3")
    client = rig.client("app")
    behind, first = client.open(), client.open()
    client.send("decode", session=behind, max_tokens=1000)
    client.send("decode", session=first, max_tokens=1000)
    for deaths in range(SUSPECT_DEATHS):
        rig.until(lambda broker: sum(t.generation is not None for t in broker.tickets) == 2)
        os.kill(rig.look(lambda broker: broker.supervisor.engine("toy").pid or 0), signal.SIGKILL)
        rig.until(lambda broker, deaths=deaths: broker.supervisor.engine("toy").deaths > deaths)
    rig.until(ready)
    assert waits(client, behind) == ("queued", "trial")
    assert waits(client, first) == ("running", None)


def test_what_an_engine_says_is_told_until_it_goes(start_broker: StartBroker) -> None:
    patience = Patience(restart_first_s=30.0, restart_most_s=30.0, hold_s=60.0)
    rig = start_broker("waits=memory,chunk_s=0.3", patience=patience)
    client = rig.client("app")
    session = client.open()
    prefill = client.send("prefill", session=session, tokens=[1] * LONG)
    rig.until(lambda broker: bool(broker.supervisor.engine("toy").doing))
    told = open_now(client)[prefill]
    assert (told["waiting"], told["done"], told["total"], told["tokens_per_s"]) == ("memory", 7, 9, 0.0)
    assert waits(client, session) == ("running", "memory")
    os.kill(rig.look(lambda broker: broker.supervisor.engine("toy").pid or 0), signal.SIGKILL)
    rig.until(lambda broker: not ready(broker))
    assert waits(client, session) == ("queued", "engine")
    assert rig.look(lambda broker: broker.supervisor.engine("toy").doing) == {}


# ---------------------------------------------------------------- what is told of each


def test_open_ones_come_first_and_then_those_that_ended(rig: Rig) -> None:
    client = rig.client("app")
    session, other = client.open(), client.open()
    for _ in range(2):
        client.ask("prefill", session=other, tokens=[5, 6])
    streams = [client.send("decode", session=each, max_tokens=LONG) for each in (session, other)]
    for stream in streams:
        client.begun(stream)
    watch = client.send("watch")
    told = asked(client)
    assert [info.get("id") for info in told] == [*streams, watch, 5, 4, 3, 2]
    assert [info["op"] for info in told[3:]] == ["prefill", "prefill", "open", "open"]
    assert len({info["rid"] for info in told}) == len(told)
    stream = told[0]
    assert (stream["session"], stream["model"], stream["owner"]) == (session, "toy", "app")
    assert (stream["state"], stream["total"], "ms" in stream, "code" in stream) == (
        "running", LONG, False, False,
    )  # fmt: skip
    ended = told[3]
    assert (ended["state"], ended["code"], ended["done"], ended["total"]) == ("done", "ok", 2, 2)
    assert 0 <= ended["ms"] <= ended["age_s"] * 1000
    assert [info["id"] for info in asked(client, session=other)] == [streams[1], 5, 4, 3]
    assert client.refusal("requests", session="nobody")["code"] == "not_found"
    client.ask("cancel", request=streams[0])
    final = client.final(streams[0])
    (done,) = (info for info in asked(client) if info.get("id") == streams[0])
    assert (done["done"], done["total"], done["code"]) == (len(final["tokens"]), LONG, "ok")


@pytest.mark.parametrize("streamed", [True, False])
def test_a_stream_has_its_speed(start_broker: StartBroker, streamed: bool) -> None:
    """Since its first token: one that isn't streamed is known of by the engine's pulse."""
    rig = start_broker("step_s=0.02,waits=turn")
    client = rig.client("app")
    request = client.send("decode", session=client.open(), max_tokens=LONG, ignore_eos=True, stream=streamed)
    rig.until(lambda broker: any(ticket.first_s is not None for ticket in broker.tickets))
    told = open_now(client)[request]
    if streamed:
        rig.until(lambda broker: any(ticket.done > ticket.first for ticket in broker.tickets))
        told = open_now(client)[request]
        assert 1 < told["done"] < LONG
        assert 0 < told["tokens_per_s"] < 1000
    else:
        assert (told["done"], told["tokens_per_s"]) == (7, 0.0)
    client.ask("cancel", request=request)


def test_speed_is_that_of_the_tokens_behind_the_first() -> None:
    (session,) = Catalog(lambda: 0.0).add("app", "toy", [None], "interactive", None, [])
    ticket = ticket_of(session, Decode(session="s", max_tokens=50), 7)
    ticket.state = RequestState.SENT
    assert request_shown(ticket, 9.0).tokens_per_s == 0.0
    ticket.drew(4, 10.0)
    assert request_shown(ticket, 10.0).tokens_per_s == 0.0
    ticket.drew(24, 12.0)
    assert request_shown(ticket, 12.0).tokens_per_s == 10.0
    ticket.drew(2, 20.0)  # another engine began anew what nobody was told
    assert request_shown(ticket, 21.0).tokens_per_s == 0.0
    ticket.drew(7, 22.0)
    assert request_shown(ticket, 22.0).tokens_per_s == 2.5


def test_the_daemons_own_requests_are_told_to_the_sessions_owner(rig: Rig) -> None:
    client = rig.client("app")
    client.open(ttl_s=0.05)
    rig.until(lambda broker: broker.metrics.counters()["sessions_expired"] == 1)
    rig.until(lambda broker: len(broker.tickets) == 0)
    latest = asked(client)[0]
    assert (latest["op"], latest["code"], "id" in latest, "client" in latest) == ("close", "ok", False, False)


def test_only_so_many_that_ended_are_remembered(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none of those that are answered at once: a view that asks each second would push out all others."""
    client = rig.client("app")
    session = client.open()
    for _ in range(tickets.RECENT_MAX + 10):
        client.ask("lease", session=session)
    for _ in range(20):
        client.ask("list")
        client.ask("requests")
    told = asked(client)
    assert len(told) == tickets.RECENT_MAX
    assert {info["op"] for info in told} == {"lease"}
    assert [info["rid"] for info in told] == sorted((info["rid"] for info in told), reverse=True)


def test_what_a_client_calls_itself_and_one_that_went_away(rig: Rig) -> None:
    client = rig.client("app")
    client.ask("hello", client="an editor, process 7")
    session = client.open()
    client.begun(client.send("decode", session=session, max_tokens=LONG))
    other = rig.client("app")
    (stream,) = open_now(other).values()
    assert stream["client"] == "an editor, process 7"
    client.close()
    rig.until(lambda broker: len(broker.tickets) == 0)
    gone = asked(other)[0]
    assert (gone["op"], gone["code"], gone["client"]) == ("decode", "gone", "an editor, process 7")


# ---------------------------------------------------------------- who sees whose


def test_everyone_is_seen_over_the_local_socket_and_only_when_asked_for(rig: Rig) -> None:
    one, two = rig.client("one"), rig.client("two")
    mine, theirs = one.open(name="plan"), two.open(name="plan")
    trunk = two.ask("publish", session=theirs, as_="rules")["trunk"]
    two.begun(two.send("decode", session=theirs, max_tokens=LONG))
    assert [info["session"] for info in one.ask("list")["sessions"]] == [mine]
    assert one.ask("list", everyone=False)["trunks"] == []
    assert {info["owner"] for info in asked(one)} == {"one"}
    assert one.refusal("requests", session=theirs)["code"] == "not_found"
    everyone = one.ask("list", everyone=True)
    assert {(info["owner"], info["session"]) for info in everyone["sessions"]} == {
        ("one", mine), ("two", theirs),
    }  # fmt: skip
    assert [(info["owner"], info["as"], info["trunk"]) for info in everyone["trunks"]] == [
        ("two", "rules", trunk)
    ]
    assert {info["owner"] for info in asked(one, everyone=True)} == {"one", "two"}
    assert {info["session"] for info in asked(one, everyone=True, session=theirs)} == {theirs}
    assert {info["session"] for info in asked(one, everyone=True, session="plan")} == {mine}
    # To see is all: what is another's can't be touched by that.
    for op in ("info", "cancel", "close", "tokens"):
        assert one.refusal(op, session=theirs)["code"] == "not_found"


def test_who_comes_without_a_key_over_a_port_sees_its_own(start_broker: StartBroker) -> None:
    """Every user of the machine may be there."""
    rig = start_broker(listen="tcp://127.0.0.1:*", insecure_loopback=True)
    local = rig.client("local")
    theirs = local.open()
    there = Raw(rig.context, rig.look(lambda broker: broker.listening or ""))
    there.ask("hello", app="there")
    mine = there.open()
    assert [info["session"] for info in there.ask("list", everyone=True)["sessions"]] == [mine]
    assert {info["owner"] for info in asked(there, everyone=True)} == {"there"}
    assert there.refusal("requests", session=theirs, everyone=True)["code"] == "not_found"
    assert {info["session"] for info in local.ask("list", everyone=True)["sessions"]} == {mine, theirs}
    there.close()
