"""The broker over real sockets, with a scripted worker process behind it."""

from __future__ import annotations

from collections.abc import Callable

import msgpack
import pytest
import zmq
from tests.daemon.rig import Raw, Rig

from stateroom.client.protocol import Decode


def test_a_session_from_open_to_close(rig: Rig) -> None:
    client = rig.client("editor")
    opened = client.ask("open", tokens=[5, 6, 7], name="draft", class_="background", ttl_s=60)
    assert opened["kind"] == "result"
    session = opened["session"]
    assert opened["length"] == 3
    assert len(session) >= 22  # 128 bits in base64

    replies = client.replies(client.send("decode", session="draft", max_tokens=4))
    assert [reply["tokens"] for reply in replies[:-1]] == [[3], [4], [5], [6]]
    assert replies[-1]["finish"] == "length"
    assert replies[-1]["length"] == 7

    assert client.ask("trim", session=session, to=5)["length"] == 5
    synced = client.ask("sync", session=session, tokens=[5, 6, 9])
    assert (synced["length"], synced["receipt"]["reused"], synced["receipt"]["trimmed"]) == (3, 2, 3)
    assert client.ask("tokens", session=session)["tokens"] == [5, 6, 9]

    forked = client.ask("fork", session=session, n=2, names=["a", "b"])
    assert len(set(forked["sessions"])) == 2
    assert client.ask("prefill", session="a", tokens=[1])["length"] == 4
    assert client.ask("tokens", session="b")["tokens"] == [5, 6, 9]

    info = client.ask("info", session="a")
    assert info["parents"] == [session]
    assert (info["length"], info["class"], info["owner"], info["state"]) == (
        4,
        "background",
        "editor",
        "idle",
    )
    listed = client.ask("list")["sessions"]
    assert {entry["name"] for entry in listed} == {"draft", "a", "b"}

    for name in ("draft", "a", "b"):
        assert client.ask("close", session=name)["freed_bytes"] > 0
    assert client.ask("list")["sessions"] == []
    assert client.refusal("info", session=session)["code"] == "not_found"
    client.nothing_more()


def test_the_catalog_holds_the_tokens_after_every_answer(rig: Rig) -> None:
    client = rig.client()
    session = client.open([9, 9])
    for op, arguments in (
        ("decode", {"max_tokens": 5}),
        ("decode", {"max_tokens": 5, "stream": False}),
        ("prefill", {"tokens": [1, 2]}),
        ("sync", {"tokens": [9, 9, 2, 8]}),
        ("trim", {"count": 1}),
    ):
        reply = client.ask(op, session=session, **arguments)
        held = rig.look(lambda broker: broker.catalog.get(session).tokens.tolist())  # type: ignore[union-attr]
        assert held == client.ask("tokens", session=session)["tokens"]
        assert len(held) == reply["length"]


def test_a_req_socket_gets_its_delimiter_back(rig: Rig) -> None:
    """B67: a REQ works for calls with one reply; DEALER is what streams need."""
    client = Raw(rig.context, rig.endpoint, zmq.REQ)
    assert client.ask("hello")["server"] == "stateroom"
    assert client.ask("list")["sessions"] == []
    assert client.refusal("decode", session="x", max_tokens=1)["code"] == "not_found"


def test_owners_see_their_own(rig: Rig) -> None:
    mine, theirs, nobody = rig.client("mine"), rig.client("theirs"), rig.client()
    session = mine.open(name="draft")
    for other in (theirs, nobody):
        assert other.ask("list")["sessions"] == []
        for op in ("info", "close", "tokens"):
            assert other.refusal(op, session=session)["code"] == "not_found"
            assert other.refusal(op, session="draft")["code"] == "not_found"
        assert other.refusal("cancel", session=session)["code"] == "not_found"
    assert theirs.open(name="draft") != session
    assert mine.refusal("open", name="draft")["code"] == "exists"
    assert rig.client("mine").ask("info", session="draft")["session"] == session


def test_busy_names_the_request_to_its_own_connection_only(rig: Rig) -> None:
    client, other = rig.client("app"), rig.client("app")
    session = client.open()
    running = client.send("decode", session=session, max_tokens=100_000)
    client.begun(running)
    error = client.refusal("prefill", session=session, tokens=[1])
    assert error["code"] == "busy"
    assert error["details"]["request"] == {"op": "decode", "id": running}
    assert other.refusal("trim", session=session, to=0)["details"]["request"] == {"op": "decode"}
    assert client.ask("cancel", request=running) == {
        "v": 1, "id": running + 2, "seq": 0, "kind": "result", "final": True, "cancelled": True
    }  # fmt: skip
    ended = client.final(running)
    assert ended["finish"] == "cancelled"
    assert ended["length"] == client.ask("info", session=session)["length"] == 3 + len(ended["tokens"])


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("decode", {"max_tokens": 100_000}),
        ("prefill", {"tokens": [1] * 50_000}),
        ("sync", {"tokens": [1] * 50_000}),
    ],
)
def test_sync_supersedes(rig: Rig, op: str, arguments: dict[str, object]) -> None:
    client = rig.client()
    session = client.open()
    older = client.send(op, session=session, **arguments)
    replaced = client.send("sync", session=session, tokens=[1, 2])
    newer = client.send("sync", session=session, tokens=[1, 2, 3, 4, 5])
    assert client.final(older)["finish"] == "cancelled"
    middle = client.final(replaced)
    assert middle["finish"] == "cancelled"
    assert "newer sync" in middle["receipt"]["why"]
    last = client.final(newer)
    assert (last["finish"], last["length"]) == ("done", 5)
    assert client.ask("tokens", session=session)["tokens"] == [1, 2, 3, 4, 5]
    client.nothing_more()


