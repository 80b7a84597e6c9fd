"""`stateroom ps`: the sessions that the daemon holds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from stateroom.client import connect
from stateroom.client.protocol import SessionInfo
from stateroom.daemon.commands.options import COMMANDS_APP, App, AsJson, Endpoint
from stateroom.daemon.commands.terminal import age, cell, err, out, plain, size
from stateroom.daemon.shown import short

All = Annotated[bool, typer.Option("--all", help="Those of all owners, as far as they may be seen.")]


def ps(
    app: App = COMMANDS_APP, everyone: All = False, as_json: AsJson = False, endpoint: Endpoint = None
) -> None:
    """List the sessions of one owner, or of all.

    stateroom ps
    stateroom ps --all --json
    """
    with connect(endpoint, app=app) as room:
        sessions = room.list(everyone=everyone)
        others = int(room.stats().gauges["sessions"]) - len(sessions)
    if as_json:
        out.print_json(data=[asdict(session) for session in sessions])
    elif sessions:
        out.print(table(sessions, owners=everyone))
    elif everyone:
        err.print("There are no sessions.")
    else:
        elsewhere = f" Other apps have {others}: name one with --app, or see --all." if others else ""
        err.print(f"{plain(app)} has no sessions.{elsewhere}", markup=False)


def table(sessions: list[SessionInfo], *, owners: bool = False) -> Table:
    """One row a session, the most recently used first; `owners`: whose each is, too."""
    made = Table(box=None, pad_edge=False)
    for heading in (*(["OWNER"] if owners else []), "SESSION", "NAME", "MODEL", "KV", "STATE", "WAITS"):
        made.add_column(heading, no_wrap=True)
    for heading in ("TOKENS", "PRIVATE", "SHARED", "IDLE", "AGE"):
        made.add_column(heading, justify="right", no_wrap=True)
    for session in sorted(sessions, key=lambda session: session.idle_s):
        made.add_row(
            *([cell(session.owner)] if owners else []),
            short(session.session),
            cell(session.name or ""),
            cell(session.model),
            stored_as(session),
            state(session),
            session.waiting or "",
            str(session.length),
            size(session.private_bytes),
            size(session.shared_bytes),
            age(session.idle_s),
            age(session.age_s),
        )
    return made


def state(session: SessionInfo) -> str:
    """What it does; while it does nothing, where its KV is."""
    if session.quarantined is not None:
        return "quarantined"
    return session.running or (session.state if session.tier == "resident" else session.tier)


def stored_as(session: SessionInfo) -> str:
    """The scheme of its keys and values."""
    schemes = {kind.scheme for kind in session.kinds}
    return "+".join(sorted(schemes - {"dense"} or schemes))
