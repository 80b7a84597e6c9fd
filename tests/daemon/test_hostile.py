"""Hostile frames at the raw socket: each readable request is answered once, and the daemon lives."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import msgpack
import psutil
import pytest
import zmq
from tests.daemon.rig import Raw, Rig

from stateroom.client.protocol import OPERATIONS

FRAMES = int(os.environ.get("STATEROOM_HOSTILE_FRAMES", "3000"))
SEED = 20
MEMORY_BYTES_MAX = 64 * 2**20  # that all of it may cost, for good
BURST = 200  # frames on their way at once: fewer than the socket keeps for one client


def junk(draw: random.Random) -> Any:
    """A value that msgpack can pack and that nobody asked for."""
    return draw.choice(
        [
            lambda: None,
            lambda: draw.choice([True, False]),
            lambda: draw.choice([-1, 0, 2**31, 2**63, 2**64 - 1, draw.randrange(-(2**63), 2**63)]),
            lambda: draw.choice([0.0, float("nan"), float("inf"), -1e308, draw.random()]),
            lambda: draw.choice(
                ["", "é" * draw.randrange(50), "x" * draw.randrange(5000), "../../etc", "\0"]
            ),
            lambda: draw.randbytes(draw.randrange(40)),
            lambda: [junk(draw) for _ in range(draw.randrange(4))],
            lambda: {draw.choice(["op", "id", "x", ""]): junk(draw) for _ in range(draw.randrange(3))},
            lambda: msgpack.ExtType(draw.randrange(128), draw.randbytes(3)),
            lambda: [0] * draw.choice([10, 100_000]),
        ]
    )()  # type: ignore[no-untyped-call]


def nested(levels: int) -> bytes:
    return b"\x91" * levels + b"\xc0"


def hostile(draw: random.Random, request_id: int) -> bytes:
    """One frame. What isn't garbage altogether carries the id."""
    ops = [*OPERATIONS, "fly", "", "__init__"]
    kind = draw.randrange(8)
    if kind == 0:
        return draw.randbytes(draw.randrange(200))
    if kind == 1:  # huge declared lengths
        return draw.choice(
            [
                b"\xdd\xff\xff\xff\xff",
                b"\xdb\x7f\xff\xff\xff",
                b"\xdf\xff\xff\xff\xff",
                b"\xc9\xff\xff\xff\xff\x01",
            ]
        )
    if kind == 2:
        return nested(draw.choice([31, 33, 1000, 50_000]))
    good: dict[Any, Any] = {"v": 1, "id": request_id, "op": draw.choice(ops)}
    if kind == 3:
        whole: bytes = msgpack.packb({**good, "session": "x"})
        return whole[: draw.randrange(len(whole))] if draw.random() < 0.5 else whole + draw.randbytes(2)
    if kind == 4:
        good[draw.choice([1, b"k", True, None, 2.5])] = junk(draw)
    elif kind == 5:
        good[draw.choice(["v", "op"])] = junk(draw)
    elif kind == 6:
        good[draw.choice(["v", "id", "op"])] = junk(draw)
    for name in draw.sample(
        ["session", "tokens", "text", "max_tokens", "sampling", "model", "x", "request"], 3
    ):
        good[name] = junk(draw)
    if good["op"] == "watch":
        good["x"] = 1  # a good one would go on
    packed: bytes = msgpack.packb(good)
    return packed


def readable_id(frame: bytes) -> int | None:
    """The id that the protocol obliges the daemon to answer with: of one map that is a message in form."""
    try:
        value = msgpack.unpackb(frame, strict_map_key=True)
    except Exception:
        return None
    found = value.get("id") if isinstance(value, dict) else None
    return found if type(found) is int and 0 <= found < 2**64 else None


def drain(client: Raw, wanted: int) -> list[dict[str, Any]]:
    return [client.receive() for _ in range(wanted)]