def test_close_ends_what_runs_and_replies_after_it(rig: Rig) -> None:
    client = rig.client()
    session = client.open()
    decode = client.send("decode", session=session, max_tokens=100_000)
    waiting = client.send("sync", session=session, tokens=[1])
    close = client.send("close", session=session)
    order: list[int] = []
    while len(order) < 3:
        reply = client.receive()
        if reply["final"]:
            order.append(reply["id"])
    assert order == [waiting, decode, close]
    assert client.refusal("info", session=session)["code"] == "not_found"


def test_cancel_of_what_is_over_and_of_what_never_was(rig: Rig) -> None:
    client = rig.client()
    session = client.open()
    done = client.send("decode", session=session, max_tokens=1)
    client.final(done)
    assert client.ask("cancel", request=done)["cancelled"] is False
    assert client.refusal("cancel", request=10**12)["code"] == "not_found"
    assert client.ask("cancel", session=session)["cancelled"] is False


def test_an_open_id_is_not_taken_twice(rig: Rig) -> None:
    client = rig.client()
    watch = client.send("watch")
    client.socket.send(msgpack.packb({"v": 1, "id": watch, "op": "list"}))
    error = client.receive()["error"]
    assert (error["code"], error["field"]) == ("invalid", "id")
    assert client.ask("cancel", request=watch)["cancelled"] is True


def test_watch_tells_of_own_sessions_until_cancelled(rig: Rig) -> None:
    client, other = rig.client("app"), rig.client("other")
    watch = client.send("watch", stats_every_s=0.1)
    session = client.open()
    other.open()
    client.ask("close", session=session)
    while not any(reply.get("event") == "stats" for reply in client.kept):
        client.kept.append(client.receive())
    assert client.ask("cancel", request=watch)["cancelled"] is True
    events = client.replies(watch)
    assert events[-1]["events"] == len(events) - 1
    stats = next(event for event in events if event["event"] == "stats")
    assert stats["details"]["gauges"]["watchers"] == 1
    told = [(event["event"], event["session"]) for event in events[:-1] if "session" in event]
    assert told == [("session_opened", session), ("session_closed", session)]


def test_hello_tells_models_and_limits(rig: Rig) -> None:
    client = rig.client()
    rig.until(lambda broker: broker.supervisor.engine("toy").ready)
    hello = client.ask("hello", app="a", client="test 1")
    assert hello["models"] == [{"id": "toy", "loaded": True, "context": 100_000, "vocab": 1000, "kinds": []}]
    assert hello["protocol"] == [1]
    assert hello["limits"]["max_message_bytes"] == 16 * 1024 * 1024
    assert client.refusal("hello", app="")["field"] == "app"


def test_a_session_expires_when_nobody_used_it(rig: Rig) -> None:
    client = rig.client()
    session = client.open(ttl_s=0.5)
    kept = client.open(ttl_s=60)
    running = client.open(ttl_s=0.5)
    decode = client.send("decode", session=running, max_tokens=100_000)
    rig.until(lambda broker: broker.catalog.get(session) is None, 5)
    assert {entry["session"] for entry in client.ask("list")["sessions"]} == {kept, running}
    client.ask("cancel", request=decode)


def test_a_model_that_drafts_is_named_to_the_worker_by_what_it_is_loaded_from(
    start_broker: Callable[..., Rig],
) -> None:
    spec = "step_s=0.003"
    rig = start_broker(more={"small": spec})
    client = rig.client("editor")
    session = client.open(model="toy")
    named = {"kind": "model", "model": "small"}
    running = client.send("decode", session=session, max_tokens=100_000, speculate=named)
    client.begun(running)
    asked = rig.look(lambda broker: [ticket.request for ticket in broker.tickets])
    drafting = [request.speculate for request in asked if isinstance(request, Decode)]
    assert [speculate.model for speculate in drafting if speculate is not None] == [spec]
    client.ask("cancel", request=running)
    client.final(running)
    for wrong, code, field in (
        ({"kind": "model", "model": "nowhere"}, "not_found", "speculate.model"),
        ({"kind": "model"}, "invalid", "speculate.model"),
        ({"kind": "lookup", "model": "small"}, "invalid", "speculate.model"),
    ):
        error = client.refusal("decode", session=session, max_tokens=1, speculate=wrong)
        assert (error["code"], error["field"]) == (code, field)
