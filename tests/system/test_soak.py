"""Several clients open, fork, decode, trim, sync and close for a while: nothing grows.

Longer, and by more of them: `STATEROOM_SOAK_S=300 STATEROOM_SOAK_CLIENTS=64`.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.conftest import RunningDaemon, StartDaemon
from tests.system.conftest import ConnectTo, Tell, await_model
from tests.system.footprint import Footprint, broker_and_worker, growth, mib, seconds_until

from stateroom.client import Room, Session
from stateroom.client.errors import EngineLost

SOAK_S = float(os.environ.get("STATEROOM_SOAK_S", "30"))
SOAK_CLIENTS = int(os.environ.get("STATEROOM_SOAK_CLIENTS", "4"))
WARM_S = 0.4 * SOAK_S  # until caches, pools and buffers have their size
CLIENTS = 4
SEED = 51
SESSIONS_MAX = 6  # of one client
BROKER_BYTES_MAX = 4 * 2**20  # by which it may grow after it is warm
WORKER_BYTES_MAX = 24 * 2**20
LOOPS_MIN = 160 // SOAK_CLIENTS  # of each client
CRASHES_S = 12.0
DEATHS_MAX = 4  # more of them in so short a time, and requests are refused until a pause is over
PAUSES_S = (0.3, 3.0)  # between two deaths
GREEDY = 6

pytestmark = [pytest.mark.system, pytest.mark.timeout(max(300, 3 * SOAK_S))]


@dataclass
class Churn:
    """One client at work. What the daemon refuses is a failure: nothing here asks for too much."""

    room: Room
    draw: random.Random
    until: float
    loops: int = 0
    lost: int = 0
    crashes: bool = False  # the engine may be lost under a request; all else is an error
    sessions: list[Session] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def run(self) -> None:
        try:
            while time.monotonic() < self.until:
                try:
                    self.turn(self.sessions)
                    self.loops += 1
                except EngineLost:
                    if not self.crashes:
                        raise
                    self.lost += 1
                    time.sleep(0.05)  # the next worker may be seconds away
            for session in [] if self.crashes else self.sessions:
                session.close()
        except BaseException as error:
            self.errors.append(error)

    def some(self, most: int) -> list[int]:
        return [self.draw.randrange(256) for _ in range(self.draw.randint(1, most))]

    def turn(self, sessions: list[Session]) -> None:
        if not sessions or (len(sessions) < SESSIONS_MAX and self.draw.random() < 0.3):
            sessions.append(self.room.open(tokens=self.some(200)))
        session = self.draw.choice(sessions)
        what = self.draw.randrange(8)
        if what == 0:
            session.prefill(tokens=self.some(150))
        elif what == 1 and len(sessions) < SESSIONS_MAX:
            sessions.extend(session.fork(2))
        elif what == 2:
            session.trim(to=self.draw.randint(1, session.length))
        elif what == 3:
            session.sync(tokens=[*session.tokens(0, min(3, session.length)).tokens, *self.some(80)])
        elif what == 4:
            session.score(tokens=self.some(20))
        elif what == 5:
            for _ in session.decode(500, ignore_eos=True):
                if self.draw.random() < 0.1:
                    break  # which cancels
        else:
            hot = {"temperature": 1.0, "seed": self.draw.randrange(2**32)}
            session.decode(
                self.draw.randint(1, 30), ignore_eos=True, logprobs=self.draw.choice([None, 3]), **hot
            ).wait()  # type: ignore[arg-type]
        if session.length > 800 or self.draw.random() < 0.15:
            session.close()
            sessions.remove(session)


def test_churn_leaves_nothing_behind(tiny_daemon: RunningDaemon, connect_to: ConnectTo, tell: Tell) -> None:
    """B50, B51, B59: memory, descriptors and threads of broker and worker are flat; no session is left."""
    watcher = connect_to(tiny_daemon, "watcher")
    began = time.monotonic()
    clients = [
        Churn(connect_to(tiny_daemon, f"churn-{i}"), random.Random(SEED + i), began + SOAK_S)
        for i in range(SOAK_CLIENTS)
    ]
    threads = [threading.Thread(target=client.run, daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    seen: list[tuple[Footprint, Footprint]] = []
    while any(thread.is_alive() for thread in threads):
        time.sleep(1.0)
        seen.append(broker_and_worker(tiny_daemon))
        assert time.monotonic() - began < SOAK_S + 20, "a client hangs"
    errors = [error for client in clients for error in client.errors]
    assert not errors, errors
    loops = [client.loops for client in clients]
    assert min(loops) >= LOOPS_MIN, f"hardly anything happened: {loops}"
    gauges = watcher.stats().gauges
    assert (gauges["sessions"], gauges["running"], gauges["queued"], gauges["tokens"]) == (0, 0, 0, 0)
    warm = int(len(seen) * WARM_S / SOAK_S)
    for name, i, bound in (("broker", 0, BROKER_BYTES_MAX), ("worker", 1, WORKER_BYTES_MAX)):
        flat([one[i] for one in seen], warm, name, bound, tell)
    drawn = watcher.stats().counters["tokens_decoded"]
    tell(f"{sum(loops)} operations by {SOAK_CLIENTS} clients, {drawn} tokens decoded")


def flat(seen: list[Footprint], warm: int, name: str, bound: int, tell: Tell) -> None:
    grown = growth(seen[warm:])
    middle = (warm + len(seen)) // 2
    before, after = seen[warm:middle], seen[middle:]
    rss = max(one.rss_bytes for one in after) / 2**20
    tell(f"{name}: {rss:.0f} MiB, grown {mib(grown)}, {after[-1].files} files, {after[-1].threads} threads")
    assert grown < bound
    assert max(one.files for one in after) <= max(one.files for one in before)
    assert max(one.threads for one in after) <= max(one.threads for one in before)


def test_churn_while_workers_die(
    start_daemon: StartDaemon, tiny_folder: Path, connect_to: ConnectTo, tell: Tell
) -> None:
    """B52: whatever was running when; every request ends once, and every session holds what it says."""
    daemon = start_daemon(model=tiny_folder)
    await_model(daemon)
    draw = random.Random(SEED)
    until = time.monotonic() + CRASHES_S
    clients = [
        Churn(connect_to(daemon, f"crash-{i}"), random.Random(SEED + i), until, crashes=True)
        for i in range(CLIENTS)
    ]
    threads = [threading.Thread(target=client.run, daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    killed = 0
    while time.monotonic() < until and killed < DEATHS_MAX:
        time.sleep(draw.uniform(*PAUSES_S))
        for worker in daemon.workers():
            os.kill(worker, signal.SIGKILL)
            killed += 1
    for thread in threads:
        thread.join(30)
    errors = [error for client in clients for error in client.errors]
    assert not errors, errors
    room = clients[0].room
    seconds_until(lambda: room.stats().gauges["engines_ready"] == 1, 30, "the last worker is there")
    checked = sum(check_sessions(client) for client in clients)
    lost, loops = sum(client.lost for client in clients), sum(client.loops for client in clients)
    tell(
        f"{killed} workers killed under {loops} operations, {lost} lost; {checked} sessions as they should be"
    )
    assert killed >= 3
    stats = room.stats()
    # What ran goes on with the next worker; a request is lost only where that keeps being killed, too.
    assert stats.counters["requests_resumed"] >= 1
    gauges = stats.gauges
    assert (gauges["running"], gauges["queued"]) == (0, 0)


def check_sessions(client: Churn) -> int:
    """Each goes on as a fresh session with the same tokens does."""
    listed = client.room.list()
    for info in listed:
        session = client.room.session(info.session)
        held = session.tokens().tokens
        assert len(held) == info.length
        if held:
            with client.room.open(tokens=held) as fresh:
                wanted = fresh.decode(GREEDY, ignore_eos=True).wait().tokens
            assert session.decode(GREEDY, ignore_eos=True).wait().tokens == wanted
        session.close()
    return len(listed)


def test_streams_without_end_cost_no_memory(
    tiny_daemon: RunningDaemon, connect_to: ConnectTo, tell: Tell
) -> None:
    """B50: thousands of steps of two rows; bookkeeping that is never evaluated would grow the graph."""
    room = connect_to(tiny_daemon, "long")
    sessions = [room.open(text=text) for text in ("one", "another one, longer")]
    streams = [session.decode(4_000, ignore_eos=True, stream=False) for session in sessions]
    began = time.monotonic()
    seen = []
    while room.stats().gauges["running"]:
        seen.append(broker_and_worker(tiny_daemon)[1])
        time.sleep(0.25)
        assert time.monotonic() - began < 60
    assert [len(stream.wait().tokens) for stream in streams] == [4_000, 4_000]
    quarter = len(seen) // 4
    grown = max(one.rss_bytes for one in seen) - max(one.rss_bytes for one in seen[: quarter + 1])
    tell(f"8,000 tokens in {time.monotonic() - began:.1f} s; the worker has grown {mib(grown)}")
    assert grown < WORKER_BYTES_MAX
    for session in sessions:
        session.close()
