"""A snapshot as it is shown: rows of sessions with their requests and rates, engines, sums. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from stateroom.client.protocol import RequestInfo, SessionInfo
from stateroom.daemon.shown import short
from stateroom.daemon.top.rates import Rates
from stateroom.daemon.top.snapshot import Snapshot
from stateroom.daemon.top.words import TIERS, short_wait

ENDED = "done"  # the state of requests that have ended


@dataclass(frozen=True, slots=True)
class Row:
    """A session. `requests`: its own, the open ones first; `per_s`: tokens a second now."""

    session: SessionInfo
    requests: tuple[RequestInfo, ...] = ()
    per_s: float = 0.0

    @property
    def id(self) -> str:
        return self.session.session

    @property
    def title(self) -> str:
        """Its name, or as much of its id as tells it from others."""
        return self.session.name or short(self.id)

    @property
    def waiting(self) -> str | None:
        return self.session.waiting

    @property
    def busy(self) -> bool:
        return self.session.running is not None or self.session.waiting is not None

    @property
    def state(self) -> str:
        """What it does or waits for, in at most 16 characters."""
        if self.waiting is not None:
            return short_wait(self.waiting)
        if self.session.quarantined is not None:
            return "quarantined"
        if self.session.running is None:
            return "idle"
        at_work = next((each for each in self.requests if each.state == "running"), None)
        if at_work is None or not at_work.total:
            return self.session.running
        return f"{self.session.running} {100 * at_work.done // at_work.total}%"


@dataclass(frozen=True, slots=True)
class Engine:
    """A model's worker. Rates in tokens a second; `queue`: its requests that wait for something."""

    id: str
    state: str
    rows: int = 0
    decode_per_s: float = 0.0
    prefill_per_s: float = 0.0
    step_ms: float = 0.0
    queue: int = 0
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class Tier:
    """Sessions whose KV is in one place, and how much that is: bytes, or tokens where there is no KV."""

    sessions: int = 0
    amount: int = 0


@dataclass(frozen=True, slots=True)
class Board:
    """All that a frame needs but for the reader's choices. `owner`: whose sessions alone are rows."""

    snapshot: Snapshot
    rows: list[Row] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    tiers: dict[str, Tier] = field(default_factory=dict)
    owner: str | None = None

    def row(self, session: str | None) -> Row | None:
        return next((row for row in self.rows if row.id == session), None)


def board(snapshot: Snapshot, rates: Rates, owner: str | None = None) -> Board:
    of_session: defaultdict[str | None, list[RequestInfo]] = defaultdict(list)
    queues: defaultdict[str | None, int] = defaultdict(int)
    for request in snapshot.requests:
        of_session[request.session].append(request)
        queues[request.model] += request.state != ENDED and request.waiting is not None
    rows = [
        Row(session, tuple(own), _per_s(own, rates.sessions.get(session.session, 0.0)))
        for session in snapshot.sessions
        if owner is None or session.owner == owner
        for own in (of_session.get(session.session, []),)
    ]
    engines = [_engine(model, rates, queues[model["id"]]) for model in snapshot.stats.models]
    return Board(snapshot, rows, engines, _tiers(snapshot), owner)


def _per_s(requests: list[RequestInfo], grew: float) -> float:
    """A stream's own word, unless it waits; else by how much the session grew."""
    moving = (each for each in requests if each.state == "running" and each.waiting is None)
    return sum(each.tokens_per_s for each in moving) or grew


def _engine(model: dict[str, Any], rates: Rates, queue: int) -> Engine:
    gauges = model.get("gauges") or {}
    decode, prefill = rates.engine(model["id"])
    ready = model["state"] == "ready"
    return Engine(
        id=model["id"],
        state=model["state"],
        rows=int(gauges.get("rows", 0)),
        decode_per_s=decode if ready else 0.0,
        prefill_per_s=prefill if ready else 0.0,
        step_ms=float(gauges.get("step_ms", 0.0)),
        queue=queue,
        trouble=None if ready else model.get("failure"),
    )


def _tiers(snapshot: Snapshot) -> dict[str, Tier]:
    """By where KV is. What several share on the device counts once there."""
    gauges, sessions = snapshot.stats.gauges, snapshot.sessions
    amounts = {
        "resident": int(gauges.get("kv_private_bytes", 0) + gauges.get("kv_shared_bytes", 0)),
        "disk": sum(session.disk_bytes for session in sessions if session.tier == "disk"),
        "tokens": sum(session.length for session in sessions if session.tier == "tokens"),
    }
    return {tier: Tier(int(gauges.get(f"sessions_{tier}", 0)), amounts[tier]) for tier in TIERS}


# ---------------------------------------------------------------- order and choice


def _rest(row: Row) -> int:
    """0: it runs; 1: it waits; 2: it has nothing to do."""
    return 2 if not row.busy else row.waiting is not None


# Each with the order that is asked for most: what is large first, names from A on.
SORTS: dict[str, Callable[[Row], Any]] = {
    "activity": lambda row: (_rest(row), row.session.idle_s, row.session.owner.lower(), row.title.lower()),
    "session": lambda row: row.title.lower(),
    "owner": lambda row: (row.session.owner.lower(), row.title.lower()),
    "length": lambda row: -row.session.length,
    "private": lambda row: -row.session.private_bytes,
    "shared": lambda row: -row.session.shared_bytes,
    "tok/s": lambda row: -row.per_s,
    "idle": lambda row: -row.session.idle_s,
}
ORDERS = tuple(SORTS)


def arranged(rows: Iterable[Row], sort: str, reverse: bool, words: str) -> list[Row]:
    """Those in which all `words` occur, in order; equals by their ids, so that rows stay put."""
    wanted = words.lower().split()
    key = SORTS[sort]
    chosen = [row for row in rows if not wanted or _has(row, wanted)]
    chosen.sort(key=lambda row: (key(row), row.id))
    if reverse:
        chosen.reverse()
    return chosen


def _has(row: Row, words: list[str]) -> bool:
    session = row.session
    told = (
        session.name or "", session.session, session.owner, session.model, session.session_class,
        TIERS.get(session.tier, session.tier), row.state,
    )  # fmt: skip
    text = "\n".join(told).lower()
    return all(word in text for word in words)
