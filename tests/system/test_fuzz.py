"""Fuzzed frames at a real daemon's socket: one final reply each, both processes alive, memory flat.

`STATEROOM_FUZZ_FRAMES=1000000 make test ARGS=tests/system/test_fuzz.py` sends as many; `make fuzz` drives
decode and validate alone, guided by coverage.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import msgpack
import psutil
import pytest
from tests.conftest import RunningDaemon
from tests.daemon.rig import Raw
from tests.fuzz.mutation import Mutator, requests
from tests.system.conftest import ConnectTo, RawClient, Tell
from tests.system.footprint import mib

from stateroom.client.protocol import ERROR_CODES

FRAMES = int(os.environ.get("STATEROOM_FUZZ_FRAMES", "20000"))
SEED = 21
BURST = 200  # messages on their way at once: fewer than the socket keeps
WARM_PART = 4  # memory is compared from this part of the frames on
GROWN_BYTES_MAX = 8 * 2**20
REPLY_MS = 20_000

pytestmark = [pytest.mark.system, pytest.mark.timeout(max(300, FRAMES // 200))]


def exchange(client: Raw, frames: list[bytes], outcomes: Counter[str]) -> None:
    for frame in frames:
        client.socket.send(frame)
    finals = 0
    while finals < len(frames):
        assert client.socket.poll(REPLY_MS), f"{finals} final replies to {len(frames)} messages"
        reply = msgpack.unpackb(client.socket.recv())
        finals += reply["final"]
        if reply["kind"] == "error":
            code = reply["error"]["code"]
            assert code in ERROR_CODES
            assert code not in ("internal", "engine_lost", "slow_consumer"), reply
            outcomes[code] += 1
        elif reply["final"]:
            outcomes["result"] += 1


def test_fuzzed_frames(
    tiny_daemon: RunningDaemon, raw_client: RawClient, connect_to: ConnectTo, tell: Tell
) -> None:
    """B25, B70, B71, B73: nothing that comes in bytes harms it."""
    mutator = Mutator(SEED, requests("watch"))  # a watch that was right after all never ends
    client = raw_client(tiny_daemon)
    pids = (tiny_daemon.pid, *tiny_daemon.workers())
    outcomes: Counter[str] = Counter()
    held: list[list[int]] = []
    began = time.monotonic()
    for _ in range(FRAMES // BURST):
        exchange(client, [mutator.frame() for _ in range(BURST)], outcomes)
        held.append([psutil.Process(pid).memory_info().rss for pid in pids])
    took_s = time.monotonic() - began
    warm = held[len(held) // WARM_PART :]
    middle = len(warm) // 2
    grown = [max(each[middle:]) - max(each[:middle]) for each in zip(*warm, strict=True)]
    tell(f"{FRAMES} frames in {took_s:.0f} s: {dict(outcomes.most_common())}")
    tell(f"grown over the last part: {', '.join(mib(each) for each in grown)}")
    client.nothing_more()
    assert pids == (tiny_daemon.pid, *tiny_daemon.workers()), "a process was replaced"
    assert max(grown) < GROWN_BYTES_MAX
    with connect_to(tiny_daemon, "after").open(tokens=[1, 2, 3]) as session:
        assert len(session.decode(4, ignore_eos=True).wait().tokens) == 4
