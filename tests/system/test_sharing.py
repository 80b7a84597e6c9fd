"""Sharing over real processes: two apps, each a program of its own, one daemon, one worker that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from tests.conftest import RunningDaemon
from tests.system.conftest import ConnectTo, RawClient

from stateroom.client.errors import NotFound

pytestmark = pytest.mark.system

PROGRAM_S = 60.0
PULSE_WITHIN_S = 20.0
PROMPT = [n % 200 for n in range(700)]

READER = """
import sys
from stateroom.client import connect

with connect(endpoint=sys.argv[1], app=sys.argv[3]) as room:
    (mine,) = room.fork(sys.argv[2])
    length = mine.length
    result = mine.prefill(tokens=[1, 2, 3])
    drawn = mine.decode(8, ignore_eos=True).wait().tokens
    print(length, result.receipt.reused, result.receipt.source, *drawn)
"""


def read(daemon: RunningDaemon, trunk: str, app: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", READER, daemon.endpoint, trunk, app],
        env=daemon.env,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_one_app_publishes_and_another_program_goes_on(
    tiny_daemon: RunningDaemon, connect_to: ConnectTo
) -> None:
    """With what a session of its own would draw; also when the worker died in between."""
    publisher = connect_to(tiny_daemon, "publisher")
    session = publisher.open(tokens=PROMPT)
    published = session.publish("manual")
    assert published.copied_bytes == 0
    alone = connect_to(tiny_daemon, "alone").open(tokens=[*PROMPT, 1, 2, 3])
    wanted = [str(token) for token in alone.decode(8, ignore_eos=True).wait().tokens]
    length, reused, source, *drawn = read(tiny_daemon, published.trunk, "reader")
    assert (length, reused, source) == ("700", "700", "fork")
    assert drawn == wanted
    (shown,) = publisher.trunks()
    assert shown.tier == "resident"
    assert session.info().shared_bytes > 0, "the trunk has them too"
    session.close()

    (model,) = publisher.stats().models
    os.kill(model["pid"], signal.SIGKILL)
    length, reused, source, *drawn = read(tiny_daemon, published.trunk, "second reader")
    assert (length, reused, source) == ("700", "0", "none")
    assert drawn == wanted
    length, reused, source, *drawn = read(tiny_daemon, published.trunk, "third reader")
    assert (length, reused, source) == ("700", "700", "fork"), "what the second computed is the trunk's again"
    assert drawn == wanted
    publisher.unpublish("manual")
    with pytest.raises(NotFound):
        publisher.fork(published.trunk)


def test_the_bytes_that_are_told_follow_the_others(tiny_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    """Of a session that nothing happened to: what it shares is told as of now."""
    room = connect_to(tiny_daemon, "bytes")
    first = room.open(tokens=PROMPT)
    whole = first.info()
    assert (whole.private_bytes, whole.shared_bytes) == (whole.capacity_bytes, 0)
    second = room.open(tokens=[*PROMPT, 7, 8, 9])
    assert second.receipt is not None
    assert (second.receipt.reused, second.receipt.source) == (699, "shared")
    third, fourth = first.fork(2)
    for each in (first, third, fourth):
        info = each.info()
        assert (info.private_bytes, info.shared_bytes) == (0, whole.private_bytes)
    for each in (second, third, fourth):
        each.close()
    info = first.info()
    assert (info.private_bytes, info.shared_bytes) == (whole.private_bytes, 0)
    gauges = room.stats().gauges
    assert gauges["trunk_bytes"] >= whole.private_bytes
    first.close()


def test_sharing_by_hand_over_a_socket(tiny_daemon: RunningDaemon, raw_client: RawClient) -> None:
    client, stranger = raw_client(tiny_daemon, "by hand"), raw_client(tiny_daemon, "stranger")
    prompt = PROMPT[::-1]
    first = client.ask("open", tokens=prompt)
    second = client.ask("open", tokens=prompt)
    other = stranger.ask("open", tokens=prompt)
    assert (first["receipt"]["source"], first["receipt"]["reused"]) == ("none", 0)
    assert (second["receipt"]["source"], second["receipt"]["reused"]) == ("shared", len(prompt) - 1)
    assert (other["receipt"]["source"], other["receipt"]["reused"]) == ("none", 0)
    ids = [client.send("decode", session=opened["session"], max_tokens=10) for opened in (first, second)]
    one, two = [client.final(request) for request in ids]
    assert one["tokens"] == two["tokens"]
    until_s = time.monotonic() + PULSE_WITHIN_S
    while "unconserved" not in (gauges := client.ask("stats")["models"][0]["gauges"]):
        assert time.monotonic() < until_s
        time.sleep(0.05)
    assert gauges["unconserved"] == 0
