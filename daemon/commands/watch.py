"""`stateroom watch`: what happens in the daemon, a line each, as it happens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer

from stateroom.client import connect
from stateroom.client.errors import Disconnected, ShuttingDown
from stateroom.client.protocol import Event
from stateroom.daemon.commands import completing
from stateroom.daemon.commands.options import COMMANDS_APP, AsJson, Endpoint
from stateroom.daemon.commands.terminal import plain, size
from stateroom.daemon.exits import FAILED, Leave
from stateroom.daemon.shown import short

STATS_MIN_S, STATS_MAX_S = 0.1, 3600.0  # as the protocol has it

Only = Annotated[
    str | None,
    typer.Option(
        "--app",
        metavar="APP",
        help="Of sessions, those of this owner alone.",
        show_default="all owners",
        autocompletion=completing.apps,
    ),
]
Stats = Annotated[
    float | None,
    typer.Option(
        "--stats",
        metavar="SECONDS",
        min=STATS_MIN_S,
        max=STATS_MAX_S,
        help="Tell the main figures this often, too.",
        show_default="never",
    ),
]


def watch(
    only: Only = None, stats_every_s: Stats = None, as_json: AsJson = False, endpoint: Endpoint = None
) -> None:
    """Show what happens in the daemon, as it happens, until Ctrl-C.

    stateroom watch
    stateroom watch --stats 5
    stateroom watch --json | jq .event
    """
    line = in_json if as_json else in_words
    with (
        connect(endpoint, app=only or COMMANDS_APP) as room,
        room.watch(stats_every_s=stats_every_s, everyone=only is None) as events,
    ):
        try:
            for event in events:
                # A reader of a pipe gets each at once.
                typer.echo(line(event, datetime.now()))
        except (Disconnected, ShuttingDown):
            raise Leave(FAILED, "The daemon has stopped, or is stopping; start to watch again.") from None


def in_json(event: Event, now: datetime) -> str:
    """An object in one line."""
    told = {name: value for name, value in asdict(event).items() if value is not None}
    return json.dumps({"time": now.astimezone().isoformat(timespec="milliseconds"), **told})


def in_words(event: Event, now: datetime) -> str:
    """A line for people; of an event that isn't known, its name and what goes with it."""
    words = WORDS.get(event.event, _unknown)
    return plain(f"{now:%H:%M:%S}  {' '.join(words(event).split())}")


def _session(event: Event) -> str:
    owner = f" of {event.details['owner']}" if "owner" in event.details else ""
    return f"session {short(event.session or '')}{owner}"


def _moved(event: Event) -> str:
    where = {"resident": "is on the device", "disk": "is on disk", "tokens": "is tokens only"}
    tier, reason = str(event.details.get("tier")), event.details.get("reason")
    return f"{_session(event)} {where.get(tier, tier)}{f': {reason}' if reason else ''}"


def _engine(what: str) -> Callable[[Event], str]:
    def words(event: Event) -> str:
        details, parts = event.details, [f"engine {event.model} {what}"]
        if "reason" in details:
            parts.append(f": {details['reason']}")
        if details.get("sessions"):
            parts.append(f"; {_count(details['sessions'], 'session')} without KV")
        if details.get("requests"):
            goes = "goes" if details["requests"] == 1 else "go"
            parts.append(f"; {_count(details['requests'], 'request')} {goes} on")
        return "".join(parts)

    return words


def _trunk(what: str) -> Callable[[Event], str]:
    return lambda event: f"trunk {event.details.get('as')} of {event.model} {what}"


def _snapshot(what: str) -> Callable[[Event], str]:
    def words(event: Event) -> str:
        nbytes = event.details.get("bytes")
        told = "" if nbytes is None else f", {event.details.get('length')} tokens, {size(nbytes)}"
        return f"snapshot {event.details.get('snapshot')} {what}{told}"

    return words


def _pressure(event: Event) -> str:
    details = event.details
    held, budget = size(details.get("kv_bytes", 0)), size(details.get("kv_budget_bytes", 0))
    return f"memory pressure: {details.get('level')}; {held} of {budget} of KV held"


def _stats(event: Event) -> str:
    gauges, counters = event.details.get("gauges", {}), event.details.get("counters", {})
    held, budget = size(gauges.get("kv_held_bytes", 0)), size(gauges.get("kv_budget_bytes", 0))
    return (
        f"figures: {_of(gauges, 'running')} running, {_of(gauges, 'queued')} queued, "
        f"{_count(_of(gauges, 'sessions'), 'session')}, {held} of {budget} of KV; since the start "
        f"{_count(_of(counters, 'requests'), 'request')}, {_of(counters, 'tokens_decoded'):,} tokens drawn, "
        f"{_of(counters, 'tokens_prefilled'):,} computed, {_of(counters, 'tokens_reused'):,} reused"
    )


def _unknown(event: Event) -> str:
    told = {"session": event.session, "model": event.model, **event.details}
    shown = [f"{name}={value}" for name, value in told.items() if value is not None]
    return " ".join([event.event, *shown])


def _of(figures: dict[str, Any], name: str) -> int:
    return int(figures.get(name, 0))


def _count(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


WORDS: dict[str, Callable[[Event], str]] = {
    "session_opened": lambda event: f"{_session(event)} opened, on {event.model}",
    "session_closed": lambda event: f"{_session(event)} closed",
    "session_moved": _moved,
    "verify_failed": lambda event: f"{_session(event)} differs from what its tokens give: see the log",
    "engine_ready": _engine("is ready"),
    "engine_recovered": _engine("is ready again"),
    "engine_lost": _engine("is lost"),
    "engine_stopped": _engine("has stopped"),
    "engine_failed": _engine("can't be loaded"),
    "engine_silent": lambda e: f"engine {e.model} has said nothing for {e.details.get('silent_s')} s",
    "trunk_published": _trunk("published"),
    "trunk_unpublished": _trunk("is published no more"),
    "snapshot_saved": _snapshot("saved"),
    "snapshot_forgotten": _snapshot("forgotten"),
    "pressure": _pressure,
    "stats": _stats,
}
