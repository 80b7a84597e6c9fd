"""Tokens a second, from what daemon and engines count. Pure: each look at the daemon is told to it once."""

from __future__ import annotations

from collections import deque
from typing import Any

from stateroom.daemon.top.snapshot import Snapshot

WINDOW_S = (
    5.0  # engines tell their counts once a second, at times known to 0.1 s: a shorter one would tremble
)
POINTS_MAX = 64  # of an engine, should the looks be many

Point = tuple[float, float, float]  # when (s), tokens decoded and prefilled until then


class Rates:
    """Attributes: sessions: tokens a second by which each grew since the look before, where it did."""

    def __init__(self) -> None:
        self.sessions: dict[str, float] = {}
        self._lengths: dict[str, int] = {}
        self._lengths_at_s = 0.0
        self._points: dict[str, deque[Point]] = {}

    def take(self, snapshot: Snapshot) -> None:
        self._take_sessions(snapshot)
        for model in snapshot.stats.models:
            self._take_engine(snapshot.at_s, model)

    def engine(self, name: str) -> tuple[float, float]:
        """Tokens a second of an engine: (decoded, prefilled), of the last few seconds."""
        points = self._points.get(name)
        if not points or points[-1][0] <= points[0][0]:
            return 0.0, 0.0
        (since, decoded, prefilled), (until, decoded_now, prefilled_now) = points[0], points[-1]
        return (decoded_now - decoded) / (until - since), (prefilled_now - prefilled) / (until - since)

    def _take_sessions(self, snapshot: Snapshot) -> None:
        passed = snapshot.sessions_at_s - self._lengths_at_s
        if passed <= 0:
            return  # the same as before
        before, self._lengths_at_s = self._lengths, snapshot.sessions_at_s
        self._lengths = {session.session: session.length for session in snapshot.sessions}
        self.sessions = {
            name: (length - before[name]) / passed
            for name, length in self._lengths.items()
            if name in before and length > before[name]
        }

    def _take_engine(self, at_s: float, model: dict[str, Any]) -> None:
        gauges, points = (
            model.get("gauges") or {},
            self._points.setdefault(model["id"], deque(maxlen=POINTS_MAX)),
        )
        point = (
            at_s - float(model.get("pulse_age_s") or 0.0),
            float(gauges.get("tokens_decoded", 0.0)),
            float(gauges.get("tokens_prefilled", 0.0)),
        )
        if points and (point[1] < points[-1][1] or point[2] < points[-1][2]):
            points.clear()  # another worker, which counts from the start
        if points and point[1:] == points[-1][1:] and point[0] - points[-1][0] < WINDOW_S / 10:
            return  # the same pulse, seen again
        points.append(point)
        while len(points) > 2 and points[1][0] <= at_s - WINDOW_S:
            points.popleft()
