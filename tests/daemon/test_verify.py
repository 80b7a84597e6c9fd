"""`verify` through a broker: whose session it is, whom it holds up, what is counted and told."""

from __future__ import annotations

from tests.daemon.conftest import StartBroker

from stateroom.client.protocol import Verify
from stateroom.daemon.broker import Broker


def own_ends(broker: Broker) -> int:
    return sum(n for name, n in broker.metrics.counters().items() if name.startswith("own.verify."))


def test_an_own_session_is_verified_and_taken_meanwhile(start_broker: StartBroker) -> None:
    client = start_broker("verify=slow").client("mine")
    session = client.open([1, 2, 3])
    verify = client.send("verify", session=session)
    assert client.refusal("decode", session=session, max_tokens=1)["code"] == "busy"
    assert client.ask("cancel", request=verify)["cancelled"] is True
    ended = client.final(verify)
    assert (ended["finish"], ended["length"]) == ("cancelled", 3)
    assert client.ask("decode", session=session, max_tokens=1)["length"] == 4
    counters = client.ask("stats")["counters"]
    assert (counters.get("verified", 0), counters["requests.verify.ok"]) == (0, 1)


def test_another_owners_session_is_not_there(start_broker: StartBroker) -> None:
    rig = start_broker()
    session = rig.client("theirs").open([1, 2, 3])
    assert rig.client("mine").refusal("verify", session=session)["code"] == "not_found"


def test_one_that_is_picked_may_be_anybodys_and_goes_on(start_broker: StartBroker) -> None:
    """No `busy` for its owner, and nothing of it is told but numbers."""
    rig = start_broker("verify=slow")
    mine, theirs = rig.client("mine"), rig.client("theirs")
    assert mine.refusal("verify")["code"] == "not_found"
    session = theirs.open([1, 2, 3])
    used_s = rig.look(lambda broker: broker.catalog.find("theirs", session).used_s)
    verify = mine.send("verify")
    rig.until(lambda broker: any(ticket.op == "verify" for ticket in broker.tickets))
    assert rig.look(lambda broker: broker.catalog.find("theirs", session).used_s) == used_s
    assert theirs.ask("decode", session=session, max_tokens=2)["length"] == 5
    assert theirs.ask("close", session=session)["kind"] == "result"
    mine.ask("cancel", request=verify)
    ended = mine.final(verify)
    numbers = ["argmax_agree", "bound", "finish", "length", "max_abs_logit", "max_abs_logit_error"]
    assert sorted(set(ended) - {"v", "id", "seq", "kind", "final"}) == numbers


def test_what_fails_is_counted_logged_and_told_to_its_owner_alone(start_broker: StartBroker) -> None:
    rig = start_broker("verify=0.5")
    mine, theirs = rig.client("mine"), rig.client("theirs")
    session = theirs.open([1, 2, 3])
    watches = [client.send("watch") for client in (mine, theirs)]
    rig.until(lambda broker: len(broker.watchers) == 2)
    assert mine.ask("verify")["max_abs_logit_error"] == 0.5
    theirs.begun(watches[1])
    (told,) = theirs.kept
    assert (told["event"], told["session"], told["details"]["max_abs_logit_error"]) == (
        "verify_failed",
        session,
        0.5,
    )
    mine.nothing_more()
    counters = mine.ask("stats")["counters"]
    assert (counters["verified"], counters["verify_failed"]) == (1, 1)
    (entry,) = [entry for entry in rig.entries() if entry["event"] == "verify failed"]
    assert entry["session"] == session[:8]
    assert entry["bound"] < 0.5


def test_rounds_look_at_every_session_one_at_a_time(start_broker: StartBroker) -> None:
    rig = start_broker("verify=slow", verify_every_s=0.05)
    client = rig.client("mine")
    for n in range(3):
        client.open([n + 1])
    seen: set[str] = set()

    def end_one(broker: Broker) -> bool:
        broker.work.look_round()  # at once instead of at the next tick
        broker.work.look_round()
        own = [ticket for ticket in broker.tickets if ticket.peer is None and ticket.op == "verify"]
        assert len(own) <= 1
        for ticket in own:
            assert isinstance(ticket.request, Verify)
            assert ticket.session is not None
            seen.add(ticket.session.id)
            broker.work.cancel(ticket)
        return own_ends(broker) >= 3

    rig.until(end_one)
    assert len(seen) == 3
    assert client.ask("stats")["counters"]["own.verify.ok"] >= 3


def test_the_daemons_own_looks_keep_no_model_loaded(start_broker: StartBroker) -> None:
    rig = start_broker("verify=slow", unload_after_s=3600.0, verify_every_s=0.01)
    rig.client("mine").open([1, 2, 3])

    def looks(broker: Broker) -> bool:
        broker.work.look_round()
        return any(ticket.looks for ticket in broker.tickets)

    rig.until(looks)
    unloading, engine = rig.look(lambda broker: (broker.unloading, broker.supervisor.engine("toy")))
    used_s = rig.look(lambda broker: engine.used_s)
    rig.look(lambda broker: unloading.tick())
    assert rig.look(lambda broker: engine.used_s) == used_s
    unloading._after_s = 0.0
    rig.look(lambda broker: unloading.tick())
    assert rig.look(lambda broker: engine.ready)  # not while one is under way
    unloading._after_s = 3600.0


def test_a_worker_that_dies_under_a_picked_one_ends_it(start_broker: StartBroker) -> None:
    rig = start_broker("verify=slow")
    client = rig.client("mine")
    client.open([1, 2, 3])
    verify = client.send("verify")
    rig.until(lambda broker: any(ticket.op == "verify" for ticket in broker.tickets))
    rig.look(lambda broker: broker.supervisor.engine("toy").kill("the test says so"))
    if client.socket.poll(500):
        assert client.final(verify)["kind"] == "error"
    else:  # it was sent to the next one
        client.ask("cancel", request=verify)
        assert client.final(verify)["final"] is True
