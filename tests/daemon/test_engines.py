"""Workers that die, hang, refuse and come back; what their requests and sessions make of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.daemon.rig import Rig
from tests.daemon.scripted_worker import BABBLE, CHUNK, DIE, HANG

from stateroom.client.timeouts import Timeouts
from stateroom.daemon.broker import Broker
from stateroom.daemon.config import Patience
from stateroom.daemon.lifecycle import EngineState
from stateroom.daemon.link import Recall
from stateroom.daemon.recovery import DEATHS_MAX, SUSPECT_DEATHS

StartBroker = Callable[..., Rig]


def ready(rig: Rig, model: str = "toy") -> int:
    """Waits for a model's worker and gives its pid."""
    seen: list[int] = []

    def alive(broker: Broker) -> bool:
        engine = broker.supervisor.engine(model)
        if engine.ready and engine.pid is not None:  # one that was just killed has none any more
            seen.append(engine.pid)
        return bool(seen)

    rig.until(alive)
    return seen[0]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def tokens_told(replies: list[dict[str, Any]]) -> list[int]:
    return [token for reply in replies if reply["kind"] == "token" for token in reply["tokens"]]


def test_a_dead_worker_s_end_is_told_and_not_that_it_does_not_read(rig: Rig) -> None:
    """What is sent to one that has just died finds nobody: that is no reason of its own."""
    client = rig.client("app")
    watch = client.send("watch", sessions=False)
    ready(rig)

    def kill_and_send(broker: Broker) -> None:
        engine = broker.supervisor.engine("toy")
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        time.sleep(0.3)  # its connection ends meanwhile, and the loop, which this holds up, hears of nothing
        engine.send(Recall(1))

    rig.look(kill_and_send)
    rig.until(lambda broker: broker.supervisor.engine("toy").starts == 2)
    client.ask("cancel", request=watch)
    (lost,) = [each for each in client.replies(watch)[:-1] if each["event"] == "engine_lost"]
    assert lost["details"]["reason"] == "it was ended by SIGKILL"


def test_a_death_is_survived_by_its_requests(rig: Rig) -> None:
    """B52, B60: streams go on at the next token, told by two events; the others just take longer."""
    client = rig.client("app")
    watch = client.send("watch", sessions=False)
    pid = ready(rig)
    sessions = [client.open([number, 2, 3]) for number in range(3)]
    streams = [client.send("decode", session=session, max_tokens=300) for session in sessions]
    whole = client.send("decode", session=client.open([9]), max_tokens=300, stream=False)
    sync = client.send("sync", session=client.open([7]), tokens=[7] * (200 * CHUNK))
    fork = client.send("fork", session=client.open([8]), n=2)
    for stream in streams:
        client.begun(stream)
    os.kill(pid, signal.SIGKILL)
    for stream in streams:
        replies = client.replies(stream, 30.0)
        assert tokens_told(replies) == replies[-1]["tokens"] == list(range(3, 303))
        assert (replies[-1]["finish"], replies[-1]["length"]) == ("length", 303)
        assert replies[-1]["text"] == "x" * 300
        told = [reply for reply in replies if reply["kind"] == "event"]
        assert [event["event"] for event in told] == ["engine_lost", "engine_recovered"]
        at = replies.index(told[0])
        assert replies[at + 1] is told[1]
        assert told[0]["details"]["length"] == told[1]["details"]["length"] == 3 + at
        assert told[0]["details"]["reason"]
    assert client.final(whole)["tokens"] == list(range(1, 301))
    assert client.final(sync)["length"] == 200 * CHUNK
    assert len(client.final(fork)["sessions"]) == 2
    health = client.ask("stats")
    model = health["models"][0]
    assert (model["state"], model["deaths"], model["starts"]) == ("ready", 1, 2)
    assert health["counters"]["requests_resumed"] >= 5
    client.ask("cancel", request=watch)
    events = [event for event in client.replies(watch)[:-1] if event["event"].startswith("engine_")]
    assert [event["event"] for event in events][-2:] == ["engine_lost", "engine_recovered"]
    assert events[-2]["details"]["requests"] == events[-1]["details"]["requests"] >= 5


