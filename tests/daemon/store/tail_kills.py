"""Run as a program: kills processes that are told messages, and looks at what they leave.

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
from stateroom.daemon.store.tail import Tail, replay

MOST_S = 0.05
FLUSH_EVERY = 20  # messages, about


class Process:
    """What a daemon has of the two files, until it is killed."""

    def __init__(self, folder: Path) -> None:
        self.store, self.tail = Store(folder / "catalog.db"), Tail(folder / "catalog.tail")
        self.number = self.store.number
        messages = self.tail.after(self.number)
        if messages:
            before = Pending()
            replay(messages, before)
            self.number = self.tail.number + 1
            self.store.write(before.take(), True, self.number)
            self.store.reload()
        self.tail.begin(self.number)
        self.pending = Pending(self.tail.add)

    def flush(self, written: bool) -> None:
        """`written`: else the process is killed while it is under way, or the disk is full."""
        self.number += 1
        batch = self.pending.take()
        self.tail.mark(self.number)
        if written:
            self.store.write(batch, False, self.number)
            if self.store.number == self.number:
                self.tail.flushed()
        else:
            self.pending.put_back(batch)

    def kill(self) -> None:
        self.store.close()
        self.tail.close(remove=False)


def _work(folder: Path, world: World, attempt: int) -> Iterator[None]:
    process, theirs, when = Process(folder), random.Random(attempt), random.Random(-attempt)
    yield
    while True:
        world.step(theirs, process.pending)
        yield
        if not when.randrange(FLUSH_EVERY):
            process.flush(True)


def main(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """What was told is there, or that and the next message, which was told to nobody."""
    drawn, world = random.Random(seed), World()
    seen = {"kills": 0, "messages": 0, "ahead": 0, "from_tail": 0}
    for attempt in range(kills):
        told = steps_told(_work(folder, world, attempt), drawn.random() * MOST_S)
        ours = random.Random(attempt)
        for _ in range(told):
            world.step(ours, Pending())
        seen["from_tail"] += bool(Tail(folder / "catalog.tail").after(_flushed(folder)))
        process = Process(folder)
        try:
            assert_same(process.store.loaded, world)
        except AssertionError:
            world.step(ours, Pending())
            assert_same(process.store.loaded, world)
            seen["ahead"] += 1
        process.kill()
        seen["kills"] += 1
        seen["messages"] += told
    return seen


def _flushed(folder: Path) -> int:
    store = Store(folder / "catalog.db")
    store.close()
    return store.number


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
