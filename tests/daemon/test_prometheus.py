"""The page for Prometheus: read by its own parser, and it says what `stats` says."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stateroom.client.protocol import StatsResult
from stateroom.daemon.prometheus import LOOPBACK, Page
from stateroom.daemon.timings import SHORT_S, Histogram, Timings

STATS = StatsResult(
    counters={
        "replies": 7,
        "requests": 5,
        "requests.decode.ok": 3,
        "requests.open.capacity": 2,
        "own.close.ok": 1,
    },
    gauges={"clients": 2.0, "kv_private_bytes": 1024.0},
    models=[
        {
            "id": "a model",
            "state": "ready",
            "starts": 2,
            "deaths": 1,
            "gauges": {"rows": 3, "device_ms.an app": 1.5, 'device_ms.odd "one"\\': 2.5},
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


def test_it_says_what_stats_says(loop: asyncio.AbstractEventLoop) -> None:
    timings = Timings()
    for value in (0.0005, 0.03, 99.0):
        timings.token_gap.add(value)
    page = Page(0, lambda: STATS, timings, loop)
    try:
        seen = read(page)
    finally:
        page.close()

    def value(name: str, **labels: str) -> float:
        return seen[f"stateroom_{name}", frozenset(labels.items())]

    assert value("replies_total") == 7
    assert value("requests_total") == 5
    assert value("requests_by_total", op="decode", code="ok") == 3
    assert value("requests_by_total", op="open", code="capacity") == 2
    assert value("own_total", op="close", code="ok") == 1
    assert value("clients") == 2
    assert value("engine_state", model="a model", state="ready") == 1
    assert value("engine_rows", model="a model") == 3
    assert value("engine_device_ms", model="a model", app="an app") == 1.5
    assert value("engine_device_ms", model="a model", app='odd "one"\\') == 2.5
    assert value("token_gap_seconds_bucket", le="0.001") == 1
    assert value("token_gap_seconds_bucket", le="0.05") == 2
    assert value("token_gap_seconds_bucket", le="+Inf") == value("token_gap_seconds_count") == 3
    assert value("token_gap_seconds_sum") == pytest.approx(99.0305)


def test_a_port_that_is_taken(loop: asyncio.AbstractEventLoop) -> None:
    page = Page(0, lambda: STATS, Timings(), loop)
    try:
        with pytest.raises(OSError, match="in use"):
            Page(page.port, lambda: STATS, Timings(), loop)
    finally:
        page.close()


def test_a_daemon_that_is_stopping_tells_nothing(loop: asyncio.AbstractEventLoop) -> None:
    ended = asyncio.new_event_loop()
    ended.close()
    page = Page(0, lambda: STATS, Timings(), ended)
    try:
        assert read(page) == {}
    finally:
        page.close()


def test_a_histogram_counts_to_its_bounds() -> None:
    histogram = Histogram(SHORT_S)
    for value in (*SHORT_S, 1e9):
        histogram.add(value)
    assert histogram.counts == [1] * (len(SHORT_S) + 1)
    assert histogram.up_to()[-1] == ("+Inf", len(SHORT_S) + 1)
    assert histogram.count == len(SHORT_S) + 1
