"""`stateroom ps` and `stateroom stats`: what the daemon holds, and what it has done."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from stateroom.client import connect
from stateroom.client.protocol import SessionInfo
from stateroom.daemon.commands.options import COMMANDS_APP, App, AsJson, Endpoint
from stateroom.daemon.commands.terminal import age, err, out, plain, size

ID_SHOWN = 8  # characters of an id that the table has room for; --json has all of it


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
        out.print_json(json.dumps([asdict(session) for session in sessions]))
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
            *([escape(plain(session.owner))] if owners else []),
            session.session[:ID_SHOWN],
            escape(session.name or ""),
            escape(session.model),
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


def stats(as_json: AsJson = False, endpoint: Endpoint = None) -> None:
    """Show counters since the start, gauges of now, and the models."""
    with connect(endpoint, app=COMMANDS_APP) as room:
        result = room.stats()
    if as_json:
        out.print_json(json.dumps(asdict(result)))
        return
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(justify="left")
    made.add_column(justify="right")
    for name, count in sorted(result.counters.items()):
        made.add_row(name, f"{count:,}")
    for name, gauge in sorted(result.gauges.items()):
        made.add_row(name, figure(name, gauge))
    out.print(made)
    for model in result.models:
        out.print(f"\n[bold]{escape(model['id'])}[/bold] is {model['state']}")
        told = {**model, **model.get("facts", {}), **model.get("gauges", {})}
        parts = (
            f"{name} {figure(name, value)}" for name, value in told.items() if name not in ("id", "state")
        )
        out.print(", ".join(part for part in parts if not part.endswith(" ")), markup=False)


def figure(name: str, value: object) -> str:
    """A fact or a gauge as people read it; nothing for what is none."""
    if isinstance(value, str | bool) or name == "pid":
        return str(value)
    if not isinstance(value, int | float):
        return ""
    if name.endswith("_bytes"):
        return size(value)
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.6g}"
