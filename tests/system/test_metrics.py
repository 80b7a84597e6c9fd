"""The page for Prometheus of a real daemon that parks, forks, evicts, restores and loses its worker.

It parses, every counter is that of `stats`, before and after, and histograms counted what clients saw.
"""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.conftest import RunningDaemon, StartDaemon
from tests.system.conftest import ConnectTo, await_model

from stateroom.client import Room, Session
from stateroom.client import errors as e
from stateroom.client.protocol import StatsResult, TokenEvent
from stateroom.daemon.families import COUNTERS, GAUGES, OF_MODELS, PREFIX, SUMS, Place

pytestmark = pytest.mark.system

LENGTH = 400  # tokens of a prompt
BUDGET = "1MiB"  # of KV: some of the sessions below
READY_S = 60.0
# What `stats` itself changes: by so much, as it answers.
OWN = {"requests": 1, "requests.stats.ok": 1, "replies": 1, "messages_sent": 1}
# Gauges that change by themselves, or with the machine.
MOVING = {
    "uptime_s", "cpu_s", "rss_bytes", "rss_peak_bytes", "memory_pressure", "kv_budget_bytes",
    "kv_granted_bytes", "kv_held_bytes", "journal_pending", "journal_lag_s",
}  # fmt: skip

Seen = Mapping[tuple[str, frozenset[str]], float]


@dataclass
class Client:
    """Draws, and counts what it saw."""

    room: Room
    decodes: int = 0
    events: int = 0
    gaps: int = field(init=False, default=0)

    def draw(self, session: Session, tokens: int, kill: int | None = None) -> None:
        """`kill`: a process that is killed once some have come."""
        events = 0
        for event in session.decode(tokens, ignore_eos=True):
            events += isinstance(event, TokenEvent)
            if kill is not None and events == 5:
                os.kill(kill, signal.SIGKILL)
                kill = None
        self.decodes += 1
        self.events += events
        self.gaps += events - 1


def prompt(number: int) -> list[int]:
    return [(7 * number + 3 * place) % 250 + 1 for place in range(LENGTH)]


def port_of(daemon: RunningDaemon) -> int:
    entries = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    (port,) = [entry["port"] for entry in entries if entry["event"] == "metrics page"]
    return int(port)


def read(port: int) -> Seen:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    families = list(text_string_to_metric_families(page))
    assert all(family.name.startswith(f"{PREFIX}_") for family in families)
    # Every figure is known by name: what isn't has its name for words.
    assert [family.name for family in families if family.documentation.startswith("`")] == []
    return {
        (sample.name, frozenset(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def at(seen: Seen, place: Place, *values: str) -> float:
    return seen[place.family.shown, frozenset([*place.given, *values])]


def agrees(seen: Seen, stats: StatsResult) -> None:
    """The page, which was read next, tells what `stats` told."""
    counters = dict(stats.counters)
    for name, by in OWN.items():
        counters[name] = counters.get(name, 0) + by
    for name, value in counters.items():
        kind, *rest = name.split(".")
        if name in ("engine_starts", "engine_deaths"):
            place = OF_MODELS[name.removeprefix("engine_")]
            assert sum(at(seen, place, model["id"]) for model in stats.models) == value, name
        elif name in SUMS:
            shown = COUNTERS[kind].family.shown
            assert sum(each for (of, _), each in seen.items() if of == shown) == value, name
        elif name == "bytes_sent":
            assert at(seen, COUNTERS[name]) > value  # with the reply that told it
        else:
            assert at(seen, COUNTERS[kind], *rest) == value, name
    for name in stats.gauges.keys() - MOVING - set(SUMS):
        assert at(seen, GAUGES[name]) == stats.gauges[name], name
    assert stats.gauges.keys() >= MOVING
    for name in MOVING:
        assert at(seen, GAUGES[name]) >= 0, name


def pulsed(room: Room) -> int:
    """Waits until the engine is there and has told of its steps; gives its process."""
    deadline = time.monotonic() + READY_S
    while (engine := room.stats().models[0])["state"] != "ready" or not engine["gauges"].get("steps"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return int(engine["pid"])


def test_the_page_agrees_with_stats_before_and_after_a_scripted_run(
    start_daemon: StartDaemon, tiny_folder: Path, connect_to: ConnectTo
) -> None:
    daemon = start_daemon("--metrics-port", "0", f"--kv-budget={BUDGET}", model=tiny_folder)
    await_model(daemon)
    port, room = port_of(daemon), connect_to(daemon, "scripted")
    before = room.stats()
    agrees(read(port), before)
    client = Client(room)

    first = room.open(tokens=prompt(0), name="first")
    for _ in range(2):
        client.draw(first, 10)
    first.sync(tokens=prompt(0))
    (child,) = first.fork(1)
    child.prefill(tokens=[1, 2])
    client.draw(child, 5)
    assert room.open(tokens=prompt(0), name="same").receipt is not None
    with pytest.raises(e.Exists):
        room.open(tokens=[1], name="first")
    first.save("kept")
    first.park()
    client.draw(first, 5)
    room.restore("kept").close()
    crowd = [room.open(tokens=prompt(number)) for number in range(1, 12)]
    moved = {session.info().tier for session in crowd}
    assert moved == {"resident", "disk"}
    client.draw(crowd[-1], 400, kill=pulsed(room))
    client.draw(crowd[-2], 5)
    pulsed(room)
    counted, worked = room.stats().counters, read(port)
    room.unload(room.server.models[0].id)
    after = room.stats()
    seen = read(port)
    agrees(seen, after)

    def grew(name: str) -> int:
        return after.counters[name] - before.counters.get(name, 0)

    for source in ("fork", "shared", "snapshot", "session"):
        assert grew(f"tokens_reused.{source}") > 0, source
    assert grew("receipts.none") >= 12  # new content, as often
    assert (grew("evicted.asked"), grew("engine_deaths"), grew("requests_resumed")) == (1, 1, 1)
    assert grew("evicted.memory") > 0
    assert grew("evicted.lost") > 0
    assert grew("sessions_recovered") == 2  # those that were used since
    assert grew("evicted.unloaded") > 0 == counted["evicted.unloaded"]
    left = sum(grew(name) for name in after.counters if name.startswith("evicted."))
    whole = grew("evicted.lost") + grew("evicted.unloaded")  # of engines at once: no moves one by one
    assert left - whole == grew("moved.disk") + grew("moved.tokens")
    assert grew("requests.open.exists") == 1
    assert seen["stateroom_first_token_seconds_count", frozenset()] == client.decodes
    assert seen["stateroom_queue_seconds_count", frozenset()] == client.decodes == grew("requests.decode.ok")
    assert seen["stateroom_token_gap_seconds_count", frozenset()] == client.gaps
    assert seen["stateroom_loop_lag_seconds_count", frozenset()] > 0
    for name in ("step", "quantum"):
        shown = f"stateroom_engine_{name}_seconds_count", frozenset(["tiny"])
        assert worked[shown] > 0, name
        assert shown not in seen  # the worker is gone, and what it told with it
    assert seen["stateroom_engine_state", frozenset(["tiny", "stopped"])] == 1
    assert seen["stateroom_engine_state", frozenset(["tiny", "ready"])] == 0
