"""The page for Prometheus: read by its own parser, and it says what `stats` says."""

from __future__ import annotations

import asyncio
import platform
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from stateroom.client.protocol import StatsResult
from stateroom.daemon.families import COUNTERS, families
from stateroom.daemon.metrics import NAMES
from stateroom.daemon.prometheus import CONNECTIONS_MAX, LOOPBACK, Figures, Page, _Handler
from stateroom.daemon.timings import SHORT_S, EngineTimings, Histogram, Spread, Timings, histograms

STATS = StatsResult(
    counters={
        "replies": 7,
        "requests": 5,
        "requests.decode.ok": 3,
        "requests.open.capacity": 2,
        "own.close.ok": 1,
        "tokens_reused": 11,
        "tokens_reused.fork": 11,
        "evicted.memory": 4,
        "bytes_sent": 100,
        "odd.thing": 1,
    },
    gauges={
        "clients": 2.0,
        "requests_open": 3,
        "running": 1,
        "queued": 2,
        "watchers": 0,
        "sessions": 9,
        "sessions_resident": 4,
        "sessions_disk": 5,
        "kv_private_bytes": 1024.0,
        "snapshot_bytes": 2048.0,
        "journal_lag_s": 0.5,
        "cpu_s": 2.5,
        "novel": 1,
    },
    models=[
        {
            "id": "a model",
            "state": "ready",
            "starts": 2,
            "deaths": 1,
            "gauges": {
                "rows": 3,
                "device_ms.an app": 1500,
                'device_ms.odd "one".x\\': 2500,
                "cpu_s": 4.5,
                "novel": 6,
            },
        }
    ],
)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(5)
    made.close()