def test_requests_that_were_to_end_end_with_their_worker(rig: Rig) -> None:
    """A cancelled stream with the tokens and text that it told; a cancelled sync with nothing done."""
    client, gone_soon = rig.client("app"), rig.client("app")
    pid = ready(rig)
    session, synced, closed = client.open(), client.open(), client.open()
    left = gone_soon.open([5, 6], name="left")
    streams = [client.send("decode", session=each, max_tokens=100_000) for each in (session, closed)]
    for stream in streams:
        client.begun(stream)
    gone_soon.begun(gone_soon.send("decode", session="left", max_tokens=100_000))
    os.kill(pid, signal.SIGSTOP)
    sync = client.send("sync", session=synced, tokens=[1, 2, 3, 4])
    close = client.send("close", session=closed)
    for request_id in (streams[0], sync):
        assert client.ask("cancel", request=request_id)["cancelled"] is True
    gone_soon.close()
    rig.until(lambda broker: broker.metrics.counters()["clients_vanished"] == 1)
    os.kill(pid, signal.SIGKILL)
    replies = client.replies(streams[0])
    final = replies[-1]
    assert final["finish"] == "cancelled"
    assert final["tokens"] == tokens_told(replies) == list(range(3, 3 + len(final["tokens"])))
    assert (final["text"], final["length"]) == ("x" * len(final["tokens"]), 3 + len(final["tokens"]))
    assert client.ask("tokens", session=session)["tokens"] == [1, 2, 3, *final["tokens"]]
    assert (client.final(sync)["finish"], client.ask("info", session=synced)["length"]) == ("cancelled", 3)
    assert client.final(streams[1])["finish"] == "cancelled"
    assert client.final(close)["kind"] == "result"
    rig.until(lambda broker: broker.catalog.get(left).running is None)  # type: ignore[union-attr]
    assert client.ask("info", session="left")["length"] > 2
    assert rig.look(lambda broker: broker.metrics.counters()["requests_resumed"]) == 0


def test_what_goes_on_can_be_cancelled_before_there_is_a_worker(start_broker: StartBroker) -> None:
    """It keeps what it told; one that isn't streamed told nothing, and its session is as it was."""
    patience = Patience(restart_first_s=30.0, restart_most_s=30.0, hold_s=0.3)
    rig = start_broker(patience=patience)
    client = rig.client()
    session, other, third = client.open(), client.open(), client.open()
    stream = client.send("decode", session=session, max_tokens=100_000)
    whole = client.send("decode", session=other, max_tokens=100_000, stream=False)
    replaced = client.send("decode", session=third, max_tokens=100_000)
    client.begun(stream)
    client.begun(replaced)
    rig.until(lambda broker: broker.catalog.get(other).length > 3)  # type: ignore[union-attr]
    os.kill(ready(rig), signal.SIGKILL)
    rig.until(lambda broker: broker.supervisor.engine("toy").deaths == 1)
    assert client.ask("info", session=session)["state"] == "queued"  # a new one would not wait so long
    assert client.refusal("open", tokens=[1])["code"] == "engine_lost"
    for request_id in (stream, whole):
        assert client.ask("cancel", request=request_id)["cancelled"] is True
    replies = client.replies(stream)
    assert replies[-1]["finish"] == "cancelled"
    assert replies[-1]["tokens"] == tokens_told(replies) != []
    final = client.final(whole)
    assert (final["finish"], final["tokens"], final["text"], final["length"]) == ("cancelled", [], "", 3)
    assert client.ask("info", session=other)["length"] == 3
    sync = client.send("sync", session=third, tokens=[1])
    assert client.final(replaced)["finish"] == "cancelled"
    assert client.final(sync)["error"]["code"] == "engine_lost"
    assert client.ask("info", session=third)["state"] == "idle"