def test_thousands_of_hostile_frames(rig: Rig) -> None:
    """B70, B71, B73: each frame gets exactly one final reply, readable ones with their id; memory stays."""
    draw = random.Random(SEED)
    client, witness = rig.client(), rig.client()
    session = witness.open()
    process = psutil.Process()
    before = 0
    request_id = 1000
    for burst in range(FRAMES // BURST):
        sent = []
        for _ in range(BURST):
            request_id += 1
            sent.append(hostile(draw, request_id))
            client.socket.send(sent[-1])
        replies = drain(client, len(sent))
        client.nothing_more(0.0)
        assert all(reply["final"] and reply["seq"] == 0 for reply in replies)
        expected = {number for number in map(readable_id, sent) if number is not None}
        assert expected <= {reply["id"] for reply in replies}
        if burst == 1:
            before = process.memory_info().rss
    assert process.memory_info().rss - before < MEMORY_BYTES_MAX
    assert witness.ask("info", session=session)["length"] == 3
    assert rig.look(lambda broker: len(broker.tickets)) == 0


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([b"junk", b"BODY"], 7),
        ([b"", b"", b"BODY"], 7),
        ([b"", b"BODY", b""], None),
        ([b"BODY", b"BODY"], 7),
        ([b""], None),
        ([b"", b""], None),
        ([b"a"] * 20, None),
    ],
)
def test_wrong_frame_counts(rig: Rig, frames: list[bytes], expected: int | None) -> None:
    client = rig.client()
    body = msgpack.packb({"v": 1, "id": 7, "op": "list"})
    client.socket.send_multipart([body if frame == b"BODY" else frame for frame in frames])
    parts = client.socket.recv_multipart()
    assert (len(parts) == 2) is (frames[0] == b"" and len(frames) > 1)
    reply = msgpack.unpackb(parts[-1])
    assert (reply["id"], reply["error"]["code"], reply["final"]) == (expected, "malformed", True)
    client.nothing_more()
    assert client.ask("list")["kind"] == "result"


def test_a_frame_above_the_limit_costs_its_sender_the_connection_and_nobody_else(rig: Rig) -> None:
    rude, other = rig.client(), rig.client()
    rude.socket.send(bytes(16 * 1024 * 1024 + 1))
    assert other.ask("list")["kind"] == "result"
    rig.until(lambda broker: len(broker.peers) == 1)


def test_garbage_below_zeromq(rig: Rig) -> None:
    """Bytes that are no ZeroMQ, on the socket itself."""
    import socket

    for payload in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f", os.urandom(500)):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(rig.endpoint.removeprefix("ipc://"))
            raw.sendall(payload)
            time.sleep(0.05)
    assert rig.client().ask("hello")["server"] == "stateroom"


def test_the_log_of_refused_frames_is_bounded(rig: Rig) -> None:
    """B81: a broken client can't fill the disk."""
    client = rig.client()
    for _ in range(5):
        for _ in range(BURST):
            client.socket.send(b"\xc1")
        drain(client, BURST)
    refused = [
        entry for entry in rig.entries() if entry["event"] == "request" and entry["code"] == "malformed"
    ]
    assert len(refused) <= 100
    assert client.ask("stats")["counters"]["requests.none.malformed"] == 5 * BURST


def test_requests_of_one_connection_are_counted(rig: Rig) -> None:
    client = rig.client()
    watches = [client.send("watch", sessions=False) for _ in range(256)]
    error = client.refusal("watch")
    assert error["code"] == "capacity"
    assert error["details"]["retry_after_s"] > 0
    assert client.ask("cancel", request=watches[0])["cancelled"] is True  # what frees a place always goes
    client.final(watches[0])
    client.send("watch")
    assert client.ask("list")["kind"] == "result"
    assert rig.look(lambda broker: len(broker.tickets)) == 256


def test_requests_of_all_connections_are_counted(rig: Rig) -> None:
    clients = [rig.client(app) for app in ("one", "one", "other", "other", "third")]  # an app gets half
    for client in clients[:4]:
        for _ in range(256):
            client.send("watch", sessions=False)
    rig.until(lambda broker: len(broker.tickets) == 1024)
    assert clients[4].refusal("watch")["code"] == "capacity"
    assert clients[4].ask("stats")["gauges"]["watchers"] == 1024
    clients[0].close()
    rig.until(lambda broker: len(broker.tickets) == 768)
    assert clients[4].socket.getsockopt(zmq.TYPE) == zmq.DEALER
