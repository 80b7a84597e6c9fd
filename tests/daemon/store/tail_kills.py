"""Run as a program: kills processes that are told messages, and looks at what they leave.

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


def main(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """What was told is there, or that and the next message, which was told to nobody."""
    drawn, world = random.Random(seed), World()
    seen = {"kills": 0, "messages": 0, "ahead": 0, "from_tail": 0}
    for attempt in range(kills):
        out, into = os.pipe()
        pid = os.fork()
        if not pid:
            process, theirs, when = Process(folder), random.Random(attempt), random.Random(-attempt)
            os.write(into, b".")
            while True:
                world.step(theirs, process.pending)
                os.write(into, b".")
                if not when.randrange(FLUSH_EVERY):
                    process.flush(True)
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
