"""Rooms and sessions for threads, against a real ROUTER."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import pytest
from tests.client.peer import Call, Peer, end_as_cancelled, endless

from stateroom.client import Message, Room, Sampling, Timeouts, connect, inbox
from stateroom.client.errors import (
    Busy,
    Exists,
    Invalid,
    NotEnded,
    NotFound,
    Numeric,
    RequestTimeout,
    SlowConsumer,
    StreamBroken,
)
from stateroom.client.protocol import LengthResult, Progress, Stats, StatsResult

# ---------------------------------------------------------------- the surface


def test_the_example_of_the_design(
    client_peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STATEROOM_ENDPOINT", client_peer.endpoint)
    buffer, edited_buffer = "def main", "def many"
    with connect(app="my-editor") as room:
        base = room.open(text=buffer)
        drafts = base.fork(4)
        for token in drafts[0].decode(max_tokens=64, stop=["\n"]):
            print(token.text, end="")  # noqa: T201
        receipt = base.sync(text=edited_buffer).receipt
    assert capsys.readouterr().out.startswith("opqrstuvwxyzabc")
    assert (receipt.reused, receipt.trimmed, receipt.prefilled) == (6, 2, 2)
    assert list(client_peer.apps.values()) == ["my-editor"]
    assert client_peer.asked("decode")[0].args == {"session": drafts[0].id, "max_tokens": 64, "stop": ["\n"]}


def test_what_is_published_is_forked_by_who_is_told(client_room: Room, client_peer: Peer) -> None:
    session = client_room.open(text="hello")
    published = session.publish("greeting")
    assert (published.name, published.length) == ("greeting", 5)
    assert [(trunk.name, trunk.trunk) for trunk in client_room.trunks()] == [("greeting", published.trunk)]
    one, two = client_room.fork(published.trunk, names=["a", "b"])
    assert (one.name, two.name, one.length, one.caps) == ("a", "b", 5, None)
    assert client_peer.asked("fork")[0].args == {"trunk": published.trunk, "n": 2, "names": ["a", "b"]}
    assert len(client_room.fork(published.trunk, 3)) == 3
    assert client_room.unpublish("greeting").freed_bytes == 5
    assert client_peer.asked("unpublish")[0].args == {"as": "greeting"}
    with pytest.raises(NotFound):
        client_room.fork(published.trunk)
    with pytest.raises(NotFound):
        client_room.unpublish("greeting")


def test_open_gives_a_handle_that_knows_its_session(client_room: Room) -> None:
    session = client_room.open(text="hello", name="one")
    assert (session.id, session.name, session.length) == ("session-0", "one", 5)
    assert session.caps is not None
    assert session.caps.trim == "any"
    assert session.receipt is not None
    assert session.receipt.prefilled == 5
    empty = client_room.open()
    assert (empty.length, empty.receipt, empty.name) == (0, None, None)
    with pytest.raises(Exists):
        client_room.open(name="one")


def test_a_handle_on_a_session_that_exists_by_name_or_id(client_room: Room) -> None:
    opened = client_room.open(text="abc", name="here")
    for ref in ("here", opened.id):
        found = client_room.session(ref)
        assert (found.id, found.length) == (opened.id, 3)
    with pytest.raises(NotFound, match="nowhere"):
        client_room.session("nowhere")


def test_each_operation_of_a_session(client_room: Room, client_peer: Peer) -> None:
    session = client_room.open(tokens=[97, 98])
    seen: list[object] = []
    grown = session.prefill(text="cdef", on_progress=seen.append)
    assert (grown.length, session.length, session.receipt) == (6, 6, grown.receipt)
    assert seen == [Progress(done=2, total=4)]
    assert session.trim(to=4).length == session.length == 4
    assert session.trim(count=1, replay=True).length == 3
    assert client_peer.asked("trim")[1].args == {"session": session.id, "count": 1, "replay": True}
    assert session.tokens().text == "abc"
    assert session.tokens(1, 2).tokens == [98]
    assert client_peer.asked("tokens")[1].args == {"session": session.id, "from": 1, "to": 2}
    assert session.score(text="xy").total == -2.0
    assert session.score(tokens=range(3)).tokens == [0, 1, 2]
    assert session.info().session_class == "background"
    first, second = session.fork(names=["left", "right"])
    assert (first.name, second.name, first.length, first.caps) == ("left", "right", 3, session.caps)
    assert session.cancel() is False
    assert session.close().freed_bytes == 7
    assert session.closed


def test_each_operation_of_a_room(client_room: Room, client_peer: Peer) -> None:
    client_room.open(text="abc")
    assert [(info.session, info.length) for info in client_room.list()] == [("session-0", 3)]
    assert client_room.hello().app == "tests"
    assert client_room.server.models[0].context == 512
    assert client_room.stats().gauges == {"rows": 0.0}
    assert client_room.cancel("session-0") is False
    assert client_room.load("m").loaded
    assert not client_room.unload("m").loaded
    assert client_room.call(Stats(), StatsResult).counters["requests"] > 5
    with pytest.raises(TypeError, match="StatsResult, not a LengthResult"):
        client_room.call(Stats(), LengthResult)


def test_watch_gives_events_until_it_is_closed(client_room: Room, client_peer: Peer) -> None:
    with client_room.watch(stats_every_s=2) as events:
        assert next(events).event == "opened"
        assert client_peer.asked("watch")[0].args == {"stats_every_s": 2}
        client_peer.on["cancelled"] = lambda call: call.result(events=1)
    assert events.result.events == 1


def test_decode_takes_sampling_whole_or_by_its_options(client_room: Room, client_peer: Peer) -> None:
    session = client_room.open(text="a")
    session.decode(1, temperature=0.7, seed=2**64 - 1, logit_bias={5: -1.5}).wait()
    session.decode(1, sampling=Sampling(temperature=0.7, top_k=3), top_k=9).wait()
    session.decode(1, stop="\n", stop_tokens=(1, 2), ignore_eos=True, logprobs=2).wait()
    sent = [call.args for call in client_peer.asked("decode")]
    assert sent[0]["sampling"] == {"temperature": 0.7, "seed": 2**64 - 1, "logit_bias": [[5, -1.5]]}
    assert sent[1]["sampling"] == {"temperature": 0.7, "top_k": 9}
    assert sent[2] == {
        "session": session.id,
        "max_tokens": 1,
        "stop": ["\n"],
        "stop_tokens": [1, 2],
        "ignore_eos": True,
        "logprobs": 2,
    }


def test_messages_are_maps_or_dataclasses(client_room: Room, client_peer: Peer) -> None:
    session = client_room.open()
    session.prefill(messages=[{"role": "system", "content": "a"}, Message(role="user", content="b")])
    assert client_peer.asked("prefill")[0].args["messages"] == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
    ]


def test_wrong_arguments_are_refused_before_anything_is_sent(client_room: Room, client_peer: Peer) -> None:
    """B73."""
    session = client_room.open(text="a")
    before = len(client_peer.calls)
    for field, wrong in (
        ("messages.0", lambda: session.prefill(messages=[{"role": "user"}])),
        ("tokens", lambda: session.prefill(tokens="abc")),  # type: ignore[arg-type]
        ("text", lambda: session.prefill(text="\ud800")),
        ("sampling.seed", lambda: session.decode(1, seed=2**64).wait()),
        ("sampling.temperature", lambda: session.decode(1, temperature=float("nan")).wait()),
        ("sampling.logit_bias", lambda: session.decode(1, logit_bias=[3])),  # type: ignore[list-item]
        ("text", lambda: session.sync(tokens=[1], text="a")),
        ("to", lambda: session.trim()),
    ):
        with pytest.raises(Invalid) as caught:
            wrong()
        assert caught.value.field == field
    with pytest.raises(TypeError, match="temprature"):
        session.decode(1, temprature=1)  # type: ignore[call-arg]
    assert len(client_peer.calls) == before
    assert session.tokens().text == "a"


def test_a_session_closes_at_the_end_of_its_with(client_room: Room, client_peer: Peer) -> None:
    with client_room.open(text="a") as session:
        pass
    assert session.closed
    assert client_peer.sessions == {}
    with client_room.open(text="a") as session:
        session.close()
    assert len(client_peer.asked("close")) == 2
    with pytest.raises(ZeroDivisionError), client_room.open(text="a"):
        raise ZeroDivisionError
    assert client_peer.sessions == {}


def test_handles_say_what_they_are(client_room: Room) -> None:
    session = client_room.open(text="abc", name="draft")
    assert repr(session) == "<Session 'draft' session-0, 3 tokens>"
    stream = session.decode(2)
    assert "TokenStream" in repr(stream)
    stream.wait()
    assert repr(stream) == "<TokenStream, 2 tokens, ended by 'length': 'de'>"
    assert repr(client_room) == f"<Room of app 'tests' at {client_room.endpoint}>"


# ---------------------------------------------------------------- streams


def test_a_stream_tells_its_text_so_far_and_its_result_at_the_end(client_room: Room) -> None:
    session = client_room.open(text="a")
    stream = session.decode(3)
    assert next(stream).text == "b"
    assert (stream.text, stream.tokens, stream.ended, session.length) == ("b", [98], False, 2)
    with pytest.raises(NotEnded):
        _ = stream.result
    assert [token.text for token in stream] == ["c", "d"]
    assert (stream.text, stream.result.finish, session.length) == ("bcd", "length", 4)
    with pytest.raises(StopIteration):
        next(stream)


def test_without_streaming_there_is_just_the_result(client_room: Room) -> None:
    stream = client_room.open(text="a").decode(3, stream=False)
    assert list(stream) == []
    assert stream.text == stream.result.text == "bcd"


def test_leaving_the_loop_cancels_though_the_stream_is_kept(client_room: Room, endless_peer: Peer) -> None:
    session = client_room.open(text="a")
    stream = session.decode(99)
    for _ in stream:
        break
    cancel = endless_peer.wait_for("cancel")
    assert cancel.args == {"request": endless_peer.asked("decode")[0].id}
    stream.close()
    assert (stream.result.finish, stream.text, session.length) == ("cancelled", "abcd", 9)
    assert list(stream) == []
    assert len(endless_peer.asked("cancel")) == 1


def test_an_exception_in_the_loop_cancels(client_room: Room, endless_peer: Peer) -> None:
    stream = client_room.open(text="a").decode(99)

    def read() -> None:
        for _ in stream:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()
    endless_peer.wait_for("cancel")


def test_the_end_of_a_with_and_dropping_a_stream_cancel(client_room: Room, endless_peer: Peer) -> None:
    session = client_room.open(text="a")
    with session.decode(99) as stream:
        next(stream)
    assert stream.result.finish == "cancelled"
    stream = session.decode(99)
    next(stream)
    del stream
    gc.collect()
    endless_peer.wait_for("cancel", nth=2)


def test_the_next_operation_waits_for_a_stream_that_was_left(client_room: Room, client_peer: Peer) -> None:
    """Or else it would find the session busy."""
    running: list[Call] = []

    def busy_while_running(call: Call) -> None:
        if not running[0].ended:
            call.error("busy")
        else:
            call.result(length=1, receipt={})

    def end_late(call: Call) -> None:
        threading.Timer(0.1, end_as_cancelled, [call]).start()

    client_peer.on |= {"decode": endless, "cancelled": end_late, "trim": busy_while_running}
    session = client_room.open(text="a")
    for _ in session.decode(99):
        running.extend(client_peer.asked("decode"))
        break
    assert session.trim(to=1).length == 1
    other = client_room.session(session.id)
    kept = session.decode(99)
    running[:] = [client_peer.wait_for("decode", nth=2)]
    with pytest.raises(Busy):
        other.trim(to=1)
    kept.close()


def test_an_error_ends_the_stream_and_keeps_what_came(client_room: Room, client_peer: Peer) -> None:
    def fails(call: Call) -> None:
        call.token(98)
        call.error("numeric", "NaN.", length=2)

    client_peer.on["decode"] = fails
    session = client_room.open(text="abc")
    stream = session.decode(9)
    assert next(stream).text == "b"
    with pytest.raises(Numeric, match="NaN"):
        next(stream)
    with pytest.raises(Numeric):
        _ = stream.result
    assert (stream.text, stream.ended, session.length) == ("b", True, 2)
    assert list(stream) == []
    assert "failed: NaN." in repr(stream)


def test_a_gap_breaks_the_stream_and_cancels(client_room: Room, client_peer: Peer) -> None:
    def gappy(call: Call) -> None:
        call.token(98)
        call.seq += 1
        call.token(99)

    client_peer.on["decode"] = gappy
    stream = client_room.open(text="a").decode(9)
    assert next(stream).text == "b"
    with pytest.raises(StreamBroken, match="Reply 2 of `decode` came where 1 was due"):
        next(stream)
    client_peer.wait_for("cancel")


def test_a_stream_that_nobody_reads_is_ended(
    client_room: Room, client_peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "INBOX_REPLIES_MAX", 50)
    stream = client_room.open(text="a").decode(200)
    client_peer.wait_for("cancel")
    with pytest.raises(SlowConsumer, match="Read it"):
        stream.wait()
    assert len(stream.text) == 50
    assert client_room.stats()


def test_frames_that_are_no_replies_are_passed_over(client_room: Room, client_peer: Peer) -> None:
    def noisy(call: Call) -> None:
        call.raw(b"\xc1")
        call.raw(b"")
        call.raw({"v": 1, "id": 10**9, "seq": 0, "kind": "result", "final": True})
        call.result(counters={}, gauges={"noise": 3.0})

    client_peer.on["stats"] = noisy
    assert client_room.stats().gauges == {"noise": 3.0}


# ---------------------------------------------------------------- timeouts


def test_after_a_timeout_the_late_reply_is_dropped_and_the_room_goes_on(client_peer: Peer) -> None:
    """B67."""
    client_peer.on["stats"] = lambda call: None
    with connect(client_peer.endpoint, timeouts=Timeouts(call_s=0.5)) as room:
        with pytest.raises(RequestTimeout, match=r"No reply to `stats` within 0.5 s"):
            room.stats()
        late = client_peer.wait_for("stats")
        assert client_peer.wait_for("cancel").args == {"request": late.id}
        late.result(counters={"late": 1}, gauges={})
        client_peer.on["stats"] = lambda call: call.result(counters={"new": 1}, gauges={})
        assert room.stats().counters == {"new": 1}


def test_a_stream_may_take_long_if_something_comes(client_peer: Peer) -> None:
    def slow(call: Call) -> None:
        def run() -> None:
            for token in b"bcd":
                time.sleep(0.25)
                call.token(token)

        threading.Thread(target=run).start()

    client_peer.on["decode"] = slow
    with connect(client_peer.endpoint) as room:
        stream = room.open(text="a").decode(9, timeout_s=0.6)
        with pytest.raises(RequestTimeout, match="No further reply"):
            stream.wait()
        assert stream.text == "bcd"
        client_peer.wait_for("cancel")


def test_an_interrupted_call_is_cancelled(client_room: Room, client_peer: Peer) -> None:
    session = client_room.open(text="a")
    client_peer.on["prefill"] = lambda call: call.reply("progress", done=1, total=2)

    def interrupt(update: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.prefill(text="b", on_progress=interrupt)
    assert client_peer.wait_for("cancel").args == {"request": client_peer.asked("prefill")[0].id}


def test_an_interrupt_reaches_a_thread_that_waits_and_ends_its_request(
    client_room: Room, endless_peer: Peer
) -> None:
    """Ctrl-C while nothing comes."""
    stream = client_room.open(text="a").decode(9)
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        stream.wait()
    endless_peer.wait_for("cancel")
    stream.close()
    assert stream.result.finish == "cancelled"
