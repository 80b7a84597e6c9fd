"""The metrics of the page for Prometheus: names, labels, what each is; and the figures that they show.

Names are those of Prometheus' conventions: a prefix, base units (seconds, bytes), `_total` behind what only
grows, and labels where a sum over them makes sense; what is such a sum isn't shown beside its parts. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PREFIX = "stateroom"


@dataclass(frozen=True)
class Family:
    """One metric. `name`: without prefix and `_total`. `counts`: it only grows while its process lives."""

    name: str
    words: str
    labels: tuple[str, ...] = ()
    counts: bool = False

    @property
    def shown(self) -> str:
        """Its name on the page."""
        return f"{PREFIX}_{self.name}{'_total' if self.counts else ''}"


@dataclass(frozen=True)
class Place:
    """Where a figure stands: the values of the first labels of its family, and what it is multiplied with."""

    family: Family
    given: tuple[str, ...] = ()
    scale: float = 1.0


def _counter(name: str, words: str, *labels: str) -> Place:
    return Place(Family(name, words, labels, counts=True))


def _gauge(name: str, words: str, *labels: str) -> Place:
    return Place(Family(name, words, labels))


def _of_engine(name: str, words: str, *labels: str, counts: bool = False, scale: float = 1.0) -> Place:
    return Place(Family(f"engine_{name}", words, ("model", *labels), counts), scale=scale)


_REQUESTS = Family("requests_open", "Requests that are open, by what they do.", ("state",))
_SESSIONS = Family("sessions", "Sessions, by where their KV is; of `tokens` there is no KV.", ("tier",))
_KV = Family("kv_bytes", "KV and where it is; each byte that sessions share once.", ("tier", "part"))
_SNAPSHOTS = Family("snapshots", "Snapshots on disk, by who wanted them.", ("kind",))
_CPU = Family("process_cpu_seconds", "CPU time that a process took.", ("process", "model"), counts=True)
_MEMORY = Family("process_resident_memory_bytes", "Memory of a process.", ("process", "model"))
_PEAK = Family("process_peak_memory_bytes", "Memory of a process when it had the most.", ("process", "model"))

# Of `counters`, by what stands before a dot; what stands behind it are values of labels.
COUNTERS = {
    "requests": _counter("requests", "Requests that ended, by operation and outcome.", "op", "code"),
    "own": _counter("own_requests", "The daemon's own requests that ended.", "op", "code"),
    "replies": _counter("replies", "Replies that were sent or kept to be sent."),
    "messages_received": _counter("messages_received", "Messages of clients."),
    "bytes_received": _counter("received_bytes", "Content of messages of clients."),
    "messages_sent": _counter("messages_sent", "Messages to clients."),
    "bytes_sent": _counter("sent_bytes", "Content of messages to clients."),
    "tokens_decoded": _counter("tokens_decoded", "Tokens drawn, of requests that ended."),
    "tokens_prefilled": _counter("tokens_prefilled", "Tokens computed, of requests that ended."),
    "tokens_reused": _counter(
        "tokens_reused", "Tokens whose KV was there already, by where it came from.", "source"
    ),
    "receipts": _counter("receipts", "Receipts, by what was reused.", "source"),
    "sessions_opened": _counter("sessions_opened", "Sessions that were opened or forked."),
    "sessions_closed": _counter("sessions_closed", "Sessions that were closed, also by their time."),
    "sessions_expired": _counter("sessions_expired", "Sessions that their time closed."),
    "sessions_recovered": _counter(
        "sessions_recovered", "Sessions that went on in the next engine after theirs had died."
    ),
    "sessions_quarantined": _counter("sessions_quarantined", "Sessions whose input killed engines."),
    "moved": _counter("session_moves", "Moves of a session's KV, by where it was then.", "tier"),
    "evicted": _counter("evictions", "Sessions whose KV left the device, by why.", "reason"),
    "clients_seen": _counter("clients_seen", "Connections."),
    "clients_vanished": _counter("clients_vanished", "Connections that ended."),
    "clients_expelled": _counter("clients_expelled", "Connections that the daemon ended."),
    "streams_cut": _counter("streams_cut", "Streams of clients that did not read."),
    "requests_resumed": _counter("requests_resumed", "Requests that went to the next engine after a death."),
    "requests_dropped": _counter("requests_dropped", "Requests of clients that read nothing any more."),
    "frames_refused": _counter("frames_refused", "Messages that were no requests."),
    "verified": _counter("verified", "Sessions that were verified."),
    "verify_failed": _counter("verify_failed", "Sessions that differed by more than healthy ones do."),
    "log_lines_dropped": _counter("log_lines_dropped", "Lines of the log that could not be written."),
    "log_lines_withheld": _counter("log_lines_withheld", "Lines of the log about refusals, of too many."),
}
GAUGES = {
    "uptime_s": _gauge("uptime_seconds", "Since the daemon's start."),
    "clients": _gauge("clients", "Connections now."),
    "running": Place(_REQUESTS, ("running",)),
    "queued": Place(_REQUESTS, ("queued",)),
    "watchers": Place(_REQUESTS, ("watch",)),
    "sessions_resident": Place(_SESSIONS, ("resident",)),
    "sessions_disk": Place(_SESSIONS, ("disk",)),
    "sessions_tokens": Place(_SESSIONS, ("tokens",)),
    "quarantined": _gauge("sessions_in_quarantine", "Sessions in which nothing runs."),
    "tokens": _gauge("session_tokens", "Tokens of all sessions."),
    "published": _gauge("published", "Trunks that are published."),
    "kv_private_bytes": Place(_KV, ("resident", "private")),
    "kv_shared_bytes": Place(_KV, ("resident", "shared")),
    "snapshot_bytes": Place(_KV, ("disk", "named")),
    "snapshot_automatic_bytes": Place(_KV, ("disk", "automatic")),
    "snapshots": Place(_SNAPSHOTS, ("named",)),
    "snapshots_automatic": Place(_SNAPSHOTS, ("automatic",)),
    "trunks": _gauge("trunks", "Runs of tokens that are or were shared."),
    "trunk_bytes": _gauge("trunk_bytes", "Their KV."),
    "engines_ready": _gauge("engines_ready", "Engines that are ready."),
    "memory_bytes": _gauge("memory_bytes", "Memory of the machine, or of its container."),
    "memory_pressure": _gauge("memory_pressure", "How short of memory it is: 0 not, 1 warn, 2 critical."),
    "kv_budget_bytes": _gauge("kv_budget_bytes", "KV that all sessions may take."),
    "kv_granted_bytes": _gauge("kv_granted_bytes", "What the engines were given of it."),
    "kv_held_bytes": _gauge("kv_held_bytes", "What they said last that they hold."),
    "journal_pending": _gauge("journal_pending", "Records that are not in the catalog on disk yet."),
    "journal_lag_s": _gauge("journal_lag_seconds", "For how long the first of them isn't."),
    "journal_failures": _counter("journal_failures", "Times that they could not be written."),
    "cpu_s": Place(_CPU, ("daemon", "")),
    "rss_bytes": Place(_MEMORY, ("daemon", "")),
    "rss_peak_bytes": Place(_PEAK, ("daemon", "")),
}
# Of a model's `gauges`: the values are those given, then its id, then what stands behind a dot.
OF_ENGINES = {
    "sessions": _of_engine("sessions", "Sessions that the engine knows."),
    "rows": _of_engine("rows", "Streams that decode."),
    "parked": _of_engine("waiting_streams", "Streams that wait for a place."),
    "waiting_fills": _of_engine("waiting_fills", "Prefills that are not done."),
    "waiting_for_memory": _of_engine("waiting_for_memory", "Requests that wait for room for their KV."),
    "kv_bytes": _of_engine("kv_bytes", "KV that it holds."),
    "kv_busy_bytes": _of_engine("kv_busy_bytes", "KV in use, which gives way to nothing."),
    "kv_budget_bytes": _of_engine("kv_budget_bytes", "KV that it may hold."),
    "mlx_active_bytes": _of_engine("mlx_active_bytes", "Memory that mlx uses."),
    "mlx_cache_bytes": _of_engine("mlx_cache_bytes", "Memory that mlx keeps to use it again."),
    "wired_limit_bytes": _of_engine("wired_limit_bytes", "The most that it may keep wired."),
    "cache_limit_bytes": _of_engine("cache_limit_bytes", "The most that mlx may keep to use it again."),
    "memory_limit_bytes": _of_engine("memory_limit_bytes", "The most that mlx may use before it waits."),
    "demoted": _of_engine("demotions", "Sessions that gave way to others.", counts=True),
    "unconserved": _of_engine("unconserved", "Times that its books of KV were wrong: a bug.", counts=True),
    "tokens_decoded": _of_engine("tokens_decoded", "Tokens drawn.", counts=True),
    "tokens_prefilled": _of_engine("tokens_prefilled", "Tokens computed.", counts=True),
    "steps": _of_engine("steps", "Decode steps of batches.", counts=True),
    "step_ms": _of_engine("expected_step_seconds", "What it expects of a step.", scale=1e-3),
    "prefill_ms_per_token": _of_engine(
        "expected_token_seconds", "What it expects of a token of a prefill.", scale=1e-3
    ),
    "prefill_ms_per_pass": _of_engine(
        "expected_pass_seconds", "What it expects of a pass, beside its tokens.", scale=1e-3
    ),
    "device_ms": _of_engine(
        "device_seconds",
        "Time that an app had of the device; of those that had the most.",
        "app",
        counts=True,
        scale=1e-3,
    ),
    "cpu_s": Place(_CPU, ("engine",)),
    "rss_bytes": Place(_MEMORY, ("engine",)),
    "rss_peak_bytes": Place(_PEAK, ("engine",)),
}
# Of a model itself.
OF_MODELS = {
    "starts": _of_engine("starts", "Workers that were started.", counts=True),
    "deaths": _of_engine("deaths", "Workers that died.", counts=True),
}
STATE = Family("engine_state", "1 for the state that an engine is in, 0 for the others.", ("model", "state"))
BUILD = Family("build_info", "1; the versions are labels.", ("version", "mlx", "mlx_lm", "python"))
# Figures that the samples of others come to.
SUMS = ("requests", "tokens_reused", "engine_starts", "engine_deaths", "requests_open", "sessions")


def families() -> Iterator[Family]:
    """All of them but the histograms, each once."""
    seen: set[str] = set()
    for place in (*COUNTERS.values(), *GAUGES.values(), *OF_ENGINES.values(), *OF_MODELS.values()):
        if place.family.name not in seen:
            seen.add(place.family.name)
            yield place.family
    yield STATE
    yield BUILD


def unknown(name: str, labels: tuple[str, ...] = (), counts: bool = False) -> Place:
    """Of a figure that isn't here."""
    return Place(Family(name, f"`{name}`.", labels, counts))
