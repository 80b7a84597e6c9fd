"""Ten thousand hostile frames at a real daemon's socket; it and its worker live on as they were."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from typing import Any

import msgpack
import psutil
import pytest
import zmq
from tests.conftest import RunningDaemon
from tests.daemon.rig import Raw
from tests.system.conftest import ConnectTo, RawClient, Tell
from tests.system.footprint import Footprint, broker_and_worker, growth, mib
from tests.system.hostile import STREAMING, Hostile, Hostilities

from stateroom.client.errors import StateroomError
from stateroom.client.limits import MESSAGE_BYTES_MAX
from stateroom.client.protocol import ERROR_CODES

pytestmark = pytest.mark.system

FRAMES = 10_000
SEED = 2
DEALERS = 6
SESSIONS = 24
BURST = 400  # messages on their way at once, over all connections; fewer than the socket keeps for each
REQ_EVERY = 40  # one message in so many goes through a REQ
WARM_BURSTS = 8  # after these, memory has to stay
BROKER_BYTES_MAX = 8 * 2**20  # by which the peak of the last third may lie above that of the third before
WORKER_BYTES_MAX = 48 * 2**20  # some frames are right after all, and prefill or save thousands of tokens
WITNESS_LOOPS_MIN = 20
GREEDY = 6  # tokens that the witness draws at a time


class Witness(threading.Thread):
    """A normal client beside: it wants the same answer again and again."""

    def __init__(self, room: Any) -> None:
        super().__init__(daemon=True)
        self.room, self.loops, self.slowest_s = room, 0, 0.0
        self.error: BaseException | None = None
        self.stopping = threading.Event()

    def run(self) -> None:
        try:
            with self.room.open(text="the quick brown fox") as session:
                base = session.length
                first = session.decode(GREEDY, ignore_eos=True).wait().tokens
                while not self.stopping.is_set():
                    began = time.monotonic()
                    session.trim(to=base)
                    assert session.decode(GREEDY, ignore_eos=True).wait().tokens == first
                    self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                    self.loops += 1
        except BaseException as error:
            self.error = error


def in_bursts(hostile: list[Hostile]) -> list[list[Hostile]]:
    return [list(hostile[i : i + BURST]) for i in range(0, len(hostile), BURST)]


def exchange(client: Raw, sent: list[Hostile], answers: Counter[str]) -> None:
    """Sends all, takes what comes, and holds the daemon to one final reply for each message."""
    for message in sent:
        client.socket.send_multipart(message.frames)
    streams = [message.id for message in sent if message.op == "watch" and message.id is not None]
    for request_id in streams:  # a watch that was right after all goes on until it is cancelled
        client.socket.send(
            msgpack.packb({"v": 1, "id": request_id + 2**40, "op": "cancel", "request": request_id})
        )
    finals: Counter[int | None] = Counter()
    seqs: dict[int | None, int] = {}
    while finals.total() < len(sent) + len(streams):
        assert client.socket.poll(20_000), f"only {finals.total()} final replies to {len(sent)} messages"
        reply = msgpack.unpackb(client.socket.recv_multipart()[-1])  # one with REQ's frame is answered so
        if reply["id"] is not None:
            assert reply["seq"] == seqs.get(reply["id"], 0), reply
        seqs[reply["id"]] = 0 if reply["final"] else reply["seq"] + 1
        check_reply(reply, answers)
        finals[reply["id"]] += reply["final"]
    expect(sent, streams, finals)


def check_reply(reply: dict[str, Any], answers: Counter[str]) -> None:
    assert reply["v"] == 1
    if reply["kind"] == "error":
        error = reply["error"]
        assert reply["final"]
        assert error["code"] in ERROR_CODES
        assert error["code"] not in ("internal", "engine_lost", "slow_consumer"), reply
        assert error["message"].endswith("."), reply
        assert len(error["message"]) < 1_000, reply
    else:
        assert reply["kind"] in ("result", "progress", "token", "event")
    if reply["final"]:
        answers[reply["error"]["code"] if reply["kind"] == "error" else "result"] += 1


def expect(sent: list[Hostile], streams: list[int], finals: Counter[int | None]) -> None:
    """Each strictly readable id once; the rest by `id: null`, or by the id that a lenient reader finds."""
    left = finals - Counter([message.id for message in sent if message.id is not None])
    assert left.total() == finals.total() - sum(message.id is not None for message in sent), (
        "an id unanswered"
    )
    left -= Counter(request_id + 2**40 for request_id in streams)
    lenient = Counter(message.also for message in sent if message.id is None)
    strangers = left - lenient
    del strangers[None]
    assert not strangers, f"replies nobody asked for: {strangers}"


def ask_by_req(client: Raw, message: Hostile, answers: Counter[str]) -> None:
    client.socket.send_multipart(message.frames)
    reply = client.receive()
    check_reply(reply, answers)
    assert reply["final"]
    assert reply["id"] == message.id or (message.id is None and reply["id"] == message.also)


def for_req(message: Hostile) -> bool:
    # A REQ puts the empty frame itself, and reads one reply.
    return len(message.frames) == 1 and message.op not in STREAMING


def refresh(client: Raw, sessions: list[str]) -> list[str]:
    """What earlier frames changed is put right again; what they opened is closed."""
    assert client.ask("hello", app="hostile")["app"] == "hostile"
    listed = {session["session"] for session in client.ask("list")["sessions"]}
    kept = [session for session in sessions if session in listed]
    for stray in listed - set(kept):
        client.ask("close", session=stray)
    while len(kept) < SESSIONS:
        kept.append(client.open([1, 2, 3]))
    for session in kept:
        assert client.ask("sync", session=session, tokens=[1, 2, 3])["length"] == 3
    return kept


def test_ten_thousand_hostile_frames(
    tiny_daemon: RunningDaemon, raw_client: RawClient, connect_to: ConnectTo, tell: Tell
) -> None:
    """B25, B70, B71, B73: each message one final reply, with its id where it can be read; memory stays."""
    hostilities = Hostilities(SEED)
    dealers = [raw_client(tiny_daemon, app="hostile") for _ in range(DEALERS)]
    req = raw_client(tiny_daemon, app="hostile", kind=zmq.REQ)
    keeper = raw_client(tiny_daemon, app="hostile")
    sessions = refresh(keeper, [])
    every = list(hostilities.every_field(sessions))
    noise = itertools.islice(hostilities.noise(sessions), max(0, FRAMES - len(every)))
    # Mixed, so that the memory is compared over the same mixture.
    messages = [*every, *noise]
    hostilities._draw.shuffle(messages)
    answers: Counter[str] = Counter()
    witness = Witness(connect_to(tiny_daemon, "witness"))
    witness.start()
    pids = (tiny_daemon.pid, *tiny_daemon.workers())
    seen: list[tuple[Footprint, Footprint]] = []
    done, began = 0, time.monotonic()
    for burst in in_bursts(messages):
        sessions = refresh(keeper, sessions)
        rest = []
        for i, message in enumerate(burst):
            if i % REQ_EVERY == 0 and for_req(message):
                ask_by_req(req, message, answers)
            else:
                rest.append(message)
        for i, dealer in enumerate(dealers):
            exchange(dealer, rest[i::DEALERS], answers)
        for client in (*dealers, req):
            client.ask("hello", app="hostile")
        done += len(burst)
        seen.append(broker_and_worker(tiny_daemon))
    took_s = time.monotonic() - began
    witness.stopping.set()
    witness.join(10)
    for dealer in dealers:
        dealer.nothing_more(0.05)
    broker, worker = (growth([both[i] for both in seen[WARM_BURSTS:]]) for i in (0, 1))
    tell(f"{done} frames in {took_s:.1f} s: {dict(answers.most_common())}")
    tell(f"grown over the last third: broker {mib(broker)}, worker {mib(worker)}")
    tell(f"a normal client beside: {witness.loops} loops, slowest {witness.slowest_s * 1000:.0f} ms")
    assert done >= FRAMES
    assert pids == (tiny_daemon.pid, *tiny_daemon.workers()), "a process was replaced"
    assert broker < BROKER_BYTES_MAX
    assert worker < WORKER_BYTES_MAX
    assert seen[-1][0].files <= seen[WARM_BURSTS][0].files
    assert witness.error is None, witness.error
    assert witness.loops >= WITNESS_LOOPS_MIN
    gauges = keeper.ask("stats")["gauges"]
    assert (gauges["running"], gauges["queued"], gauges["watchers"]) == (0, 0, 0)


WRONG_TOKENS = [300, -1, 10**6, 2**32 - 1, 2**63, -(2**63), True, 1.0, float("nan"), None, "7", b"7", [7]]


@pytest.mark.parametrize("wrong", WRONG_TOKENS, ids=repr)
def test_token_ids_out_of_range_change_nothing(
    tiny_daemon: RunningDaemon, raw_client: RawClient, wrong: Any
) -> None:
    """B25: wherever ids are taken, one that the model does not have is `invalid`, and nothing has changed."""
    client = raw_client(tiny_daemon, app="range")
    session = client.open([1, 2, 3])
    for op, field, arguments in [
        ("prefill", "tokens", {"tokens": [5, wrong]}),
        ("prefill", "tokens", {"tokens": [wrong]}),
        ("sync", "tokens", {"tokens": [1, 2, wrong, 3]}),
        ("score", "tokens", {"tokens": [wrong]}),
        ("decode", "stop_tokens", {"max_tokens": 1, "stop_tokens": [wrong]}),
        ("decode", "sampling.logit_bias", {"max_tokens": 1, "sampling": {"logit_bias": [[wrong, 1.0]]}}),
    ]:
        error = client.refusal(op, session=session, **arguments)
        assert error["code"] == "invalid", (op, error)
        assert error["field"].startswith(field), (op, error)
    error = client.refusal("open", tokens=[1, wrong])
    assert (error["code"], error["field"][:6]) == ("invalid", "tokens")
    assert client.ask("tokens", session=session)["tokens"] == [1, 2, 3]
    assert len(client.ask("list")["sessions"]) == len({session, *_names(client)})
    client.ask("close", session=session)


def _names(client: Raw) -> list[str]:
    return [session["session"] for session in client.ask("list")["sessions"]]


def test_refused_opens_leave_no_session(tiny_daemon: RunningDaemon, raw_client: RawClient) -> None:
    client = raw_client(tiny_daemon, app="refused")
    for arguments in (
        {"tokens": [10**6]},
        {"tokens": [1] * 20_000},  # past the context
        {"kv": {"scheme": "turbo"}},
        {"model": "none"},
    ):
        client.refusal("open", **arguments)
    assert client.ask("list")["sessions"] == []


def test_messages_above_the_limit_cost_the_sender_its_connection(
    tiny_daemon: RunningDaemon, raw_client: RawClient, connect_to: ConnectTo, tell: Tell
) -> None:
    """B71: ZeroMQ refuses the frame before it is read; the largest legal one leaves nothing behind."""
    other = connect_to(tiny_daemon)
    for _ in range(5):
        rude = raw_client(tiny_daemon)
        rude.socket.send(bytes(MESSAGE_BYTES_MAX + 1))
        assert not rude.socket.poll(50)
        other.list()
        rude.close()
    message = {"v": 1, "id": 7, "op": "open", "text": ""}
    message["text"] = "x" * (MESSAGE_BYTES_MAX - len(msgpack.packb(message)) - 4)
    frame = msgpack.packb(message)
    assert len(frame) == MESSAGE_BYTES_MAX
    taken = [Footprint.of(tiny_daemon.pid).rss_bytes]
    for _ in range(8):
        largest = raw_client(tiny_daemon)
        largest.socket.send(frame)
        reply = largest.receive()
        assert (reply["id"], reply["error"]["code"], reply["error"]["field"]) == (7, "invalid", "text")
        largest.close()
        taken.append(Footprint.of(tiny_daemon.pid).rss_bytes)
    # The allocator may keep what one needed at its peak (the frame, its bytes, its text), however many come.
    grown = ", ".join(mib(rss - taken[0]) for rss in taken[1:])
    tell(f"broker's memory after the largest message, again and again: {grown}")
    assert max(taken) - taken[0] < 4 * MESSAGE_BYTES_MAX


def test_a_flood_of_connections(tiny_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    """Sockets that connect, say nothing or nonsense, and hang: others are served, descriptors come back."""
    import socket

    room = connect_to(tiny_daemon)
    before = Footprint.of(tiny_daemon.pid)
    path = tiny_daemon.endpoint.removeprefix("ipc://")
    open_sockets = []
    for i in range(300):
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(path)
        if i % 3:
            raw.sendall([b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03"][i % 3])
        open_sockets.append(raw)
    began = time.monotonic()
    with room.open(text="hello") as session:
        session.decode(3).wait()
    served_s = time.monotonic() - began
    for raw in open_sockets:
        raw.close()
    deadline = time.monotonic() + 5
    while psutil.Process(tiny_daemon.pid).num_fds() > before.files + 3:
        assert time.monotonic() < deadline, "descriptors of closed connections stay open"
        time.sleep(0.05)
    assert served_s < 2.0


def test_options_that_are_misspelt_are_named(tiny_daemon: RunningDaemon, raw_client: RawClient) -> None:
    client = raw_client(tiny_daemon, app="spelling")
    session = client.open([1, 2, 3])
    for op, arguments, field in [
        ("decode", {"max_token": 5}, "max_token"),
        ("decode", {"max_tokens": 5, "temperature": 1.0}, "temperature"),
        ("decode", {"max_tokens": 5, "sampling": {"temprature": 1.0}}, "sampling.temprature"),
        ("prefill", {"token": [1]}, "token"),
        ("sync", {"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0.name"),
    ]:
        error = client.refusal(op, session=session, **arguments)
        assert (error["code"], error["field"]) == ("invalid", field)
    assert client.ask("info", session=session)["length"] == 3


def test_the_blocking_client_says_the_same_words(tiny_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    """What the daemon refuses arrives as the class of its code, with the field."""
    room = connect_to(tiny_daemon)
    with room.open(tokens=[1, 2, 3]) as session, pytest.raises(StateroomError) as caught:
        session.prefill(tokens=[300])
    assert (caught.value.code, caught.value.field) == ("invalid", "tokens")
