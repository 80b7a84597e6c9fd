"""`stateroom close`, `park` and `verify`: what one does with a session that `ps` lists."""

from __future__ import annotations

from typing import Annotated

import typer

from stateroom.client import Room, Session, connect
from stateroom.client.errors import NotFound
from stateroom.client.protocol import VerifyResult
from stateroom.daemon.commands import completing
from stateroom.daemon.commands.options import COMMANDS_APP, App, Endpoint
from stateroom.daemon.commands.terminal import say, size
from stateroom.daemon.exits import FAILED, Leave

PREFIX_MIN = 4  # characters of an id that may stand for it; `ps` shows eight

Ref = Annotated[
    str,
    typer.Argument(
        metavar="SESSION", help="Its name, its id, or how that begins.", autocompletion=completing.sessions
    ),
]


def session_of(room: Room, reference: str) -> Session:
    """A session of this app by name or id, or by the beginning of an id that no other has."""
    try:
        return room.session(reference)
    except NotFound:
        if len(reference) < PREFIX_MIN:
            raise
        found = [info for info in room.list() if info.session.startswith(reference)]
        if len(found) != 1:
            raise
        return Session(room, found[0].session, found[0].name, found[0].length)


def close(session: Ref, app: App = COMMANDS_APP, endpoint: Endpoint = None) -> None:
    """End a session and free what it takes; its snapshots stay."""
    with connect(endpoint, app=app) as room:
        closed = session_of(room, session)
        freed = closed.close().freed_bytes
    say(f"Closed {shown(closed)}: {size(freed)} of KV freed.")


def park(session: Ref, app: App = COMMANDS_APP, endpoint: Endpoint = None) -> None:
    """Move a session's KV from the device to disk; the next use brings it back."""
    with connect(endpoint, app=app) as room:
        parked = session_of(room, session)
        done = parked.park()
    where = f"{size(done.bytes)} on disk" if done.tier == "disk" else "as tokens, for it had no KV"
    say(f"Parked {shown(parked)}: {where}, {size(done.freed_bytes)} freed.")


def verify(
    session: Annotated[
        str | None,
        typer.Argument(
            metavar="[SESSION]",
            help="Its name, its id, or how that begins; else the daemon picks one.",
            autocompletion=completing.sessions,
        ),
    ] = None,
    app: App = COMMANDS_APP,
    endpoint: Endpoint = None,
) -> None:
    """Compute a session again from its tokens and compare; the exit code is 1 when it differs by too much."""
    with connect(endpoint, app=app) as room:
        found = room.verify() if session is None else session_of(room, session).verify()
    if not found.healthy:
        raise Leave(FAILED, f"The session differs from its tokens computed anew: {verdict(found)}.")
    say(f"The session is what its tokens give: {verdict(found)}.")


def verdict(found: VerifyResult) -> str:
    """A verification in words."""
    if found.finish == "cancelled":
        return "it was cancelled before anything was compared"
    part = found.max_abs_logit_error / found.max_abs_logit if found.max_abs_logit else 0.0
    same = "the same" if found.argmax_agree else "another"
    return (
        f"logits differ by at most {part:.1e} of the largest ({found.bound:.0e} is allowed), {same} token "
        f"comes next, {found.length} tokens"
    )


def shown(session: Session) -> str:
    return session.name or session.id
