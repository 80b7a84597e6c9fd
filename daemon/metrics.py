"""Counters since start, for `stats`. Gauges are not kept: they are read off what they describe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from stateroom.client.protocol import Receipt
from stateroom.daemon.timings import Timings

# From where a session that an engine had goes, and why its KV is on the device no more: what its worker says
# (`link.Left`), and what the broker knows.
REASONS = (
    "memory", "budget", "asked", "failed", "content", "pressure", "unused", "unloaded", "lost", "stopped",
)  # fmt: skip
TIERS = ("resident", "disk", "tokens")
SOURCES = ("session", "fork", "shared", "snapshot", "none")  # of a receipt

NAMES = (
    "requests",
    "replies",
    "messages_received",
    "bytes_received",
    "messages_sent",
    "bytes_sent",
    "tokens_decoded",
    "tokens_prefilled",
    "tokens_reused",
    *(f"tokens_reused.{source}" for source in SOURCES[:-1]),
    *(f"receipts.{source}" for source in SOURCES),
    "sessions_opened",
    "sessions_closed",
    "sessions_expired",
    "sessions_recovered",
    "sessions_quarantined",
    *(f"moved.{tier}" for tier in TIERS),
    *(f"evicted.{reason}" for reason in REASONS),
    "clients_seen",
    "clients_vanished",
    "clients_expelled",
    "streams_cut",
    "requests_resumed",
    "requests_dropped",
    "frames_refused",
    "verified",
    "verify_failed",
    "engine_starts",
    "engine_deaths",
    "log_lines_dropped",
    "log_lines_withheld",
)


class Metrics:
    """Counters by name, as docs/protocol.md lists them; `requests.<op>.<code>` once there was one.

    Attributes:
        timings: how long things take.
        others: what is counted elsewhere, by name.
    """

    def __init__(self) -> None:
        self.timings = Timings()
        self.others: list[Callable[[], dict[str, int]]] = []
        self._counters: Counter[str] = Counter(dict.fromkeys(NAMES, 0))

    def count(self, name: str, by: int = 1) -> None:
        self._counters[name] += by

    def request(self, op: str, code: str) -> None:
        """One request ended; `code` is `ok` or an error code."""
        self._counters["requests"] += 1
        self._counters[f"requests.{op}.{code}"] += 1

    def receipt(self, receipt: Receipt) -> None:
        self._counters["tokens_prefilled"] += receipt.prefilled
        self._counters["tokens_reused"] += receipt.reused
        self._counters[f"receipts.{receipt.source}"] += 1
        if receipt.reused:
            self._counters[f"tokens_reused.{receipt.source}"] += receipt.reused

    def counters(self) -> dict[str, int]:
        made = dict(self._counters)
        for others in self.others:
            made |= others()
        return made
