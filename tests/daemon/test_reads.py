"""`tokens` beside whatever has its session: a read takes nothing, waits for nobody, and ends once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from tests.daemon.rig import Raw, Rig

StartBroker = Callable[..., Rig]


def working(rig: Rig) -> int:
    """The pid of the model's worker, once there is one."""
    rig.until(lambda broker: broker.supervisor.engine("toy").ready)
    pid = rig.look(lambda broker: broker.supervisor.engine("toy").pid)
    assert pid is not None
    return pid


def without_engine(rig: Rig) -> tuple[Raw, str]:
    """A client and its session, which holds tokens only; the next worker takes a while to load."""
    client = rig.client()
    session = client.open([1, 2, 3])
    os.kill(working(rig), signal.SIGKILL)
    rig.until(lambda broker: not broker.supervisor.engine("toy").ready)
    return client, session


def test_a_decode_goes_on_while_its_session_is_read(rig: Rig) -> None:
    client = rig.client()
    session = client.open([1, 2, 3])
    decode = client.send("decode", session=session, max_tokens=100_000)
    client.begun(decode)
    first, second = (client.ask("tokens", session=session)["tokens"] for _ in range(2))
    assert first[:3] == [1, 2, 3]
    assert 3 < len(first) <= len(second)
    assert client.ask("info", session=session)["running"] == "decode"
    assert client.refusal("trim", session=session, to=0)["code"] == "busy"
    client.ask("cancel", session=session)
    assert client.final(decode)["finish"] == "cancelled"


def test_a_read_does_not_keep_others_from_the_session(rig: Rig) -> None:
    """Its worker stands still, so that the read is not answered when the others come."""
    client = rig.client()
    session = client.open([1, 2, 3])
    pid = working(rig)
    os.kill(pid, signal.SIGSTOP)
    try:
        reads = [client.send("tokens", session=session) for _ in range(3)]
        decode = client.send("decode", session=session, max_tokens=2)
        rig.until(lambda broker: len(broker.tickets) == 4)
        assert client.ask("info", session=session)["running"] == "decode"
        assert client.ask("cancel", request=reads[0])["cancelled"] is False  # it's over before that arrives
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [client.final(read)["tokens"] for read in reads] == [[1, 2, 3]] * 3
    assert client.final(decode)["length"] == 5


def test_a_read_waits_for_the_engine_and_the_session_is_adopted_once(start_broker: StartBroker) -> None:
    rig = start_broker("load_s=0.5")
    client, session = without_engine(rig)
    read = client.send("tokens", session=session)
    decode = client.send("decode", session=session, max_tokens=2)
    again = client.send("tokens", session=session)
    assert client.final(read)["tokens"] == [1, 2, 3]
    assert client.final(decode)["length"] == 5
    assert client.final(again)["tokens"][:3] == [1, 2, 3]
    rig.until(lambda broker: broker.supervisor.engine("toy").gauges.get("adopted") == 1)
    assert client.ask("info", session=session)["state"] == "idle"


def test_a_session_closed_while_its_read_waits_is_not_found(start_broker: StartBroker) -> None:
    rig = start_broker("load_s=0.5")
    client, session = without_engine(rig)
    read = client.send("tokens", session=session)
    assert client.ask("close", session=session)["kind"] == "result"
    assert client.final(read)["error"]["code"] == "not_found"
    assert client.ask("list")["sessions"] == []
    client.nothing_more()


def test_a_session_that_is_being_closed_is_not_found(rig: Rig) -> None:
    client = rig.client()
    session = client.open()
    pid = working(rig)
    os.kill(pid, signal.SIGSTOP)
    try:
        before = client.send("tokens", session=session)
        close = client.send("close", session=session)
        assert client.refusal("tokens", session=session)["code"] == "not_found"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert client.final(before)["tokens"] == [1, 2, 3]
    assert client.final(close)["kind"] == "result"


def test_a_read_whose_worker_dies_is_answered_by_the_next(rig: Rig) -> None:
    """Of a session that a `close` is waiting for: that one has then happened, and the read finds nothing."""
    client = rig.client()
    kept, closing = client.open(), client.open()
    pid = working(rig)
    os.kill(pid, signal.SIGSTOP)
    decode = client.send("decode", session=closing, max_tokens=5)
    close = client.send("close", session=closing)
    reads = [client.send("tokens", session=session) for session in (kept, closing)]
    rig.until(lambda broker: len(broker.tickets) == 4)
    os.kill(pid, signal.SIGKILL)
    assert client.final(reads[0])["tokens"] == [1, 2, 3]
    assert client.final(reads[1])["error"]["code"] == "not_found"
    assert client.final(decode)["finish"] == "cancelled"
    assert client.final(close)["kind"] == "result"


def test_a_client_that_leaves_its_read_behind_leaves_nothing(start_broker: StartBroker) -> None:
    rig = start_broker("load_s=0.5")
    client, session = without_engine(rig)
    client.send("tokens", session=session)
    rig.until(lambda broker: len(broker.tickets) == 1)
    client.close()
    rig.until(lambda broker: len(broker.tickets) == 0)
    pid = working(rig)
    client = rig.client()
    os.kill(pid, signal.SIGSTOP)
    try:
        client.send("tokens", session=session)
        rig.until(lambda broker: len(broker.tickets) > 0)
        client.close()
        rig.until(lambda broker: broker.view.stats("").gauges["clients"] == 0)
    finally:
        os.kill(pid, signal.SIGCONT)
    rig.until(lambda broker: len(broker.tickets) == 0)
    assert rig.client().ask("tokens", session=session)["tokens"] == [1, 2, 3]
