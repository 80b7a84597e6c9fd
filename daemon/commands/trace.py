"""`stateroom trace`: where the time of a request went."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from stateroom.client import connect
from stateroom.client.protocol import RequestInfo
from stateroom.client.room import Room
from stateroom.daemon.chrome import events
from stateroom.daemon.commands import completing
from stateroom.daemon.commands.options import COMMANDS_APP, AsJson, Endpoint
from stateroom.daemon.commands.terminal import age, cell, err, out, plain, say
from stateroom.daemon.exits import CONFIG, FAILED, Leave
from stateroom.daemon.shown import short
from stateroom.daemon.timeline import PLAIN, drawn, listed

SHOWN = 20  # requests that are listed; --json has all
LAST = "last"
RID_MAX = 2**64 - 1


def trace(
    request: Annotated[
        str | None,
        typer.Argument(
            metavar="[RID|last]",
            help="The daemon's number of a request; without one the last are listed.",
            autocompletion=completing.requests,
        ),
    ] = None,
    spans: Annotated[bool, typer.Option("--spans", help="A line for each span.")] = False,
    chrome: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write it for Perfetto or chrome://tracing; - is standard output."),
    ] = None,
    as_json: AsJson = False,
    endpoint: Endpoint = None,
) -> None:
    """Show where the time of a request went: waits, prefill, decode, sends.

    stateroom trace
    stateroom trace last
    stateroom trace 41 --spans
    stateroom trace 41 --chrome trace.json
    """
    with connect(endpoint, app=COMMANDS_APP) as room:
        if request is None:
            _list(room, as_json)
            return
        traced = room.trace(_rid(room, request), everyone=True)
    if chrome is not None:
        _write(chrome, json.dumps(events(traced), indent=1))
    elif as_json:
        out.print_json(data=asdict(traced))
    else:
        for line in listed(traced) if spans else drawn(traced):
            say(_fitting(line))


def _rid(room: Room, said: str) -> int:
    if said == LAST:
        requests = room.requests(everyone=True)
        if not requests:
            raise Leave(FAILED, "The daemon remembers no request yet.")
        return max(info.rid for info in requests)
    if not (said.isascii() and said.isdigit() and int(said) <= RID_MAX):
        raise Leave(
            CONFIG, f"{plain(said)!r} is no request: give its number, as `stateroom trace` lists it, or last."
        )
    return int(said)


def _write(file: Path, text: str) -> None:
    if str(file) == "-":
        sys.stdout.write(text + "\n")
        return
    stream = file.open("w")  # where that can't be, what is there stays
    try:
        with stream:
            stream.write(text + "\n")
    except OSError as error:
        if file.is_file():
            file.unlink()  # a part of it would be of no use
        raise OSError(error.errno, error.strerror, str(file)) from error


def _fitting(line: str) -> str:
    """In characters that the terminal has."""
    try:
        line.encode(sys.stdout.encoding or "ascii")
        return line
    except UnicodeEncodeError:
        return line.translate(PLAIN)


def _list(room: Room, as_json: bool) -> None:
    requests = room.requests(everyone=True)
    if as_json:
        out.print_json(data=[asdict(info) for info in requests])
    elif not requests:
        err.print("The daemon remembers no request yet.")
    else:
        out.print(table(sorted(requests, key=lambda info: -info.rid)[:SHOWN]))


def table(requests: list[RequestInfo]) -> Table:
    """One row a request, the latest first."""
    made = Table(box=None, pad_edge=False)
    for heading in ("RID", "AGE", "TOOK"):
        made.add_column(heading, justify="right", no_wrap=True)
    for heading in ("OP", "OWNER", "SESSION", "CODE"):
        made.add_column(heading, no_wrap=True)
    for info in requests:
        made.add_row(
            str(info.rid),
            age(info.age_s),
            "" if info.ms is None else f"{info.ms:,.0f} ms",
            cell(info.op),
            cell(info.owner),
            short(info.session or ""),
            info.code or (f"waits for {info.waiting}" if info.waiting else info.state),
        )
    return made