def read(page: Page) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with urllib.request.urlopen(f"http://{LOOPBACK}:{page.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(set(names)) == len(names), "a name stands twice"
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def figures() -> Figures:
    timings, engine = Timings(), EngineTimings()
    for value in (0.0005, 0.03, 99.0):
        timings.token_gap.add(value)
    engine.step.add(0.25)
    return Figures(STATS, timings, {"a model": dict(histograms(engine.told()))})


def test_it_says_what_stats_says(loop: asyncio.AbstractEventLoop) -> None:
    page = Page(0, figures, loop)
    try:
        seen = read(page)
    finally:
        page.close()

    def value(name: str, **labels: str) -> float:
        return seen[f"stateroom_{name}", frozenset(labels.items())]

    assert value("replies_total") == 7
    assert value("requests_total", op="decode", code="ok") == 3
    assert value("requests_total", op="open", code="capacity") == 2
    assert value("own_requests_total", op="close", code="ok") == 1
    assert value("tokens_reused_total", source="fork") == 11
    assert value("evictions_total", reason="memory") == 4
    assert value("sent_bytes_total") == 100
    assert value("odd_total", what="thing") == 1
    assert value("clients") == 2
    assert value("requests_open", state="queued") == 2
    assert value("sessions", tier="disk") == 5
    assert value("kv_bytes", tier="resident", part="private") == 1024
    assert value("kv_bytes", tier="disk", part="named") == 2048
    assert value("journal_lag_seconds") == 0.5
    assert value("novel") == 1
    assert value("process_cpu_seconds_total", process="daemon", model="") == 2.5
    assert value("process_cpu_seconds_total", process="engine", model="a model") == 4.5
    assert value("engine_state", model="a model", state="ready") == 1
    assert value("engine_state", model="a model", state="silent") == 0
    assert value("engine_starts_total", model="a model") == 2
    assert value("engine_rows", model="a model") == 3
    assert value("engine_novel", model="a model") == 6
    assert value("engine_device_seconds_total", model="a model", app="an app") == 1.5
    assert value("engine_device_seconds_total", model="a model", app='odd "one".x\\') == 2.5
    assert value("token_gap_seconds_bucket", le="0.001") == 1
    assert value("token_gap_seconds_bucket", le="0.05") == 2
    assert value("token_gap_seconds_bucket", le="+Inf") == value("token_gap_seconds_count") == 3
    assert value("token_gap_seconds_sum") == pytest.approx(99.0305)
    assert value("engine_step_seconds_bucket", model="a model", le="0.2") == 0
    assert value("engine_step_seconds_count", model="a model") == 1
    assert value("engine_step_seconds_sum", model="a model") == 0.25
    assert value("engine_quantum_seconds_count", model="a model") == 0
    (build,) = [labels for name, labels in seen if name == "stateroom_build_info"]
    assert dict(build)["python"] == platform.python_version()
    # What others are the parts of is no sample of its own.
    totals = {labels for name, labels in seen if name in ("stateroom_requests_total", "stateroom_sessions")}
    assert frozenset() not in totals


def test_it_is_right_in_the_form_that_prometheus_asks_for_first(loop: asyncio.AbstractEventLoop) -> None:
    page = Page(0, figures, loop)
    accepted = {"Accept": "application/openmetrics-text; version=1.0.0"}
    try:
        asked = urllib.request.Request(f"http://{LOOPBACK}:{page.port}/metrics", headers=accepted)
        with urllib.request.urlopen(asked, timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            strict = list(open_metrics(answer.read().decode()))
        plain = read(page)
    finally:
        page.close()
    told = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in strict
        for sample in family.samples
    }
    assert {key: value for key, value in plain.items() if "le" not in dict(key[1])}.items() <= told.items()


def test_a_port_that_is_taken(loop: asyncio.AbstractEventLoop) -> None:
    page = Page(0, figures, loop)
    try:
        with pytest.raises(OSError, match="in use"):
            Page(page.port, figures, loop)
    finally:
        page.close()


def test_connections_that_say_nothing_are_few_and_end(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user may connect: he takes no thread and no open file for longer than a page needs."""
    monkeypatch.setattr(_Handler, "timeout", 0.5)
    page = Page(0, lambda: Figures(STATS, Timings(), {}), loop)
    before = threading.active_count()
    silent = [socket.create_connection((LOOPBACK, page.port), 10.0) for _ in range(CONNECTIONS_MAX + 8)]
    try:
        # Those too many are closed at once, the others a little later.
        assert [each.recv(1) for each in silent] == [b""] * len(silent)
        assert threading.active_count() <= before + CONNECTIONS_MAX
        with urllib.request.urlopen(f"http://{LOOPBACK}:{page.port}/metrics", timeout=10.0) as answer:
            assert answer.status == 200
    finally:
        for each in silent:
            each.close()
        page.close()


def test_a_daemon_that_is_stopping_tells_nothing(loop: asyncio.AbstractEventLoop) -> None:
    ended = asyncio.new_event_loop()
    ended.close()
    page = Page(0, figures, ended)
    try:
        assert read(page) == {}
    finally:
        page.close()


def test_every_counter_has_a_place_and_every_name_keeps_to_the_conventions() -> None:
    kinds = {name.partition(".")[0] for name in NAMES}
    assert kinds - COUNTERS.keys() == {"engine_starts", "engine_deaths"}  # shown of each model
    for family in families():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", family.name), family
        assert not re.search(r"_(s|ms|kib|count|total)$", family.name), family
        assert family.words.endswith("."), family
        assert re.search(r"(^|_)(seconds|bytes)$", family.name) or "seconds" not in family.name
        assert len(set(family.labels)) == len(family.labels)
    named = [family.name for family in families()]
    assert len(set(named)) == len(named)


def test_what_another_version_tells_as_a_histogram_is_passed_over() -> None:
    told = EngineTimings().told()
    strange = [Spread("novel", [1], 1.0), Spread(told[0].name, [1, 2], 1.0)]
    assert [name for name, _ in histograms([*told, *strange])] == [each.name for each in told]


def test_a_histogram_counts_to_its_bounds() -> None:
    histogram = Histogram(SHORT_S)
    for value in (*SHORT_S, 1e9):
        histogram.add(value)
    assert histogram.counts == [1] * (len(SHORT_S) + 1)
    assert histogram.up_to()[-1] == ("+Inf", len(SHORT_S) + 1)
    assert histogram.count == len(SHORT_S) + 1
