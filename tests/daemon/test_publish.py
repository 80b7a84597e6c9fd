"""Published trunks over raw sockets: who may fork them, who hears of them, and what outlives what."""

from __future__ import annotations

from collections.abc import Callable

from tests.daemon.rig import Raw, Rig
from tests.daemon.scripted_worker import DIE

StartBroker = Callable[..., Rig]


def published(client: Raw, session: str, name: str = "shared") -> str:
    reply = client.ask("publish", session=session, as_=name)
    assert reply["kind"] == "result", reply
    assert (reply["as"], reply["length"]) == (name, client.ask("info", session=session)["length"])
    trunk: str = reply["trunk"]
    return trunk


def test_another_app_forks_what_it_was_told_of(start_broker: StartBroker) -> None:
    rig = start_broker()
    one, two = rig.client("one"), rig.client("two")
    session = one.open([1, 2, 3])
    trunk = published(one, session)
    assert one.ask("info", session=session)["published"] == ["shared"]
    children = two.ask("fork", trunk=trunk, n=2, names=["a", "b"])["sessions"]
    for name, child in zip("ab", children, strict=True):
        info = two.ask("info", session=name)
        assert (info["session"], info["owner"], info["length"]) == (child, "two", 3)
        assert (info["parents"], info["trunk"], info["class"]) == ([], trunk, "interactive")
        assert "ttl_s" not in info
        assert two.ask("tokens", session=child)["tokens"] == [1, 2, 3]
        assert one.refusal("info", session=child)["code"] == "not_found"
    assert two.ask("decode", session="a", max_tokens=2)["length"] == 5
    assert two.ask("tokens", session="b")["tokens"] == [1, 2, 3]
    assert one.ask("fork", trunk="shared")["length"] == 3, "its publisher may use the name"
    (shown,) = one.ask("list")["trunks"]
    assert (shown["as"], shown["trunk"], shown["length"]) == ("shared", trunk, 3)
    assert two.ask("list")["trunks"] == []
    assert {entry["session"] for entry in two.ask("list")["sessions"]} == set(children)
    gauges = one.ask("stats")["gauges"]
    assert (gauges["published"], gauges["sessions"]) == (1, 4)


def test_who_was_not_told_learns_nothing(start_broker: StartBroker) -> None:
    """The same words whether there is such a trunk, of whomever, or not; and a trunk is no session."""
    rig = start_broker()
    one, two = rig.client("one"), rig.client("two")
    session = one.open([1, 2, 3])
    trunk = published(one, session)
    guesses = ["shared", "nothing", session, trunk[:-1], trunk + "x", trunk.lower() + "_"]
    errors = [two.refusal("fork", trunk=guess) for guess in guesses]
    assert {error["code"] for error in errors} == {"not_found"}
    assert len({str(error) for error in errors}) == 1
    assert two.refusal("unpublish", as_="shared") == two.refusal("unpublish", as_="nothing")
    for client in (one, two):
        for op, more in (
            ("info", {}),
            ("decode", {"max_tokens": 1}),
            ("close", {}),
            ("tokens", {}),
            ("fork", {}),
        ):
            assert client.refusal(op, session=trunk, **more)["code"] == "not_found"
        assert client.refusal("cancel", session=trunk)["code"] == "not_found"


def test_what_is_wrong_is_named(start_broker: StartBroker) -> None:
    rig = start_broker()
    one = rig.client("one")
    session = one.open([1, 2, 3])
    trunk = published(one, session)
    for arguments, field in (
        ({}, "session"),
        ({"session": session, "trunk": trunk}, "trunk"),
        ({"trunk": ""}, "trunk"),
        ({"trunk": trunk, "n": 2, "names": ["a"]}, "names"),
    ):
        error = one.refusal("fork", **arguments)
        assert (error["code"], error["field"]) == ("invalid", field)
    assert one.refusal("publish", session=session)["field"] == "as"
    assert one.refusal("publish", session=session, as_="no spaces")["field"] == "as"
    assert one.refusal("publish", session=session, as_="shared")["code"] == "exists"
    decode = one.send("decode", session=session, max_tokens=100_000)
    one.begun(decode)
    assert one.refusal("publish", session=session, as_="other")["code"] == "busy"
    assert one.ask("fork", trunk=trunk)["length"] == 3, "the trunk isn't busy, whatever its session does"
    one.ask("cancel", session=session)
    one.final(decode)


def test_a_trunk_outlives_its_session_and_its_forks_outlive_it(start_broker: StartBroker) -> None:
    rig = start_broker()
    one, two = rig.client("one"), rig.client("two")
    session = one.open([1, 2, 3], ttl_s=100.0)
    trunk = published(one, session)
    one.ask("trim", session=session, to=1)
    one.ask("close", session=session)
    (child,) = two.ask("fork", trunk=trunk)["sessions"]
    events = two.send("watch")
    mine = one.send("watch")
    assert one.ask("unpublish", as_="shared")["kind"] == "result"
    assert two.refusal("fork", trunk=trunk)["code"] == "not_found"
    assert one.refusal("unpublish", as_="shared")["code"] == "not_found"
    assert two.ask("tokens", session=child)["tokens"] == [1, 2, 3]
    assert two.ask("decode", session=child, max_tokens=1)["length"] == 4
    again = one.open([7])
    published(one, again)
    assert rig.look(lambda broker: broker.catalog.trunks) == 1
    for client, watch in ((one, mine), (two, events)):
        client.ask("cancel", request=watch)
        heard = [reply["event"] for reply in client.replies(watch) if reply["kind"] == "event"]
        trunks = [event for event in heard if event.startswith("trunk_")]
        assert trunks == (["trunk_unpublished", "trunk_published"] if client is one else [])


def test_trunks_survive_their_worker_as_tokens(start_broker: StartBroker) -> None:
    rig = start_broker()
    one, two = rig.client("one"), rig.client("two")
    session = one.open([1, 2, 3])
    trunk = published(one, session)
    assert one.refusal("prefill", session=session, tokens=[DIE])["code"] == "engine_lost"
    assert one.ask("list")["trunks"][0]["tier"] == "tokens"
    (child,) = two.ask("fork", trunk=trunk)["sessions"]
    assert two.ask("tokens", session=child)["tokens"] == [1, 2, 3]
    assert two.ask("decode", session=child, max_tokens=1)["length"] == 4
    assert one.ask("unpublish", as_="shared")["kind"] == "result"


def test_a_client_that_vanishes_leaves_what_it_published(start_broker: StartBroker) -> None:
    rig = start_broker()
    one, two = rig.client("one"), rig.client("two")
    trunk = published(one, one.open([1, 2, 3]))
    one.close()
    rig.until(lambda broker: broker.metrics.counters()["clients_vanished"] == 1)
    assert two.ask("fork", trunk=trunk)["length"] == 3
    assert rig.client("one").ask("unpublish", as_="shared")["kind"] == "result"