def test_what_is_taken_back_is_gone_in_the_worker_too(start_broker: StartBroker) -> None:
    """A session that waits behind a trial was adopted for a read, with tokens that a cancel takes back."""
    rig = start_broker("step_s=0.3")
    client = rig.client()
    session, first = client.open(), client.open()
    whole = client.send("decode", session=session, max_tokens=1000, stream=False)
    rig.until(lambda broker: broker.catalog.get(session).length > 3)  # type: ignore[union-attr]
    client.send("decode", session=first, max_tokens=1000)  # the later one goes on first
    for deaths in range(SUSPECT_DEATHS):
        rig.until(lambda broker: sum(t.generation is not None for t in broker.tickets) == 2)
        os.kill(ready(rig), signal.SIGKILL)
        rig.until(lambda broker, deaths=deaths: broker.supervisor.engine("toy").deaths > deaths)
    ready(rig)
    assert client.ask("info", session=session)["state"] == "queued"
    assert len(client.ask("tokens", session=session)["tokens"]) > 3
    assert client.ask("cancel", request=whole)["cancelled"] is True
    assert client.final(whole)["length"] == 3
    assert client.ask("tokens", session=session)["tokens"] == [1, 2, 3]
    assert client.ask("trim", session=session, count=1)["length"] == 2
    assert rig.look(lambda broker: broker.supervisor.engine("toy").deaths) == SUSPECT_DEATHS


def test_what_goes_on_ends_with_the_daemon_as_what_runs_does(start_broker: StartBroker) -> None:
    """As cancelled, with what it told, though no worker has it at that moment."""
    rig = start_broker(patience=Patience(restart_first_s=30.0, restart_most_s=30.0))
    client = rig.client()
    stream = client.send("decode", session=client.open(), max_tokens=100_000)
    client.begun(stream)
    opening = client.send("open", tokens=[1] * (400 * CHUNK))
    rig.until(lambda broker: len(broker.tickets) == 2)
    os.kill(ready(rig), signal.SIGKILL)
    rig.until(lambda broker: broker.supervisor.engine("toy").deaths == 1)
    rig.stop()
    replies = client.replies(stream)
    assert replies[-1]["finish"] == "cancelled"
    assert replies[-1]["tokens"] == tokens_told(replies) != []
    assert client.final(opening)["error"]["code"] == "engine_lost"


def test_exactly_one_final_reply_whenever_the_worker_dies(start_broker: StartBroker) -> None:
    """Requests of every kind are sent while the worker is killed again and again."""
    rig = start_broker("step_s=0.001,chunk_s=0.001")
    client = rig.client("app")
    sessions = [client.open() for _ in range(4)]
    sent: list[int] = []
    kills = 0
    until = time.monotonic() + 4
    while time.monotonic() < until:
        for number, session in enumerate(sessions):
            sent.append(client.send("decode", session=session, max_tokens=20))
            sent.append(client.send("sync", session=session, tokens=[1, 2, 3, number]))
            sent.append(client.send("prefill", session=session, tokens=[1] * 100, progress=True))
            sent.append(client.send("fork", session=session, n=1))
            sent.append(client.send("open", tokens=[1] * 100))
        if rig.look(lambda broker: broker.supervisor.engine("toy").ready):
            with contextlib.suppress(ProcessLookupError):  # dead already, and not yet noticed
                os.kill(ready(rig), signal.SIGKILL)
                kills += 1
        for request_id in sent:
            client.replies(request_id)  # checks: one final, last, no gap
        sent.clear()
    assert kills >= 3
    client.nothing_more()
    rig.until(lambda broker: len(broker.tickets) == 0)
    for session in client.ask("list")["sessions"]:
        assert session["state"] == "idle"


def test_a_session_whose_tokens_kill_the_worker_is_put_in_quarantine(rig: Rig) -> None:
    """B52: after three deaths, the last of them alone. Others lose nothing; another content lifts it."""
    client = rig.client()
    session, other = client.open([1]), client.open([2])
    beside = client.send("decode", session=other, max_tokens=600)
    client.begun(beside)
    error = client.refusal("prefill", session=session, tokens=[1] * CHUNK + [DIE])
    assert (error["code"], error["details"]["length"]) == ("engine_lost", 1)
    assert client.final(beside, 30.0)["tokens"] == list(range(1, 601))
    deaths = rig.look(lambda broker: broker.supervisor.engine("toy").deaths)
    assert DEATHS_MAX <= deaths <= DEATHS_MAX + 1
    info = client.ask("info", session=session)
    assert "3 times" in info["quarantined"] or "4 times" in info["quarantined"]
    assert client.ask("stats")["gauges"]["quarantined"] == 1
    for op, arguments in (("decode", {"max_tokens": 1}), ("prefill", {"tokens": [1]}), ("fork", {"n": 1})):
        refused = client.refusal(op, session=session, **arguments)
        assert (refused["code"], refused["message"]) == ("engine_lost", info["quarantined"])
    assert client.ask("tokens", session=session)["tokens"] == [1]
    assert rig.look(lambda broker: broker.supervisor.engine("toy").deaths) == deaths
    assert client.ask("sync", session=session, tokens=[3, 4])["length"] == 2
    assert "quarantined" not in client.ask("info", session=session)
    assert client.ask("decode", session=session, max_tokens=1)["length"] == 3


