"""`trace` through a broker with scripted workers: to whom, with which parts, and never waiting long."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from tests.daemon.conftest import StartBroker
from tests.daemon.rig import Raw, Rig
from tests.daemon.test_reads import working

from stateroom.daemon import traces
from stateroom.daemon.tickets import RECENT_MAX
from stateroom.daemon.traces import WAITING_MAX

PARTS = ("broker", "engine")


def rid_of(client: Raw, op: str, **arguments: Any) -> int:
    """Of the latest such request."""
    found = [info["rid"] for info in client.ask("requests", **arguments)["requests"] if info["op"] == op]
    return max(found)


def traced(client: Raw, rid: int, **arguments: Any) -> dict[str, Any]:
    made = client.ask("trace", request=rid, **arguments)
    assert made["kind"] == "result", made
    starts = [span["start_ms"] for span in made["spans"]]
    assert starts == sorted(starts)
    assert {span["where"] for span in made["spans"]} <= set(PARTS)
    return made


def names(made: dict[str, Any], where: str = "broker") -> list[str]:
    return [span["name"] for span in made["spans"] if span["where"] == where]


def test_a_request_that_ended(rig: Rig) -> None:
    client = rig.client("app")
    client.ask("decode", session=client.open(), max_tokens=5)
    made = traced(client, rid_of(client, "decode"))
    assert made["request"]["code"] == "ok"
    assert made["request"]["state"] == "done"
    assert names(made) == ["worker", "first token", "sends", "ended"]
    assert names(made, "engine") == ["turn"]  # as the script has it
    assert made["spans"][0]["details"] == {"model": "toy", "generation": 1}
    assert next(s for s in made["spans"] if s["name"] == "sends")["details"]["replies"] == 5
    assert "missing" not in made
    assert made["dropped"] == 0
    # It's no request to be remembered itself, nor are those that are answered at once.
    assert {info["op"] for info in client.ask("requests")["requests"]} == {"open", "decode"}


def test_a_request_that_goes_on(rig: Rig) -> None:
    client = rig.client("app")
    session = client.open()
    decode = client.send("decode", session=session, max_tokens=100_000)
    client.begun(decode)
    made = traced(client, rid_of(client, "decode"))
    assert made["request"]["state"] == "running"
    (worker,) = [span for span in made["spans"] if span["name"] == "worker"]
    assert worker["ms"] > 0
    close = client.send("close", session=session)  # waits for the decode's end
    client.final(close)
    (queued,) = [s for s in traced(client, rid_of(client, "close"))["spans"] if s["name"] == "queued"]
    assert queued["details"] == {"why": "session"}


def test_only_who_may_see_a_request_may_trace_it(rig: Rig) -> None:
    mine, other = rig.client("mine"), rig.client("other")
    mine.open()
    rid = rid_of(mine, "open")
    assert traced(mine, rid)["request"]["owner"] == "mine"
    for stranger, wrong in ((other, rid), (mine, 10**9)):
        error = stranger.refusal("trace", request=wrong)
        assert (error["code"], error["field"]) == ("not_found", "request")
    # On the local socket every app may ask for everyone's.
    assert traced(other, rid, everyone=True)["request"]["owner"] == "mine"


def test_of_a_worker_that_died_the_broker_s_part_is_left(start_broker: StartBroker) -> None:
    rig = start_broker("step_s=0.05")
    client = rig.client("app")
    session = client.open()
    decode = client.send("decode", session=session, max_tokens=20)
    client.begun(decode)
    os.kill(working(rig), signal.SIGKILL)
    client.final(decode)
    made = traced(client, rid_of(client, "decode"))
    workers = [span for span in made["spans"] if span["name"] == "worker"]
    assert [span["details"].get("lost") for span in workers] == ["yes", None]
    first, second = (span["details"]["generation"] for span in workers)
    assert first < second
    queued = [span["details"]["why"] for span in made["spans"] if span["name"] == "queued"]
    assert "engine" in queued
    assert names(made, "engine") == ["turn"]  # the second worker's
    assert f"#{first}" in made["missing"]
    assert f"#{second}" not in made["missing"]
    # The open was the first one's, of which nothing can be asked any more.
    made = traced(client, rid_of(client, "open"))
    assert names(made, "engine") == []
    assert f"#{first}" in made["missing"]


def test_a_worker_that_is_silent_is_waited_for_a_moment(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "WAIT_S", 2.0)
    client, other = rig.client("app"), rig.client("app")
    client.open()
    rid, pid = rid_of(client, "open"), working(rig)
    os.kill(pid, signal.SIGSTOP)
    try:
        asked = [client.send("trace", request=rid) for _ in range(WAITING_MAX)]
        rig.until(lambda broker: len(broker.tickets) == WAITING_MAX)
        assert other.refusal("trace", request=rid)["code"] == "capacity"
        assert client.ask("cancel", request=asked[0])["cancelled"] is False  # it's over soon enough
        made = [client.final(each) for each in asked]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert all(each["kind"] == "result" for each in made)
    assert all(names(each, "engine") == [] for each in made)
    assert all("did not answer" in each["missing"] for each in made)
    assert "missing" not in traced(client, rid)
    client.nothing_more()


def test_a_worker_that_dies_while_it_is_asked_is_not_waited_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "WAIT_S", 600.0)
    client = rig.client("app")
    session = client.open()
    decode = client.send("decode", session=session, max_tokens=3)
    client.final(decode)
    rid, pid = rid_of(client, "decode"), working(rig)
    os.kill(pid, signal.SIGSTOP)
    asked = [client.send("trace", request=rid) for _ in range(2)]
    rig.until(lambda broker: len(broker.tickets) == 2)
    os.kill(pid, signal.SIGKILL)
    for each in asked:
        made = client.final(each)
        assert names(made, "engine") == []
        assert "went with them" in made["missing"]


def test_who_goes_away_while_a_trace_is_made(rig: Rig) -> None:
    client, other = rig.client("app"), rig.client("app")
    client.open()
    rid, pid = rid_of(client, "open"), working(rig)
    os.kill(pid, signal.SIGSTOP)
    try:
        client.send("trace", request=rid)
        rig.until(lambda broker: len(broker.tickets) == 1)
        client.close()
        rig.until(lambda broker: len(broker.tickets) == 0)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert traced(other, rid)["request"]["rid"] == rid


def test_the_last_requests_are_remembered(rig: Rig) -> None:
    client = rig.client("app")
    session = client.open()
    first = rid_of(client, "open")
    for _ in range(RECENT_MAX):
        client.ask("tokens", session=session)
    assert client.refusal("trace", request=first)["code"] == "not_found"
    assert names(traced(client, rid_of(client, "tokens"))) == ["worker", "ended"]
    assert rig.look(lambda broker: len(broker.tickets.recent)) == RECENT_MAX


def test_where_nothing_is_recorded(start_broker: StartBroker) -> None:
    rig = start_broker(record=False)  # and the worker, which is told, starts
    client = rig.client("app")
    client.open()
    assert client.refusal("trace", request=rid_of(client, "open"))["code"] == "unsupported"


def test_one_number_finds_a_request_in_all_of_the_log(start_broker: StartBroker) -> None:
    rig = start_broker("step_s=0.05")
    client = rig.client()
    client.ask("hello", app="app", client="nvim")
    session = client.open()
    decode = client.send("decode", session=session, max_tokens=10)
    client.begun(decode)
    os.kill(working(rig), signal.SIGKILL)
    client.final(decode)
    rid = rid_of(client, "decode")
    entries = [e for e in rig.entries() if rid in (e.get("rid"), *e.get("rids", []))]
    assert [entry["event"] for entry in entries] == ["requests interrupted", "request"]
    assert {name: entries[1][name] for name in ("client", "id", "op")} == {
        "client": "nvim",
        "id": decode,
        "op": "decode",
    }
