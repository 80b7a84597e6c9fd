"""Sessions as `info` and `list` show them, and requests as `requests` does. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from stateroom.client.protocol import RequestInfo, SessionInfo, Waiting
from stateroom.daemon.lifecycle import RequestState, SessionState

if TYPE_CHECKING:
    from stateroom.daemon.session import Session
    from stateroom.daemon.tickets import Ticket

ID_SHOWN = 8  # characters of a session's id: enough to follow it, too few to use it

STATES = {
    SessionState.OPENING: "running",
    SessionState.IDLE: "idle",
    SessionState.RUNNING: "running",
    SessionState.REPLACING: "running",
    SessionState.ENDING: "running",
    SessionState.CLOSING: "running",
    SessionState.CLOSED: "idle",
}
PROGRESS: dict[RequestState, Literal["queued", "running", "ending", "done"]] = {
    RequestState.HELD: "queued",
    RequestState.SENT: "running",
    RequestState.CANCELLING: "ending",
    RequestState.CUT: "ending",
    RequestState.ORPHANED: "ending",
    RequestState.DONE: "done",
}


def short(session_id: str) -> str:
    """A session's id as it stands in logs and tables."""
    return session_id[:ID_SHOWN]


def shown(session: Session, split: tuple[int, int], published: list[str], now_s: float) -> SessionInfo:
    """`split`: bytes of its KV that it alone has, and that others have too."""
    return SessionInfo(
        session=session.id,
        name=session.name,
        owner=session.owner,
        model=session.model,
        session_class=session.session_class,
        length=session.length,
        state=STATES[session.state],
        tier=session.tier,
        kinds=session.kinds,
        private_bytes=split[0],
        shared_bytes=split[1],
        live_bytes=session.live_bytes,
        capacity_bytes=session.capacity_bytes,
        disk_bytes=session.snapshot_bytes,
        trim_floor=session.trim_floor,
        checkpoints=list(session.checkpoints),
        age_s=now_s - session.created_s,
        idle_s=now_s - session.used_s if session.running is None else 0.0,
        ttl_s=session.ttl_s,
        expires_in_s=session.expires_in_s(now_s),
        quarantined=session.quarantined,
        parents=list(session.parents),
        published=published,
        trunk=session.trunk,
        running=session.running_op,
    )


def plain(
    session: Session, split: tuple[int, int], published: list[str], now_s: float, kinds: Any
) -> dict[str, Any]:
    """The same in wire form, without what is None. `kinds`: in wire form, since many sessions share them."""
    made: dict[str, Any] = {
        "session": session.id,
        "owner": session.owner,
        "model": session.model,
        "class": session.session_class,
        "length": len(session.tokens),
        "state": "idle" if session.state is SessionState.IDLE else STATES[session.state],
        "tier": session.tier,
        "kinds": kinds,
        "private_bytes": split[0],
        "shared_bytes": split[1],
        "live_bytes": session.live_bytes,
        "capacity_bytes": session.capacity_bytes,
        "disk_bytes": session.snapshot_bytes,
        "trim_floor": session.trim_floor,
        "checkpoints": session.checkpoints,
        "age_s": now_s - session.created_s,
        "idle_s": now_s - session.used_s if session.running is None else 0.0,
        "parents": session.parents,
        "published": published,
    }
    if session.name is not None:
        made["name"] = session.name
    if session.ttl_s is not None:
        made["ttl_s"], made["expires_in_s"] = session.ttl_s, session.expires_in_s(now_s)
    if session.quarantined is not None:
        made["quarantined"] = session.quarantined
    if session.trunk is not None:
        made["trunk"] = session.trunk
    if session.running_op is not None:
        made["running"] = session.running_op
    return made


def request_shown(ticket: Ticket, now_s: float, waiting: Waiting | None = None) -> RequestInfo:
    """A request that hasn't ended, or is just ending."""
    session = ticket.session
    return RequestInfo(
        rid=ticket.rid,
        op=ticket.op,
        owner=ticket.owner,
        client=ticket.client or None,
        id=ticket.id,
        session=None if session is None else session.id,
        model=ticket.model or (None if session is None else session.model),
        state=PROGRESS[ticket.state],
        waiting=waiting,
        done=ticket.done,
        total=ticket.total,
        tokens_per_s=_rate(ticket, now_s) if ticket.state is RequestState.SENT else 0.0,
        age_s=now_s - ticket.started_s,
    )


def _rate(ticket: Ticket, now_s: float) -> float:
    """Tokens a second of a stream, those that came first not among them: they took the wait before."""
    if ticket.first_s is None or now_s <= ticket.first_s:
        return 0.0
    return (ticket.done - ticket.first) / (now_s - ticket.first_s)
