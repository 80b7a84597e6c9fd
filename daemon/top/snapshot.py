"""What one look at the daemon brought. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from stateroom.client.protocol import RequestInfo, SessionInfo, StatsResult


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Times are of one clock that only goes forward, in seconds.

    Attributes:
        at_s: when the stats and requests were read.
        sessions_at_s: when the sessions were, which are read less often where they are many.
        every_s, sessions_every_s: how often each is read now.
    """

    endpoint: str
    version: str
    at_s: float
    stats: StatsResult
    sessions_at_s: float
    every_s: float = 1.0
    sessions_every_s: float = 1.0
    sessions: list[SessionInfo] = field(default_factory=list)
    requests: list[RequestInfo] = field(default_factory=list)