def test_progress_clears_nobody(rig: Rig) -> None:
    """What is told on the way to the same death again isn't getting on."""
    client = rig.client()
    session = client.open([1])
    asked = client.send("prefill", session=session, tokens=[1] * CHUNK + [DIE], progress=True)
    assert client.final(asked, 30.0)["error"]["code"] == "engine_lost"
    assert rig.look(lambda broker: broker.supervisor.engine("toy").deaths) == DEATHS_MAX
    assert "quarantined" in client.ask("info", session=session)


def test_a_sync_that_is_cancelled_lifts_no_quarantine(rig: Rig) -> None:
    client = rig.client()
    session = client.open([1])
    assert client.refusal("prefill", session=session, tokens=[DIE])["code"] == "engine_lost"
    for op, arguments in (("sync", {"tokens": [1]}), ("trim", {"to": 0})):
        pid = ready(rig)
        os.kill(pid, signal.SIGSTOP)
        asked = client.send(op, session=session, **arguments)
        rig.until(lambda broker: len(broker.tickets) > 0)
        assert client.ask("cancel", request=asked)["cancelled"] is True
        os.kill(pid, signal.SIGKILL)
        assert client.final(asked)["finish"] == "cancelled"
        assert "quarantined" in client.ask("info", session=session)
    assert client.ask("sync", session=session, tokens=[2])["finish"] == "done"
    assert "quarantined" not in client.ask("info", session=session)


def test_an_open_whose_tokens_kill_the_worker_leaves_nothing(rig: Rig) -> None:
    client = rig.client()
    error = client.refusal("open", tokens=[DIE], name="x")
    assert (error["code"], error["details"]["length"]) == ("engine_lost", 0)
    assert rig.look(lambda broker: broker.supervisor.engine("toy").deaths) == DEATHS_MAX
    assert client.ask("list")["sessions"] == []
    assert client.open(name="x")  # the name is free again


def test_a_worker_that_hangs_is_reported_then_replaced(start_broker: StartBroker) -> None:
    """B60: silence is told within the stated time, then its stacks are logged, then it is ended. The request
    that hangs every worker is refused in the end, and the one beside it is served."""
    rig = start_broker(patience=Patience(silence_s=1.2, hang_s=2.6, stacks_s=0.3, restart_first_s=0.05))
    client = rig.client()
    watch = client.send("watch")
    session, other = client.open(), client.open()
    stuck = client.send("prefill", session=session, tokens=[HANG])
    beside = client.send("decode", session=other, max_tokens=1)
    rig.until(lambda broker: broker.supervisor.engine("toy").silent)
    assert client.ask("stats")["models"][0]["state"] == "silent"
    error = client.final(stuck, 60.0)["error"]
    assert error["code"] == "engine_lost"
    assert "no sign of life" in error["message"]
    assert client.final(beside)["finish"] == "length"
    said = [entry["line"] for entry in rig.entries() if entry["event"] == "engine says"]
    assert any("most recent call first" in line for line in said)
    assert any(" in fill" in line for line in said)  # where it hangs
    assert client.ask("decode", session=other, max_tokens=1)["finish"] == "length"
    client.ask("cancel", request=watch)
    events = [event["event"] for event in client.replies(watch)[:-1] if event["event"].startswith("engine_")]
    first = events.index("engine_silent")
    assert events[first : first + 3] == ["engine_silent", "engine_lost", "engine_recovered"]


def test_a_worker_that_makes_no_sense_is_replaced(rig: Rig) -> None:
    client = rig.client()
    session = client.open()
    error = client.refusal("prefill", session=session, tokens=[BABBLE])
    assert (error["code"], error["details"]["length"]) == ("engine_lost", 3)
    assert client.ask("trim", session=session, to=3)["length"] == 3
    assert client.ask("decode", session=session, max_tokens=1)["finish"] == "length"
    assert any(entry["event"] == "engine link broken" for entry in rig.entries())


