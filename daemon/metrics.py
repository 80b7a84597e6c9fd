"""Counters since start, for `stats`. Gauges are not kept: they are read off what they describe."""

from __future__ import annotations

from collections import Counter

from stateroom.daemon.timings import Timings


class Metrics:
    """Counters by name, as docs/protocol.md lists them; a name appears once it has counted something.

    Attributes:
        timings: how long clients wait.
    """

    def __init__(self) -> None:
        self.timings = Timings()
        self._counters: Counter[str] = Counter(
            dict.fromkeys(
                (
                    "requests",
                    "replies",
                    "tokens_decoded",
                    "tokens_prefilled",
                    "tokens_reused",
                    "sessions_opened",
                    "sessions_closed",
                    "sessions_expired",
                    "clients_seen",
                    "clients_vanished",
                    "clients_expelled",
                    "streams_cut",
                    "requests_dropped",
                    "frames_refused",
                    "engine_starts",
                    "engine_deaths",
                ),
                0,
            )
        )

    def count(self, name: str, by: int = 1) -> None:
        self._counters[name] += by

    def request(self, op: str, code: str) -> None:
        """One request ended; `code` is `ok` or an error code."""
        self._counters["requests"] += 1
        self._counters[f"requests.{op}.{code}"] += 1

    def counters(self) -> dict[str, int]:
        return dict(self._counters)
