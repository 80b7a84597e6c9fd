"""Models that nobody uses are unloaded, and come back; leases end sessions that nobody uses."""

from __future__ import annotations

from collections.abc import Callable

from tests.daemon.rig import Rig

from stateroom.daemon.lifecycle import EngineState

StartBroker = Callable[..., Rig]
AFTER_S = 1.5


def state(rig: Rig, model: str) -> EngineState:
    return rig.look(lambda broker: broker.supervisor.engine(model).state)


def test_an_idle_model_is_unloaded_and_comes_back_when_it_is_touched(start_broker: StartBroker) -> None:
    rig = start_broker("", more={"second": "step_s=0.02"}, unload_after_s=AFTER_S)
    client = rig.client("app")
    watch = client.send("watch")
    session = client.open([4, 5, 6])
    busy = client.open([1], model="second")
    stream = client.send("decode", session=busy, max_tokens=100_000)
    rig.until(lambda broker: broker.supervisor.engine("toy").state is EngineState.STOPPED)
    assert state(rig, "second") is EngineState.READY  # a stream that runs is use
    assert client.ask("info", session=session)["tier"] == "tokens"
    client.ask("cancel", request=watch)
    stopped = [each for each in client.replies(watch)[:-1] if each["event"] == "engine_stopped"]
    assert [each["model"] for each in stopped] == ["toy"]
    assert "nobody used it" in stopped[0]["details"]["reason"]
    assert client.ask("prefill", session=session, tokens=[7])["length"] == 4
    assert client.ask("tokens", session=session)["tokens"] == [4, 5, 6, 7]
    rig.until(lambda broker: "kv_budget_bytes" in broker.supervisor.engine("second").gauges)
    health = {model["id"]: model for model in client.ask("stats")["models"]}
    assert (health["toy"]["deaths"], health["toy"]["failure"]) == (0, None)
    client.ask("cancel", request=stream)
    client.final(stream)
    rig.until(lambda broker: broker.supervisor.engine("second").state is EngineState.STOPPED)
    health = {model["id"]: model for model in client.ask("stats")["models"]}
    assert health["second"]["gauges"] == {}  # no process holds anything any more


def test_a_daemon_that_is_told_never_to_unload_does_not(start_broker: StartBroker) -> None:
    rig = start_broker()
    client = rig.client()
    client.open()
    rig.look(lambda broker: setattr(broker.supervisor.engine("toy"), "used_s", -1e9))
    rig.look(lambda broker: broker.unloading.tick())
    assert state(rig, "toy") is EngineState.READY


def test_a_lease_is_set_renewed_and_lifted(rig: Rig) -> None:
    client = rig.client("app")
    session = client.open(name="x")
    assert "expires_in_s" not in client.ask("info", session=session)
    assert 59 < client.ask("lease", session="x", ttl_s=60)["expires_in_s"] <= 60
    info = client.ask("info", session=session)
    assert (info["ttl_s"], 59 < info["expires_in_s"] <= 60) == (60, True)
    assert "expires_in_s" not in client.ask("lease", session="x")
    assert "ttl_s" not in client.ask("list")["sessions"][0]
    assert rig.client("other").refusal("lease", session=session, ttl_s=1)["code"] == "not_found"
    assert client.refusal("lease", session=session, ttl_s=0)["code"] == "invalid"


def test_a_lease_ends_a_session_that_nobody_uses(rig: Rig) -> None:
    client = rig.client("app")
    watch = client.send("watch")
    running, idle = client.open(), client.open()
    stream = client.send("decode", session=running, max_tokens=100_000)
    client.begun(stream)
    for session in (running, idle):  # answered while the session works, too
        assert client.ask("lease", session=session, ttl_s=0.5)["expires_in_s"] <= 0.5
    rig.until(lambda broker: broker.catalog.get(idle) is None)
    assert client.ask("info", session=running)["state"] == "running"  # in use, however long
    client.ask("cancel", request=stream)
    client.final(stream)
    rig.until(lambda broker: broker.catalog.get(running) is None)
    client.ask("cancel", request=watch)
    closed = [each["session"] for each in client.replies(watch)[:-1] if each["event"] == "session_closed"]
    assert closed == [idle, running]
    assert client.refusal("lease", session=idle, ttl_s=5)["code"] == "not_found"


def test_who_uses_the_device_how_much_is_told_to_each_of_itself(rig: Rig) -> None:
    rig.client().open()
    told = {"device_ms.editor": 5.0, "device_ms.agent": 7.0, "rows": 1}
    rig.look(lambda broker: setattr(broker.supervisor.engine("toy"), "gauges", told))
    (model,) = rig.client("editor").ask("stats")["models"]
    assert model["gauges"] == {"device_ms.editor": 5.0, "rows": 1}
    rig.look(lambda broker: setattr(broker.supervisor.engine("toy"), "gauges", told))
    watching = rig.client("agent")
    watch = watching.send("watch", stats_every_s=0.1)
    event = watching.receive()
    assert event["details"]["models"][0]["gauges"].keys() & told.keys() <= {"device_ms.agent", "rows"}
    watching.ask("cancel", request=watch)