def test_a_model_that_cannot_be_loaded_is_not_tried_again_until_asked(start_broker: StartBroker) -> None:
    rig = start_broker("fail=1")
    client = rig.client()
    error = client.refusal("open", tokens=[1])
    assert (error["code"], error["field"]) == ("unsupported", "model")
    assert "the script says so" in error["message"]
    assert client.ask("list")["sessions"] == []
    rig.until(lambda broker: broker.supervisor.engine("toy").pid is None)
    assert client.refusal("open", tokens=[1])["code"] == "unsupported"
    assert client.ask("stats")["models"][0]["state"] == "failed"
    assert rig.look(lambda broker: broker.supervisor.engine("toy").starts) == 1
    assert client.refusal("load", model="toy")["code"] == "unsupported"
    assert rig.look(lambda broker: broker.supervisor.engine("toy").starts) == 2


def test_a_worker_that_keeps_failing_is_tried_ever_more_rarely(start_broker: StartBroker) -> None:
    patience = Patience(restart_first_s=0.05, restart_most_s=0.8, hold_s=0.3)
    rig = start_broker("fail=soon", patience=patience)
    client = rig.client()
    waiting = client.send("open", tokens=[1])
    error = client.final(waiting)["error"]
    assert error["code"] == "engine_lost"
    assert error["details"]["retry_after_s"] > patience.hold_s
    rig.until(lambda broker: broker.supervisor.engine("toy").deaths == 6)
    pauses = [entry["restart_in_s"] for entry in rig.entries() if entry["event"] == "engine died"]
    assert pauses[:6] == [0.05, 0.1, 0.2, 0.4, 0.8, 0.8]


def test_a_client_waits_longer_for_a_model_than_the_daemon_does() -> None:
    """So that it hears how loading ended."""
    wait = Timeouts().wait_for("load")
    assert wait.timeout_s is not None
    assert wait.timeout_s > Patience().load_s + Patience().stop_s


def test_requests_wait_for_a_model_that_loads(start_broker: StartBroker) -> None:
    rig = start_broker("load_s=1")
    client = rig.client()
    opening = client.send("open", tokens=[1, 2], name="x")
    loading = client.send("load", model="toy")
    assert client.ask("hello")["models"][0]["loaded"] is False
    assert client.ask("stats")["gauges"]["queued"] == 2
    assert client.refusal("decode", session="x", max_tokens=1)["code"] == "busy"
    assert client.ask("info", session="x")["state"] == "queued"
    assert client.final(opening)["length"] == 2
    assert client.final(loading)["model"]["loaded"] is True


def test_what_waits_for_a_model_can_be_cancelled(start_broker: StartBroker) -> None:
    rig = start_broker("", more={"late": "load_s=1.5,chunk_s=0.25"})
    client = rig.client()
    opened = client.send("open", tokens=[1] * 500, model="late")
    assert client.ask("cancel", request=opened)["cancelled"] is True
    result = client.final(opened)
    assert result["finish"] == "cancelled"
    assert result["length"] <= 4 * CHUNK  # what was begun when the cancel came, half of all on a busy machine
    session = result["session"]
    os.kill(ready(rig, "late"), signal.SIGKILL)
    rig.until(lambda broker: not broker.supervisor.engine("late").ready)
    several: dict[str, dict[str, Any]] = {
        "decode": {"max_tokens": 5},
        "prefill": {"tokens": [1]},
        "sync": {"tokens": [1]},
    }
    for op, arguments in several.items():
        waiting = client.send(op, session=session, **arguments)
        assert client.ask("cancel", request=waiting)["cancelled"] is True
        assert client.final(waiting)["finish"] == "cancelled"
    trim = client.send("trim", session=session, to=0)
    close = client.send("close", session=session)
    assert client.final(trim)["length"] == 0
    assert client.final(close)["kind"] == "result"


def test_a_client_that_leaves_while_the_model_loads_leaves_nothing(start_broker: StartBroker) -> None:
    rig = start_broker("load_s=1")
    client = rig.client("app")
    client.send("open", name="x")
    rig.until(lambda broker: len(broker.catalog) == 1)
    client.close()
    rig.until(lambda broker: len(broker.catalog) == 0)
    assert rig.look(lambda broker: len(broker.tickets)) == 0


