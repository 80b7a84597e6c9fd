"""What goes wrong in a chaotic run: one thing at a time, at random moments, by a seed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from tests.chaos.daemon import Daemon

PAUSE_S = (0.0, 2.0)  # while streams run, before the next misfortune
FILLER = "filler"
FROZEN_S = (0.2, 1.5)  # of a worker, less than the daemon takes for a hang
DEAF_S = (0.5, 3.0)  # of a client
CALM_S = 0.5  # for a daemon that was killed to be missed


class Monkey:
    """Args: `clients`, pids of client processes; `kinds`, which misfortunes (None: all)."""

    def __init__(self, daemon: Daemon, clients: list[int], seed: int, kinds: list[str] | None = None) -> None:
        self._daemon, self._clients = daemon, clients
        self._draw = random.Random(seed)
        known: dict[str, Callable[[], None]] = {
            "kill worker": self._kill_worker,
            "kill broker": self._kill_broker,
            "kill both": self._kill_both,
            "stop and start": self._restart,
            "freeze worker": self._freeze_worker,
            "freeze client": self._freeze_client,
            "fill the disk": self._fill,
            "flip a bit": self._flip,
        }
        self._kinds = [(name, known[name]) for name in kinds or known]
        self.done: Counter[str] = Counter()

    def act(self) -> None:
        """One misfortune, after a pause."""
        self._daemon.wait_until_decoding()
        time.sleep(self._draw.uniform(*PAUSE_S))
        name, cause = self._draw.choice(self._kinds)
        cause()
        self.done[name] += 1

    def make_up(self) -> None:
        """Everything that lasts is put right."""
        (self._daemon.state / FILLER).unlink(missing_ok=True)
        for pid in self._clients:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _workers(self) -> list[psutil.Process]:
        return self._daemon.workers()

    def _kill_worker(self) -> None:
        for worker in self._workers():
            with suppress(psutil.NoSuchProcess):
                worker.kill()

    def _kill_broker(self) -> None:
        self._daemon.kill()
        time.sleep(self._draw.uniform(0, CALM_S))
        self._daemon.start()

    def _kill_both(self) -> None:
        workers = self._workers()
        self._daemon.kill()
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        self._daemon.start()

    def _restart(self) -> None:
        self._daemon.stop()
        self._daemon.start()

    def _freeze_worker(self) -> None:
        for worker in self._workers()[:1]:
            with suppress(psutil.NoSuchProcess):
                worker.suspend()
                time.sleep(self._draw.uniform(*FROZEN_S))
                worker.resume()

    def _freeze_client(self) -> None:
        pid = self._draw.choice(self._clients)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self._draw.uniform(*DEAF_S))
            os.kill(pid, signal.SIGCONT)

    def _fill(self) -> None:
        """Only where the state has a small disk of its own; else everybody's would be full."""
        if not self._daemon.small_disk:
            return
        with suppress(OSError), open(self._daemon.state / FILLER, "wb") as filler:
            while True:
                filler.write(bytes(2**16))
                filler.flush()
        time.sleep(self._draw.uniform(0.5, 2.0))
        (self._daemon.state / FILLER).unlink(missing_ok=True)

    def _flip(self) -> None:
        files = [path for path in (self._daemon.state / "snapshots").rglob("*") if path.is_file()]
        files = [path for path in files if path.name != "lock" and path.stat().st_size]
        if files:
            flip(self._draw.choice(files), self._draw)


def flip(path: Path, draw: random.Random) -> None:
    """One bit of a file, in place."""
    with suppress(FileNotFoundError), open(path, "r+b") as file:
        at = draw.randrange(max(path.stat().st_size, 1))
        file.seek(at)
        byte = file.read(1)
        if byte:
            file.seek(at)
            file.write(bytes([byte[0] ^ (1 << draw.randrange(8))]))
