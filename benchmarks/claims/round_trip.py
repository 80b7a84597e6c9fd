"""One question and its answer: `hello` through the daemon and its Python client, against bare ZeroMQ."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import zmq
from benchmarks.measurement import Measurement
from benchmarks.rig import TOY, Rig

ROUNDS = 9
CALLS = 300  # in a row, of which the median counts
REPLY_MS = 2_000

# The echo is a process of its own, as the daemon is.
ECHO = """
import sys, zmq
router = zmq.Context().socket(zmq.ROUTER)
router.setsockopt(zmq.LINGER, 0)
router.bind(sys.argv[1])
while True:
    router.send_multipart(router.recv_multipart())
"""


def run(rig: Rig) -> list[Measurement]:
    sides = rig.sides(TOY)
    ours, peer = [], []
    with _echo() as ask:
        for _ in range(rig.rounds(ROUNDS) + 1):
            ours.append(_microseconds(sides.room.hello))
            peer.append(_microseconds(ask))
    return [
        Measurement(
            claim="round trip of hello over ipc",
            unit="µs",
            ours=tuple(ours[1:]),
            peer=tuple(peer[1:]),
            peer_name="ROUTER/DEALER echo",
            lower_is_better=True,
        )
    ]


def _microseconds(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return median(taken) * 1e6


@contextmanager
def _echo() -> Iterator[Callable[[], object]]:
    with tempfile.TemporaryDirectory(prefix="sr-echo-", dir="/tmp") as folder:
        endpoint = f"ipc://{Path(folder) / 'echo'}"
        process = subprocess.Popen([sys.executable, "-c", ECHO, endpoint])
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.RCVTIMEO, REPLY_MS)
        dealer.connect(endpoint)
        body = b"x" * 64

        def ask() -> None:
            dealer.send(body)
            dealer.recv()

        try:
            yield ask
        finally:
            process.terminate()
            process.wait()
            dealer.close()
            context.term()
