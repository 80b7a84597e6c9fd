"""`stateroom save`, `restore`, `snapshots`, `forget`, `export`, `import`: what is kept, and carried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from stateroom.client import Progress as Done
from stateroom.client import connect
from stateroom.client.protocol import SnapshotInfo, Snapshots, SnapshotsResult
from stateroom.daemon.commands import completing
from stateroom.daemon.commands.options import COMMANDS_APP, App, AsJson, Endpoint, Model
from stateroom.daemon.commands.sessions import Ref, session_of, shown
from stateroom.daemon.commands.terminal import age, cell, err, out, plain, receipt_line, say, size
from stateroom.daemon.exits import FAILED, Leave
from stateroom.daemon.shown import short

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="The snapshot's name.", autocompletion=completing.snapshots),
]


def save(
    session: Ref,
    name: Name,
    replace: Annotated[bool, typer.Option("--replace", help="Take the place of one of that name.")] = False,
    app: App = COMMANDS_APP,
    endpoint: Endpoint = None,
) -> None:
    """Keep what a session holds on disk, under a name.

    stateroom save chat before-the-trip
    stateroom restore before-the-trip --as chat-again
    """
    with connect(endpoint, app=app) as room:
        saved = session_of(room, session)
        done = saved.save(name, replace=replace)
    say(f"Saved {shown(saved)} as {name}: {done.tokens} tokens, {size(done.bytes)}.")


def restore(
    name: Name,
    session: Annotated[
        str | None, typer.Option("--as", metavar="SESSION", help="A name for the new session.")
    ] = None,
    app: App = COMMANDS_APP,
    endpoint: Endpoint = None,
) -> None:
    """Open a new session with what a snapshot holds."""
    with connect(endpoint, app=app) as room:
        made = room.restore(name, name=session)
    line = receipt_line(made.receipt) if made.receipt is not None else f"{made.length} tokens"
    say(f"{name} is session {shown(made)} now: {line}.")


def snapshots(app: App = COMMANDS_APP, as_json: AsJson = False, endpoint: Endpoint = None) -> None:
    """List the snapshots of one owner."""
    with connect(endpoint, app=app) as room:
        kept = room.call(Snapshots(), SnapshotsResult)
    if as_json:
        out.print_json(data=asdict(kept))
    elif kept.snapshots:
        out.print(table(kept.snapshots))
    else:
        err.print(f"{plain(app)} has no snapshots.", markup=False)
    if not as_json and kept.used_bytes:
        err.print(f"On disk, with sessions that are parked there: {size(kept.used_bytes)}.", markup=False)


def table(kept: list[SnapshotInfo]) -> Table:
    """One row a snapshot, the newest first."""
    made = Table(box=None, pad_edge=False)
    for heading in ("SNAPSHOT", "MODEL", "SESSION"):
        made.add_column(heading, no_wrap=True)
    for heading in ("TOKENS", "SIZE", "AGE"):
        made.add_column(heading, justify="right", no_wrap=True)
    for each in sorted(kept, key=lambda each: each.age_s):
        made.add_row(
            cell(each.snapshot),
            cell(each.model),
            short(each.session or ""),
            str(each.length),
            size(each.bytes),
            age(each.age_s),
        )
    return made


def forget(name: Name, app: App = COMMANDS_APP, endpoint: Endpoint = None) -> None:
    """Delete a snapshot; sessions that came from it stay."""
    with connect(endpoint, app=app) as room:
        freed = room.forget(name).freed_bytes
    say(f"Forgot {name}: {size(freed)} freed.")


def export(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to; it must not exist yet.")],
    app: App = COMMANDS_APP,
    endpoint: Endpoint = None,
) -> None:
    """Write a snapshot as one file, which `import` takes in elsewhere; all that was said is in it.

    stateroom export before-the-trip trip.stateroom
    stateroom import trip.stateroom before-the-trip
    """
    if file.exists():
        raise Leave(FAILED, f"{file} exists; remove it, or take another name.")
    with connect(endpoint, app=app) as room, bar(f"Exporting {name}") as on_progress:
        written = room.export(name, file, on_progress=on_progress)
    say(f"Exported {name} to {file}: {size(written)}.")


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `export` wrote.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name that the snapshot gets.")],
    model: Model = None,
    app: App = COMMANDS_APP,
    endpoint: Endpoint = None,
) -> None:
    """Take in a snapshot that was exported, perhaps on another machine. Take files from those you trust."""
    with connect(endpoint, app=app) as room, bar(f"Importing {name}") as on_progress:
        made = room.import_(name, file, model=model, on_progress=on_progress)
    kept = f"{made.length} tokens of {made.model}, {size(made.bytes)}"
    say(f"Imported {name}: {kept}. `stateroom restore {name}` opens it.")


@contextmanager
def bar(what: str) -> Iterator[Callable[[Done], None]]:
    """A bar on the error stream of a terminal, for as long as it takes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(escape(what), total=None)
        yield lambda done: progress.update(task, completed=done.done, total=done.total)
