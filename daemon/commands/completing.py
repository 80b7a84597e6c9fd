"""What a shell offers for the values of options and arguments. Nothing, where nobody can tell in time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import typer

from stateroom.client import Room, Timeouts, connect
from stateroom.client.errors import ClientError, StateroomError
from stateroom.daemon.exits import Leave
from stateroom.daemon.models import list_installed

ASK_S = 0.5  # for the daemon's answer: somebody waits with a finger on the key
REQUESTS_MAX = 20  # that are offered
# What is offered of others' names: zsh evaluates it in double quotes, bash and fish type it as it is.
HARMLESS = re.compile(r"[\w./@][\w./:@+,=-]*")


def installed_models() -> list[str]:
    try:
        return [model.name for model in list_installed()]
    except (ClientError, Leave, OSError):
        return []


def served_models(context: typer.Context) -> list[str]:
    """Those that the daemon knows; without a daemon those that are installed."""
    return _asked(context, lambda room: [model.id for model in room.server.models]) or installed_models()


def sessions(context: typer.Context) -> list[str]:
    """By name, those without one by id."""
    return _asked(context, lambda room: [info.name or info.session for info in room.list()])


def snapshots(context: typer.Context) -> list[str]:
    return _asked(context, lambda room: [info.snapshot for info in room.snapshots()])


def apps(context: typer.Context) -> list[str]:
    return _asked(context, lambda room: {info.owner for info in room.list(everyone=True)})


def requests(context: typer.Context) -> list[str]:
    """By number, the latest of all owners."""
    found = _asked(context, lambda room: [str(info.rid) for info in room.requests(everyone=True)])
    return ["last", *sorted(found, key=int)[-REQUESTS_MAX:]]


def _asked(context: typer.Context, question: Callable[[Room], Iterable[str]]) -> list[str]:
    app = context.params.get("app") or "stateroom"
    endpoint, patience = context.params.get("endpoint"), Timeouts(call_s=ASK_S)
    try:
        with connect(endpoint, app=app, timeout_s=ASK_S, timeouts=patience) as room:
            return sorted(filter(HARMLESS.fullmatch, question(room)))
    except (ClientError, StateroomError, OSError):
        return []
