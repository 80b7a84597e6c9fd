"""Snapshots as a daemon would give them, and a source that gives them one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stateroom.client.protocol import RequestInfo, SessionInfo, StatsResult
from stateroom.daemon.top.snapshot import Snapshot
from stateroom.daemon.top.view import Act

MIB = 2**20


def session(label: str, /, **more: Any) -> SessionInfo:
    told: dict[str, Any] = {
        "session": f"{label}-0123456789abcdef",
        "name": label,
        "owner": "editor",
        "model": "tiny",
        "length": 1_000,
        "private_bytes": 3 * MIB,
        "idle_s": 12.0,
    }
    return SessionInfo(**(told | more))


def model(name: str = "tiny", state: str = "ready", **gauges: float) -> dict[str, Any]:
    told = {"rows": 2, "step_ms": 11.9, "tokens_decoded": 0, "tokens_prefilled": 0}
    return {"id": name, "state": state, "failure": None, "pulse_age_s": 0.0, "gauges": told | gauges}


def stats(*models: dict[str, Any], **gauges: float) -> StatsResult:
    told: dict[str, float] = {
        "uptime_s": 11_520.0,
        "clients": 5,
        "sessions": 3,
        "sessions_resident": 2,
        "sessions_disk": 1,
        "sessions_tokens": 0,
        "requests_open": 2,
        "queued": 1,
        "kv_private_bytes": 9 * MIB,
        "kv_shared_bytes": MIB,
        "kv_budget_bytes": 40 * MIB,
        "kv_granted_bytes": 20 * MIB,
        "kv_held_bytes": 10 * MIB,
        "memory_pressure": 0,
    }
    return StatsResult(counters={}, gauges=told | gauges, models=list(models) or [model()])


def snapshot(
    *sessions: SessionInfo,
    at_s: float = 100.0,
    requests: Iterable[RequestInfo] = (),
    stats: StatsResult = stats(),  # noqa: B008  (it is frozen)
    **more: Any,
) -> Snapshot:
    told: dict[str, Any] = {"sessions_at_s": at_s, "every_s": 1.0, "sessions_every_s": 1.0} | more
    return Snapshot(
        endpoint="ipc:///run/stateroom.sock",
        version="0.1.0",
        at_s=at_s,
        stats=stats,
        sessions=list(sessions),
        requests=list(requests),
        **told,
    )


class Scripted:
    """Gives what it was given, the last one again and again; raises what is an exception.

    Attributes: acts: what it was told to do, with the session's name; `answer`: what it says to that.
    """

    def __init__(self, *looks: Snapshot | Exception) -> None:
        self.looks = list(looks)
        self.acts: list[tuple[Act, str | None]] = []
        self.answer: str | Exception = "Done."
        self.closed = False

    async def look(self) -> Snapshot:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, Exception):
            raise look
        return look

    async def act(self, act: Act, session: SessionInfo) -> str:
        self.acts.append((act, session.name))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def close(self) -> None:
        self.closed = True
