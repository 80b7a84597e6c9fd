"""The page for Prometheus of a real daemon: its counters agree with `stats`, its histograms with the run."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.conftest import StartDaemon
from tests.system.conftest import ConnectTo, await_model

pytestmark = pytest.mark.system


def test_the_page_agrees_with_stats(
    start_daemon: StartDaemon, tiny_folder: Path, connect_to: ConnectTo
) -> None:
    daemon = start_daemon("--metrics-port", "0", model=tiny_folder)
    await_model(daemon)
    entries = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    (port,) = [entry["port"] for entry in entries if entry["event"] == "metrics page"]
    room = connect_to(daemon, "scripted")
    with room.open(tokens=range(100)) as session:
        for _ in range(3):
            session.decode(10, ignore_eos=True).wait()
        session.sync(tokens=range(50))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    stats = room.stats()
    seen = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    asked = ("stats", "hello")  # by ourselves, in between
    for name, value in stats.counters.items():
        kind, *rest = name.split(".")
        if kind == "requests" and rest and rest[0] not in asked:
            assert seen["stateroom_requests_by_total", *sorted(rest)] == value, name
        elif not rest and name not in ("requests", "replies"):
            assert seen[f"stateroom_{name}_total",] == value, name
    for name in ("sessions", "tokens", "kv_private_bytes", "engines_ready"):
        assert seen[f"stateroom_{name}",] == stats.gauges[name], name
    assert seen["stateroom_first_token_seconds_count",] == 3
    assert seen["stateroom_queue_seconds_count",] == 3
    assert seen["stateroom_token_gap_seconds_count",] == 27
    assert seen["stateroom_engine_state", "ready", "tiny"] == 1
