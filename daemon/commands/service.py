"""`stateroom service`: the daemon started by launchd or systemd, for this user."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from stateroom.daemon.commands.following import last_lines
from stateroom.daemon.commands.options import AsJson
from stateroom.daemon.commands.terminal import err, out, plain
from stateroom.daemon.config import model_specs, parse_bytes
from stateroom.daemon.exits import FAILED, Leave
from stateroom.daemon.models import models_dir
from stateroom.deploy.service import Service, ServiceError, Status, manager

LINES = 20

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, help="Have launchd or systemd start the daemon.")


@app.command()
def install(
    model: Annotated[
        list[str] | None, typer.Option(help="As for `serve`; a path is remembered as an absolute one.")
    ] = None,
    kv_budget: Annotated[str | None, typer.Option(help="As for `serve`.")] = None,
    more: Annotated[
        list[str] | None, typer.Argument(help="Other options of `serve`, behind `--`.", show_default=False)
    ] = None,
) -> None:
    """Install it, or bring it up to date, and start it. It starts by itself from then on."""
    # Refused here and now: a service manager would only try again and again.
    arguments = [f"--model={spec.spec}" for spec in model_specs(model or [], models_dir())]
    if kv_budget is not None:
        arguments.append(f"--kv-budget={parse_bytes(kv_budget)}")
    service = Service(tuple(arguments + (more or [])))
    _show(_done(lambda: manager().install(service)))
    out.print(f"log: {service.log}", soft_wrap=True)


@app.command()
def uninstall() -> None:
    """Stop it and take it out. Models and sessions stay."""
    _done(lambda: manager().uninstall())
    out.print("The service is gone; models and sessions stay in their place.")


@app.command()
def start() -> None:
    """Start it, if it isn't running."""
    _show(_done(lambda: manager().start()))


@app.command()
def stop() -> None:
    """Stop it; sessions are kept. It starts again at the next login."""
    _done(lambda: manager().stop())
    out.print("Stopped.")


@app.command()
def restart() -> None:
    """Stop it and start it again, as after an upgrade. Sessions are kept."""
    _show(_done(lambda: manager().restart()))


@app.command()
def status(as_json: AsJson = False) -> None:
    """Tell whether it is installed and running. Leaves with 1 when it isn't running."""
    found = _done(lambda: manager().status())
    if as_json:
        out.print_json(json.dumps(asdict(found)))
    else:
        _show(found)
    if not found.running:
        raise typer.Exit(FAILED)


@app.command()
def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it grows, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Of its end.")] = LINES,
) -> None:
    """Show the end of what it wrote."""
    path = Service().log
    try:
        for line in last_lines(path, lines, follow):
            typer.echo(plain(line), nl=False)
    except FileNotFoundError:
        raise Leave(FAILED, f"There is no log at {path}; has the service been installed?") from None


def _done(action: Callable[[], T]) -> T:
    try:
        return action()
    except ServiceError as error:
        raise Leave(FAILED, str(error)) from error


def _show(found: Status) -> None:
    state = f"running, process {found.pid}" if found.running else "not running"
    out.print(f"{'installed' if found.installed else 'not installed'}, {state}")
    if found.installed:
        out.print(str(Path(found.where)), soft_wrap=True)
    if found.last_exit is not None:
        out.print(f"last exit: {found.last_exit}")
    if found.note:
        err.print(found.note)
