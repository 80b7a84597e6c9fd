"""A session as `info` and `list` show it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stateroom.client.protocol import SessionInfo
from stateroom.daemon.lifecycle import SessionState

if TYPE_CHECKING:
    from stateroom.daemon.session import Session

STATES = {
    SessionState.OPENING: "running",
    SessionState.IDLE: "idle",
    SessionState.RUNNING: "running",
    SessionState.REPLACING: "running",
    SessionState.ENDING: "running",
    SessionState.CLOSING: "running",
    SessionState.CLOSED: "idle",
}


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