def test_unload_keeps_tokens_and_a_touch_brings_them_back(rig: Rig) -> None:
    client = rig.client()
    session = client.open([4, 5, 6])
    decode = client.send("decode", session=session, max_tokens=100_000)
    client.begun(decode)
    assert client.refusal("unload", model="toy")["code"] == "busy"
    client.ask("cancel", request=decode)
    client.final(decode)
    pid = ready(rig)
    watch = client.send("watch")
    assert client.ask("unload", model="toy")["model"]["loaded"] is False
    assert gone(pid)
    assert client.ask("unload", model="toy")["model"]["loaded"] is False
    info = client.ask("info", session=session)
    assert (info["tier"], info["private_bytes"]) == ("tokens", 0)
    assert client.ask("prefill", session=session, tokens=[7])["length"] == info["length"] + 1
    client.ask("cancel", request=watch)
    events = [(event["event"], event["details"].get("tier")) for event in client.replies(watch)[:-1]]
    assert events[0] == ("engine_stopped", None)
    assert events[-1] == ("session_moved", "resident")
    assert client.ask("tokens", session=session, to=3)["tokens"] == [4, 5, 6]
    assert client.ask("unload", model="toy")["model"]["loaded"] is False
    assert client.ask("close", session=session)["freed_bytes"] == 0
    assert rig.look(lambda broker: broker.supervisor.engine("toy").state) is EngineState.STOPPED


def test_a_request_that_comes_while_a_model_is_unloaded_starts_it_again(rig: Rig) -> None:
    client = rig.client()
    session = client.open()
    unload = client.send("unload", model="toy")
    decode = client.send("decode", session=session, max_tokens=2)
    assert client.final(unload)["model"]["loaded"] is False
    assert client.final(decode)["length"] == 5


def test_models_side_by_side(start_broker: StartBroker) -> None:
    rig = start_broker("", more={"second": "step_s=0.001"})
    client = rig.client()
    first, second = client.open([1]), client.open([2], model="second")
    assert client.ask("info", session=first)["model"] == "toy"  # the first is the default
    assert client.ask("info", session=second)["model"] == "second"
    os.kill(ready(rig), signal.SIGKILL)
    rig.until(lambda broker: broker.supervisor.engine("toy").deaths == 1)
    assert client.ask("decode", session=second, max_tokens=3)["length"] == 4
    assert client.ask("decode", session=first, max_tokens=3)["length"] == 4


def test_a_client_cannot_name_files(rig: Rig) -> None:
    """A path or a hub id from the wire loads nothing, unless the daemon was told to let it."""
    client = rig.client()
    for model in ("/etc", "../x", "org/name", str(rig.folder), "models"):
        for op in ("open", "load", "unload"):
            error = client.refusal(op, model=model)
            assert (error["code"], error["field"]) == ("not_found", "model")


def test_a_daemon_told_to_loads_what_clients_name(start_broker: StartBroker) -> None:
    rig = start_broker("", allow_any_model=True)
    client = rig.client()
    session = client.open([1], model=str(rig.folder))
    assert client.ask("info", session=session)["model"] == str(rig.folder)
    assert client.open([1], model="org/name")
    for nothing in ("/no/such/file", "/a\0b", "~nobody-of-that-name/x", "x" * 1024, "/" + "x" * 1023):
        assert client.refusal("open", model=nothing)["code"] == "not_found"


def test_without_models_open_says_what_to_do(start_broker: StartBroker) -> None:
    rig = start_broker()
    rig.look(lambda broker: broker.desk._shelf._given.clear())
    error = rig.client().refusal("open", tokens=[1])
    assert error["code"] == "not_found"
    assert "model add demo" in error["message"]


def test_an_installed_model_is_loaded_when_it_is_asked_for(rig: Rig) -> None:
    (rig.folder / "models" / "step_s=0.001").mkdir(parents=True)  # no name of a model: passed over
    (rig.folder / "models" / "small").mkdir()
    client = rig.client()
    assert [model["id"] for model in client.ask("hello")["models"]] == ["toy", "small"]
    session = client.open([1], model="small")
    assert client.ask("info", session=session)["model"] == "small"


