"""All who may look at a daemon, in a process of their own: `python -m benchmarks.observers ENDPOINT PORT`.

A line on stdin has them begin, the next one end, and so on; each is answered by a line with what they saw.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stateroom.client import Room, connect
from stateroom.client.stream import EventStream

EVERY_S = 1.0  # the page is scraped; sessions, requests and figures are asked for, as `top` does
WATCHES = 2
ANSWER_S = 10.0


@dataclass
class Seen:
    """Since they began."""

    scrapes: int = 0
    looks: int = 0
    events: int = 0


class Observers:
    """In this process."""

    def __init__(self, endpoint: str, port: int) -> None:
        self._endpoint, self._port = endpoint, port
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []
        self._room = connect(endpoint, app="observers")
        self._streams: list[EventStream] = []
        self.seen = Seen()

    def begin(self) -> None:
        self.seen, self._ending = Seen(), threading.Event()
        self._streams = [self._room.watch(stats_every_s=EVERY_S, everyone=True) for _ in range(WATCHES)]
        self._threads = [threading.Thread(target=self._look)]
        self._threads += [threading.Thread(target=self._watch, args=(each,)) for each in self._streams]
        for thread in self._threads:
            thread.start()

    def end(self) -> Seen:
        self._ending.set()
        for stream in self._streams:
            stream.cancel()
        for thread in self._threads:
            thread.join(ANSWER_S)
        return self.seen

    def _look(self) -> None:
        while True:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=ANSWER_S) as page:
                self.seen.scrapes += page.read().startswith(b"#")
            self._glance(self._room)
            if self._ending.wait(EVERY_S):
                return

    def _glance(self, room: Room) -> None:
        room.list(everyone=True)
        room.requests(everyone=True)
        room.stats()
        self.seen.looks += 1

    def _watch(self, stream: EventStream) -> None:
        for _ in stream:
            self.seen.events += 1


@contextmanager
def observers(endpoint: str, port: int) -> Iterator[subprocess.Popen[str]]:
    """A process of them, which doesn't look yet."""
    command = [sys.executable, "-m", "benchmarks.observers", endpoint, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        turned(process)
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()


def turned(process: subprocess.Popen[str]) -> Seen:
    """Has them begin or end; gives what they saw since they last began. Raises RuntimeError: they failed."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    answer = process.stdout.readline().split()
    if len(answer) != 3:
        raise RuntimeError("the observers have ended")
    return Seen(*map(int, answer))


def main() -> None:
    made = Observers(sys.argv[1], int(sys.argv[2]))
    looking = True  # so that the first line only tells that they are there
    for _ in sys.stdin:
        if looking:
            made.end()
        else:
            made.begin()
        looking = not looking
        sys.stdout.write(f"{made.seen.scrapes} {made.seen.looks} {made.seen.events}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
