"""The page that Prometheus reads: what `stats` gives, and histograms of times. On loopback, when asked for.

Threads of the library's serve it; what it tells is read on the daemon's loop, so that it is of one moment.
Any user of this machine may come: few connections are held, none for long, and one page is made at a time.
"""

from __future__ import annotations

import asyncio
import platform
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TookTooLong
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from stateroom.client.protocol import StatsResult
from stateroom.daemon.families import (
    BUILD,
    COUNTERS,
    GAUGES,
    OF_ENGINES,
    OF_MODELS,
    PREFIX,
    STATE,
    SUMS,
    Family,
    Place,
    unknown,
)
from stateroom.daemon.lifecycle import EngineState
from stateroom.daemon.timings import OF_ENGINE, Histogram, Timings

LOOPBACK = "127.0.0.1"
READ_S = 2.0  # for the loop to answer; it does within milliseconds
CONNECTIONS_MAX = 32  # more are closed at once
IDLE_S = 5.0  # for a client to send its request, or to take the answer
STATES = (*(state.value for state in EngineState), "silent")


@dataclass(frozen=True)
class Figures:
    """All that the page tells, of one moment. `engines`: the histograms of each model's worker."""

    stats: StatsResult
    timings: Timings
    engines: Mapping[str, Mapping[str, Histogram]]


class Page:
    """Serves it until closed. Raises OSError, when made, if the port is taken; 0 takes a free one.

    `read` is called on the loop.
    """

    def __init__(self, port: int, read: Callable[[], Figures], loop: asyncio.AbstractEventLoop) -> None:
        registry = CollectorRegistry()
        registry.register(_Collector(read, loop))
        app, turn = make_wsgi_app(registry), threading.Lock()

        def one_at_a_time(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            with turn:  # else each of them would take its part of the time from the loop
                pieces: Iterable[bytes] = app(environ, start_response)
                return pieces

        self._server = make_server(LOOPBACK, port, one_at_a_time, _Server, _Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.port: int = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(READ_S)


class _Handler(WSGIRequestHandler):
    timeout = IDLE_S

    def log_message(self, *told: object) -> None:
        """Nothing: what is of interest is counted by who reads the page."""


class _Server(ThreadingWSGIServer):
    """A thread for each of `CONNECTIONS_MAX` connections."""

    request_queue_size = CONNECTIONS_MAX

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._free = threading.BoundedSemaphore(CONNECTIONS_MAX)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up, or sends nothing, is no news."""


class _Collector(Collector):
    def __init__(self, read: Callable[[], Figures], loop: asyncio.AbstractEventLoop) -> None:
        self._read, self._loop = read, loop

    def describe(self) -> list[Metric]:
        return []  # the registry would ask for everything to learn the names

    def collect(self) -> Iterator[Metric]:
        told: Future[list[Metric]] = Future()

        def read() -> None:
            try:
                told.set_result(metrics(self._read()))
            except Exception as error:
                told.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(read)
            yield from told.result(READ_S)
        except (TookTooLong, RuntimeError):
            return  # the daemon is stopping: its loop runs no more, or is closed


def metrics(figures: Figures) -> list[Metric]:
    """Of all figures."""
    made = _Samples()
    stats = figures.stats
    for name, value in stats.counters.items():
        kind, _, rest = name.partition(".")
        if name not in SUMS:
            place = COUNTERS.get(kind) or unknown(kind, ("what",) if rest else (), counts=True)
            made.add(place, _split(rest, len(place.family.labels)), value)
    for name, figure in stats.gauges.items():
        if name not in SUMS:
            made.add(GAUGES.get(name) or unknown(name), (), figure)
    for model in stats.models:
        _add_model(made, model)
    made.add(Place(BUILD), _versions(), 1)
    return [*made.families.values(), *_histograms(figures)]


def _add_model(made: _Samples, model: Mapping[str, Any]) -> None:
    name = model["id"]
    for state in STATES:
        made.add(Place(STATE), (name, state), state == model["state"])
    for kind, place in OF_MODELS.items():
        made.add(place, (name,), model[kind])
    for kind, figure in model["gauges"].items():
        kind, _, rest = kind.partition(".")
        place = OF_ENGINES.get(kind) or unknown(f"engine_{kind}", ("model", "what") if rest else ("model",))
        made.add(place, (name, rest)[: len(place.family.labels) - len(place.given)], figure)


def _histograms(figures: Figures) -> Iterator[Metric]:
    for name, (words, histogram) in figures.timings.by_name().items():
        made = HistogramMetricFamily(f"{PREFIX}_{name}", words)
        made.add_metric([], histogram.up_to(), histogram.total)
        yield made
    for name, words in OF_ENGINE.items():
        made = HistogramMetricFamily(f"{PREFIX}_engine_{name}", words, labels=("model",))
        for model, of_model in figures.engines.items():
            if name in of_model:
                made.add_metric([model], of_model[name].up_to(), of_model[name].total)
        yield made


class _Samples:
    """Metrics by name, with the samples that were added."""

    def __init__(self) -> None:
        self.families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}

    def add(self, place: Place, values: Sequence[str], figure: float) -> None:
        family = place.family
        known = self.families.get(family.name) or self._made(family)
        known.add_metric([*place.given, *values], figure * place.scale)

    def _made(self, family: Family) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if family.counts else GaugeMetricFamily
        name = re.sub(r"[^a-z0-9_]", "_", f"{PREFIX}_{family.name}".lower())
        made = self.families[family.name] = kind(name, family.words, labels=family.labels)
        return made


def _split(rest: str, count: int) -> list[str]:
    """What stands behind a counter's first dot, as values of so many labels; the last one has the rest."""
    values = rest.split(".")
    return [*values[: count - 1], ".".join(values[count - 1 :])] if count else []


@cache
def _versions() -> tuple[str, ...]:
    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return ""

    return of("stateroom"), of("mlx"), of("mlx-lm"), platform.python_version()
