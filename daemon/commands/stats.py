"""`stateroom stats`: what the daemon has done since its start, and what it holds now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from stateroom.client import connect
from stateroom.client.protocol import StatsResult
from stateroom.daemon.commands.options import COMMANDS_APP, AsJson, Endpoint
from stateroom.daemon.commands.terminal import age, cell, out, size

# Figures by what they are of, in the order in which they are shown. Behind a name, those that it consists of;
# a counter's own parts (`requests.decode.ok`) are known by their names.
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "daemon": {
        "uptime_s": (),
        "cpu_s": (),
        "rss_bytes": ("rss_peak_bytes",),
        "clients": ("clients_seen", "clients_vanished", "clients_expelled"),
        "messages_received": ("bytes_received",),
        "messages_sent": ("bytes_sent",),
        "log_lines_dropped": ("log_lines_withheld",),
    },
    "requests": {
        "requests_open": ("running", "queued", "watchers"),
        "requests": (),
        "own": (),
        "replies": (),
        "requests_resumed": (),
        "requests_dropped": ("frames_refused", "streams_cut"),
    },
    "tokens": {"tokens_decoded": (), "tokens_prefilled": (), "tokens_reused": (), "receipts": ()},
    "sessions": {
        "sessions": ("sessions_resident", "sessions_disk", "sessions_tokens", "quarantined"),
        "tokens": (),
        "published": (),
        "sessions_opened": ("sessions_closed", "sessions_expired"),
        "sessions_recovered": ("sessions_quarantined",),
        "moved": (),
        "evicted": (),
        "verified": ("verify_failed",),
    },
    "memory": {
        "kv_budget_bytes": ("kv_granted_bytes", "kv_held_bytes"),
        "kv_private_bytes": ("kv_shared_bytes",),
        "trunks": ("trunk_bytes",),
        "memory_bytes": ("memory_pressure",),
    },
    "disk": {
        "snapshots": ("snapshot_bytes",),
        "snapshots_automatic": ("snapshot_automatic_bytes",),
        "journal_pending": ("journal_lag_s", "journal_failures"),
    },
    "engines": {"engines_ready": (), "engine_starts": ("engine_deaths",)},
}
OTHERS = "others"
HIDDEN = ("id", "state", "facts", "gauges", "failure")  # of a model, what is told elsewhere


@dataclass(frozen=True)
class Line:
    """A figure, and what it consists of."""

    name: str
    figure: str
    parts: str = ""


def stats(as_json: AsJson = False, endpoint: Endpoint = None) -> None:
    """Show what was counted since the start, what is held now, and each engine's figures.

    stateroom stats
    stateroom stats --json
    """
    with connect(endpoint, app=COMMANDS_APP) as room:
        result = room.stats()
    if as_json:
        out.print_json(data=asdict(result))
        return
    for title, lines in grouped(result):
        out.print(f"[bold]{title}[/bold]")
        out.print(_table(lines))
    for model in result.models:
        failure = f": {model['failure']}" if model.get("failure") else ""
        out.print(f"[bold]{cell(model['id'])}[/bold] is {cell(model['state'] + failure)}")
        out.print(_table(list(of_model(model))))


def _table(lines: list[Line]) -> Table:
    made = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    made.add_column(min_width=18)
    made.add_column(justify="right", no_wrap=True, min_width=10)
    made.add_column(style="dim")
    for line in lines:
        made.add_row(f"  {cell(line.name)}", cell(line.figure), cell(line.parts))
    return made


def grouped(stats: StatsResult) -> list[tuple[str, list[Line]]]:
    """All counters and gauges: by group, those without one at the end. Parts that are 0 are left out."""
    figures: dict[str, float] = {**stats.gauges, **stats.counters}
    parts = _own_parts(figures)
    made = []
    for title, names in GROUPS.items():
        lines = []
        for name, beside in names.items():
            own = parts.pop(name, {})
            there = {each: figures.pop(each) for each in beside if each in figures}
            if name in figures or own:
                value = figures.pop(name, sum(own.values()))
                shown = [f"{each} {figure(each, n)}" for each, n in {**there, **own}.items() if n]
                lines.append(Line(name, figure(name, value), ", ".join(shown)))
        made.append((title, lines))
    left = {**figures, **{f"{kind}.{rest}": n for kind, of in parts.items() for rest, n in of.items()}}
    if left:
        made.append((OTHERS, [Line(name, figure(name, value)) for name, value in sorted(left.items())]))
    return made


def _own_parts(figures: dict[str, float]) -> dict[str, dict[str, float]]:
    """Takes what has a dot in its name out, and gives it by what stands before and behind that."""
    made: dict[str, dict[str, float]] = {}
    for name in sorted(name for name in figures if "." in name):
        kind, _, rest = name.partition(".")
        made.setdefault(kind, {})[rest] = figures.pop(name)
    return made


def of_model(model: Mapping[str, Any]) -> Iterator[Line]:
    """A model's process, what it said of itself at its start, and its figures of now."""
    for told in (model, model.get("facts", {}), model.get("gauges", {})):
        for name, value in told.items():
            if name not in HIDDEN and (shown := figure(name, value)):
                yield Line(name, shown)


def figure(name: str, value: object) -> str:
    """A fact or a gauge as people read it; nothing for what is none."""
    if isinstance(value, str | bool) or name == "pid":
        return str(value)
    if not isinstance(value, int | float):
        return ""
    if name.endswith("_bytes") or (name.startswith("bytes_") and name != "bytes_per_token"):
        return size(value)
    if name.endswith("_s"):
        return age(value) if value >= 60 else f"{value:.3g} s"
    if name.partition(".")[0].endswith("_ms") or "_ms_" in name:
        return f"{value:,.3g} ms" if value < 1000 else f"{value / 1000:,.4g} s"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.6g}"
