"""Run as a program: kills processes that write to a store, and looks at what they leave.

It forks, which is why it is a program of its own: nothing here has started a thread.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from tests.daemon.store.messages import World, assert_same

from stateroom.daemon.store.pending import Pending
from stateroom.daemon.store.store import Store

MESSAGES = 8  # between two flushes
MOST_S = 0.05


def run(world: World, drawn: random.Random, pending: Pending) -> None:
    for _ in range(MESSAGES):
        world.step(drawn, pending)


def main(file: Path, kills: int, seed: int) -> dict[str, int]:
    """What a flush acknowledged is there, or that and the next one; never anything in between."""
    drawn = random.Random(seed)
    world = World()
    seen = {"kills": 0, "flushes": 0, "ahead": 0}
    for attempt in range(kills):
        out, into = os.pipe()
        pid = os.fork()
        if not pid:
            store, pending, theirs = Store(file), Pending(), random.Random(attempt)
            assert_same(store.loaded, world)
            os.write(into, b".")
            while True:
                run(world, theirs, pending)
                store.write(pending.take())
                os.write(into, b".")
        os.close(into)
        assert os.read(out, 1) == b"."
        time.sleep(drawn.random() * MOST_S)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        told = 0
        while more := os.read(out, 4096):
            told += len(more)
        os.close(out)
        ours = random.Random(attempt)
        for _ in range(told):
            run(world, ours, Pending())
        store = Store(file)
        try:
            assert_same(store.loaded, world)
        except AssertionError:
            run(world, ours, Pending())
            assert_same(store.loaded, world)
            seen["ahead"] += 1
        store.close()
        seen["kills"] += 1
        seen["flushes"] += told
    return seen


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
