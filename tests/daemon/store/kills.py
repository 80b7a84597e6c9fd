"""Run as a program: kills processes that write to a store, and looks at what they leave.

It forks, which is why it is a program of its own: nothing here has started a thread.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.daemon.store.messages import World, assert_same
from tests.dying import steps_told

from stateroom.daemon.store.pending import Pending
from stateroom.daemon.store.store import Store

MESSAGES = 8  # between two flushes
MOST_S = 0.05


def run(world: World, drawn: random.Random, pending: Pending) -> None:
    for _ in range(MESSAGES):
        world.step(drawn, pending)


def _work(file: Path, world: World, attempt: int) -> Iterator[None]:
    store, pending, theirs = Store(file), Pending(), random.Random(attempt)
    assert_same(store.loaded, world)
    yield
    while True:
        run(world, theirs, pending)
        store.write(pending.take())
        yield


def main(file: Path, kills: int, seed: int) -> dict[str, int]:
    """What a flush acknowledged is there, or that and the next one; never anything in between."""
    drawn = random.Random(seed)
    world = World()
    seen = {"kills": 0, "flushes": 0, "ahead": 0}
    for attempt in range(kills):
        told = steps_told(_work(file, world, attempt), drawn.random() * MOST_S)
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
