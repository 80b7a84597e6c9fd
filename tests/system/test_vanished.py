"""Fifty client processes killed at random points: nothing of theirs runs on, all they had is kept."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import RunningDaemon
from tests.measured import best
from tests.system.conftest import ConnectTo, Tell
from tests.system.footprint import broker_and_worker, seconds_until

from stateroom.client import Room

pytestmark = pytest.mark.system

CLIENTS = 50
WAVE = 10  # processes at a time: this many interpreters start side by side
SEED = 59
LIFE_S = 0.6  # the longest that one works before it is killed, or so many times what is done first
LIVES = 7
READY_S = 60.0
QUIET_S = 1.0  # after the last death: nothing runs any more
SETTLED_S = 30.0  # by then, whatever else the machine does
IDLE_S = 2.0  # over which the idle daemon is watched
IDLE_CPU_S = 0.045  # for broker and worker each; it is counted in steps of 10 ms
GREEDY = 6
SCRIPT = Path(__file__).with_name("vanishing_client.py")


def start(daemon: RunningDaemon, name: str, seed: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(SCRIPT), daemon.endpoint, "vanishing", name, str(seed)]
    return subprocess.Popen(command, env=daemon.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def life_s(room: Room) -> float:
    """How long clients live: longer where everything takes longer."""
    began = time.monotonic()
    with room.open(tokens=[1] * 100) as session:
        session.decode(20, ignore_eos=True).wait()
    return max(LIFE_S, LIVES * (time.monotonic() - began))


def live_and_die(daemon: RunningDaemon, room: Room, draw: random.Random, wave: int) -> None:
    """Starts some clients, and kills each after a random time of work."""
    clients = [start(daemon, f"c{wave}-{i}", draw.randrange(2**31)) for i in range(WAVE)]
    try:
        for client in clients:
            assert client.stdout is not None
            said = client.stdout.readline()
            assert said == b"ready\n", client.stderr.read() if client.stderr else said
        longest_s = life_s(room)
        began = time.monotonic()
        deaths = sorted((draw.random() * longest_s, i) for i in range(WAVE))
        for at_s, i in deaths:
            time.sleep(max(0.0, began + at_s - time.monotonic()))
            assert clients[i].poll() is None, clients[i].stderr.read() if clients[i].stderr else ""
            clients[i].kill()
    finally:
        for client in clients:
            client.kill()
            client.wait()
            for pipe in (client.stdout, client.stderr):
                if pipe is not None:
                    pipe.close()


def running(room: Room) -> float:
    gauges = room.stats().gauges
    return gauges["running"] + gauges["queued"] + gauges["watchers"]


def test_fifty_clients_killed_at_random_points(
    tiny_daemon: RunningDaemon, connect_to: ConnectTo, tell: Tell
) -> None:
    """B20, B59: running requests are 0 within a second; sessions hold what they say; idle costs nothing."""
    draw = random.Random(SEED)
    room = connect_to(tiny_daemon, "vanishing")
    waves = itertools.count()

    def quiet_after_a_wave() -> float:
        live_and_die(tiny_daemon, room, draw, next(waves))
        return seconds_until(lambda: running(room) == 0, SETTLED_S, "nothing runs")

    for _ in range(CLIENTS // WAVE - 1):
        quiet_after_a_wave()
    quiet_s = best(quiet_after_a_wave, QUIET_S)
    assert quiet_s < QUIET_S
    seconds_until(lambda: room.stats().gauges["clients"] == 1, SETTLED_S, "the clients are forgotten")
    sessions = room.list()
    assert {session.state for session in sessions} == {"idle"}
    named = [session.name for session in sessions if session.name]
    lengths = sum(session.length for session in sessions)
    tell(f"quiet {quiet_s * 1000:.0f} ms after the last death; {len(sessions)} sessions of {lengths} tokens")
    assert len(named) >= CLIENTS // 2, "hardly any client got to its first session"
    for info in sessions:
        check_kept(room, info.session)
    counters = room.stats().counters
    gone = {
        name: n for name, n in counters.items() if name.startswith("requests.") and name.endswith(".gone")
    }
    tell(f"caught in the act: {gone}")
    assert sum(gone.values()) >= CLIENTS // 4, "hardly any was killed at work"


def check_kept(room: Room, session_id: str) -> None:
    """Its tokens can be read, and it goes on as a fresh session with the same tokens does."""
    session = room.session(session_id)
    held = session.tokens().tokens
    assert len(held) == session.length == session.info().length
    if held:
        with room.open(tokens=held) as fresh:
            wanted = fresh.decode(GREEDY, ignore_eos=True).wait().tokens
        assert session.decode(GREEDY, ignore_eos=True).wait().tokens == wanted
    session.close()


def test_idle_costs_no_processor_time(tiny_daemon: RunningDaemon, connect_to: ConnectTo, tell: Tell) -> None:
    """B59: with sessions resident, a connection open and nothing to do, neither process spins."""
    room = connect_to(tiny_daemon, "idle")
    sessions = [room.open(text="resident and idle") for _ in range(3)]
    stream = sessions[0].decode(5_000, ignore_eos=True)
    next(iter(stream))
    stream.close()
    time.sleep(0.2)

    def used_s() -> float:
        before = broker_and_worker(tiny_daemon)
        time.sleep(IDLE_S)
        after = broker_and_worker(tiny_daemon)
        used = [now.cpu_s - then.cpu_s for now, then in zip(after, before, strict=True)]
        tell(f"processor time in {IDLE_S} idle s: broker {used[0]:.2f} s, worker {used[1]:.2f} s")
        return max(used)

    assert best(used_s, IDLE_CPU_S) < IDLE_CPU_S