def test_shutting_down_answers_everything(start_broker: StartBroker) -> None:
    rig = start_broker("", more={"late": "load_s=30"})
    client = rig.client()
    session, other = client.open(), client.open()
    running = client.send("decode", session=session, max_tokens=100_000)
    client.begun(running)
    held = client.send("open", model="late")
    watch = client.send("watch")
    superseded = client.send("decode", session=other, max_tokens=100_000)
    client.begun(superseded)
    pid, late = ready(rig), rig.look(lambda broker: broker.supervisor.engine("late").pid)
    os.kill(pid, signal.SIGSTOP)  # else the decode may end, and let the sync in, before the daemon stops
    waiting = client.send("sync", session=other, tokens=[1])
    traced = client.send("trace", request=rig.look(lambda broker: next(iter(broker.tickets)).rid))
    rig.until(lambda broker: len(broker.tickets) == 6)
    rig.begin_to_stop()
    assert not rig.look(lambda broker: broker.desk.admitting)
    os.kill(pid, signal.SIGCONT)
    assert rig.stop() < 4.0
    assert client.final(running)["finish"] == "cancelled"
    assert client.final(superseded)["finish"] == "cancelled"
    for request_id in (held, watch, waiting, traced):
        assert client.final(request_id)["error"]["code"] == "shutting_down"
    assert late is not None
    assert gone(pid)
    assert gone(late)
    assert list(rig.folder.glob("engine-*")) == []


def test_a_worker_that_will_not_stop_does_not_hold_the_daemon(rig: Rig) -> None:
    client = rig.client()
    session = client.open()
    pid = ready(rig)
    stuck = client.send("prefill", session=session, tokens=[HANG])
    rig.until(lambda broker: broker.catalog.get(session).running is not None)  # type: ignore[union-attr]
    time.sleep(0.1)
    os.kill(pid, signal.SIGSTOP)
    assert rig.stop() < 5.0
    assert client.final(stuck)["finish"] == "cancelled"
    assert gone(pid)


def test_the_log_has_a_line_a_request_and_no_content(start_broker: StartBroker) -> None:
    rig = start_broker()
    client = rig.client("app")
    session = client.open([77_777, 88_888])
    client.ask("prefill", session=session, tokens=[99_999])
    client.ask("decode", session=session, max_tokens=3)
    client.refusal("decode", session="nobody", max_tokens=3)
    lines = [entry for entry in rig.entries() if entry["event"] == "request"]
    assert [line["op"] for line in lines] == ["hello", "open", "prefill", "decode", "decode"]
    assert [line["code"] for line in lines] == ["ok", "ok", "ok", "ok", "not_found"]
    prefill, decode = lines[2], lines[3]
    assert (prefill["owner"], prefill["session"], prefill["prefilled"]) == ("app", session[:8], 1)
    assert (decode["decoded"], decode["length"]) == (3, 6)
    assert decode["ms"] > 0
    text = rig.log.getvalue()
    assert session not in text
    assert not any(secret in text for secret in ("77777", "88888", "99999", "xxx"))


def test_content_is_logged_when_asked(start_broker: StartBroker) -> None:
    rig = start_broker(log_content=True)
    client = rig.client()
    client.open([77_777])
    assert "77777" in rig.log.getvalue()


def test_a_bug_names_its_log_entry(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    client = rig.client()

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(rig.broker.catalog, "listed", broken)
    error = client.refusal("list")
    assert error["code"] == "internal"
    entry = next(entry for entry in rig.entries() if entry["event"] == "internal error")
    assert entry["incident"] == error["details"]["incident"]
    assert "planted" in entry["exception"]
    rig.log.truncate(0)
    rig.log.seek(0)
    assert client.ask("hello")["kind"] == "result"


def test_what_a_worker_says_reaches_the_log(start_broker: StartBroker) -> None:
    """Plain lines become entries, entries stay what they are, and a line without end is broken up."""
    rig = start_broker("say=1")
    ready(rig)
    os.kill(ready(rig), signal.SIGKILL)
    rig.until(lambda broker: broker.supervisor.engine("toy").deaths == 1)
    said = [entry["line"] for entry in rig.entries() if entry["event"] == "engine says"]
    assert said[0] == "plain words"
    assert sum(map(len, said[1:])) == 20_000
    assert {entry["engine"] for entry in rig.entries() if entry["event"] == "an entry"} == {"toy"}
    died = next(entry for entry in rig.entries() if entry["event"] == "engine died")
    assert died["stderr"][0] == "plain words"
