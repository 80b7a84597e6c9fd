"""The page that Prometheus reads: what `stats` gives, and histograms of waits. On loopback, when asked for.

A thread of the library's serves it; what it tells is read on the daemon's loop, so that it is of one moment.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TookTooLong
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from stateroom.client.protocol import StatsResult
from stateroom.daemon.timings import Timings

PREFIX = "stateroom"
LOOPBACK = "127.0.0.1"
READ_S = 2.0  # for the loop to answer; it does within milliseconds

# Counters whose names hold what others have as labels: `requests.decode.ok`.
LABELLED = {
    "requests": ("Requests that ended, by operation and outcome.", ("op", "code")),
    "own": ("The daemon's own requests that ended.", ("op", "code")),
    "moved": ("Sessions whose KV moved, by where it is now.", ("tier",)),
}


class Page:
    """Serves it until closed. Raises OSError, when made, if the port is taken; 0 takes a free one."""

    def __init__(
        self,
        port: int,
        stats: Callable[[], StatsResult],
        timings: Timings,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        registry = CollectorRegistry()
        registry.register(_Collector(stats, timings, loop))
        self._server, self._thread = start_http_server(port, LOOPBACK, registry)
        self.port: int = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(READ_S)


class _Collector(Collector):
    def __init__(
        self, stats: Callable[[], StatsResult], timings: Timings, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._stats, self._timings, self._loop = stats, timings, loop

    def describe(self) -> list[Metric]:
        return []  # the registry would ask for everything to learn the names

    def collect(self) -> Iterator[Metric]:
        told: Future[list[Metric]] = Future()

        def read() -> None:
            try:
                told.set_result([*of_stats(self._stats()), *of_timings(self._timings)])
            except Exception as error:
                told.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(read)
            yield from told.result(READ_S)
        except (TookTooLong, RuntimeError):
            return  # the daemon is stopping: its loop runs no more, or is closed


def of_stats(stats: StatsResult) -> Iterator[Metric]:
    """Counters, gauges, and each engine's state and figures."""
    labelled: dict[str, CounterMetricFamily] = {}
    for name, value in stats.counters.items():
        kind, *rest = name.split(".")
        if rest:
            words, labels = LABELLED.get(kind, (f"{kind}, by what.", ("what",)))
            if kind not in labelled:
                labelled[kind] = CounterMetricFamily(
                    _name(kind, "by" if kind == "requests" else ""), words, labels=labels
                )
            labelled[kind].add_metric(_fitted(rest, len(labels)), value)
        else:
            yield CounterMetricFamily(_name(name), f"`{name}` of stats.", value=value)
    yield from labelled.values()
    for name, figure in stats.gauges.items():
        yield GaugeMetricFamily(_name(name), f"`{name}` of stats.", value=figure)
    yield from _of_engines(stats.models)


def _of_engines(models: list[dict[str, Any]]) -> Iterator[Metric]:
    made: dict[str, Metric] = {}

    def family(name: str, words: str, *labels: str) -> GaugeMetricFamily:
        return made.setdefault(
            name, GaugeMetricFamily(_name("engine", name), words, labels=("model", *labels))
        )  # type: ignore[return-value]

    for model in models:
        family("state", "1 for the state that it is in.", "state").add_metric(
            [model["id"], model["state"]], 1
        )
        for name in ("starts", "deaths"):
            family(name, f"`{name}` of a model of stats.").add_metric([model["id"]], model[name])
        for name, figure in model["gauges"].items():
            kind, _, app = name.partition(".")
            labels = ("app",) if app else ()
            family(kind, f"`{kind}` of a model's gauges.", *labels).add_metric(
                [model["id"], *([app] if app else [])], figure
            )
    yield from made.values()


def of_timings(timings: Timings) -> Iterator[Metric]:
    for name, (words, histogram) in timings.by_name().items():
        made = HistogramMetricFamily(_name(name), words)
        made.add_metric([], histogram.up_to(), histogram.total)
        yield made


def _name(*words: str) -> str:
    return re.sub(r"[^a-z0-9_]", "_", "_".join((PREFIX, *(word for word in words if word))).lower())


def _fitted(values: list[str], count: int) -> list[str]:
    """As many as there are labels: the last one has the rest."""
    return [*values[: count - 1], ".".join(values[count - 1 :])]
