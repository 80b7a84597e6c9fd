"""`stateroom service`: the daemon started by launchd or systemd, for this user."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from stateroom.client.paths import (
    SOCKET_NAME,
    check_endpoint,
    default_endpoint,
    home_dir,
    ipc_path,
    runtime_dir,
)
from stateroom.daemon.commands.config import taken_by
from stateroom.daemon.commands.following import last_lines
from stateroom.daemon.commands.options import AsJson
from stateroom.daemon.commands.serve import refuse
from stateroom.daemon.commands.switches import Commands
from stateroom.daemon.commands.terminal import err, out, plain, say
from stateroom.daemon.config import parse_bytes
from stateroom.daemon.exits import CONFIG, FAILED, RUNNING, Leave
from stateroom.daemon.lock import LOCK_NAME, holder
from stateroom.daemon.models import models_dir
from stateroom.daemon.readable import readable_specs
from stateroom.deploy.service import Service, ServiceError, Status, User, manager

LINES = 20

T = TypeVar("T")

app = Commands(help="Have launchd or systemd start the daemon.")


Models = Annotated[
    list[str] | None, typer.Option("--model", help="As for `serve`; a path is remembered as an absolute one.")
]
KvBudget = Annotated[str | None, typer.Option(help="As for `serve`.")]
Activate = Annotated[
    bool,
    typer.Option(
        "--activate", help="Let launchd or systemd listen, and start the daemon for its first client only."
    ),
]
More = Annotated[
    list[str] | None, typer.Argument(help="Other options of `serve`, behind `--`.", show_default=False)
]


@app.command()
def install(
    context: typer.Context,
    model: Models = None,
    kv_budget: KvBudget = None,
    activate: Activate = False,
    more: More = None,
) -> None:
    """Install it, or bring it up to date, and start it. It starts by itself from then on.

    What it is started with may stand in the configuration file as well.

    stateroom service install --model demo
    stateroom service install --model demo -- --metrics-port 9464
    """
    given = arguments(model, kv_budget, more)
    taken = taken_by("serve", given, context).params  # with the file: what can't work is refused here
    service = Service(given, socket=socket_path(more or []) if activate else None)
    refuse(taken)
    refuse_another_daemon()
    _show(_done(lambda: manager().install(service)))
    say(f"log: {service.log}")


@app.command()
def show(
    model: Models = None,
    kv_budget: KvBudget = None,
    activate: Activate = False,
    boot: Annotated[
        bool, typer.Option("--boot", help="A service of the whole machine, there before anybody logs in.")
    ] = False,
    user: Annotated[str | None, typer.Option(help="With --boot: whom it runs as; you, by default.")] = None,
    more: More = None,
) -> None:
    """Print what `install` would write, and change nothing; with --boot, what to install with sudo."""
    if user is not None and not boot:
        raise Leave(CONFIG, "--user goes with --boot: without it the service is yours.")
    owner = account(user) if boot else None
    service = Service(arguments(model, kv_budget, more))
    if owner is not None:
        ours = owner.uid == os.getuid()
        home = home_dir() if ours else owner.home / ".stateroom"
        inherited = service.inherited if ours else {}
        service = replace(service, home=home, runtime=home / "run", user_home=owner.home, inherited=inherited)
    if activate:
        chosen = _endpoint_option(more or [])
        where = f"ipc://{service.runtime / SOCKET_NAME}" if owner is not None and chosen is None else chosen
        service = replace(service, socket=socket_path(more or [], where))
    files = manager().files(service, owner)
    for path, text in files.items():
        err.print(str(path), markup=False, soft_wrap=True)
        typer.echo(f"# {path}\n{text}" if len(files) > 1 else text)
    if owner is not None and runtime_dir() != service.runtime:
        where = f"STATEROOM_RUNTIME_DIR={service.runtime}"
        err.print(f"Its clients find it with {where}", markup=False, soft_wrap=True)


def arguments(model: list[str] | None, kv_budget: str | None, more: list[str] | None) -> tuple[str, ...]:
    """Those of `serve`. What can't work is refused here: a service manager would only try it again and again.

    Raises:
        Leave: a model that isn't there, or can't be read; a size that is none.
    """
    made = [f"--model={spec.spec}" for spec in readable_specs(model or [], models_dir())]
    if kv_budget is not None:
        made.append(f"--kv-budget={parse_bytes(kv_budget)}")
    return tuple(made + (more or []))


def socket_path(more: list[str], endpoint: str | None = None) -> Path:
    """Where the manager listens: the endpoint that clients find by themselves, or that was named.

    Raises:
        Leave: it has no path.
    """
    where = endpoint or _endpoint_option(more) or default_endpoint()
    check_endpoint(where)
    path = ipc_path(where)
    if path is None or not path.is_absolute():
        raise Leave(CONFIG, f"--activate is for a local endpoint with an absolute path; {where} is none.")
    return path


def refuse_another_daemon() -> None:
    """The service's would only leave; and a manager that listens would take the path of the other's socket.

    Raises:
        Leave: a daemon runs that isn't the service's.
    """
    found = holder(runtime_dir() / LOCK_NAME)
    if found is not None and found.pid != _done(lambda: manager().status()).pid:
        raise Leave(RUNNING, f"A daemon is running already, process {found.pid}; `stateroom stop` ends it.")


def account(name: str | None) -> User:
    """A user of this machine.

    Raises:
        Leave: there is none of that name.
    """
    try:
        found = pwd.getpwuid(os.getuid()) if name is None else pwd.getpwnam(name)
    except KeyError:
        raise Leave(CONFIG, f"There is no user {name or os.getuid()} on this machine.") from None
    return User(found.pw_name, found.pw_uid, Path(found.pw_dir))


def _endpoint_option(more: list[str]) -> str | None:
    for at, word in enumerate(more):
        if word.startswith("--endpoint="):
            return word.partition("=")[2]
        if word == "--endpoint" and at + 1 < len(more):
            return more[at + 1]
    return None


@app.command()
def uninstall() -> None:
    """Stop it and take it out. Models and sessions stay."""
    _done(lambda: manager().uninstall())
    out.print("The service is gone; models and sessions stay in their place.")


@app.command()
def start() -> None:
    """Start it, if it isn't running."""
    refuse_another_daemon()
    _show(_done(lambda: manager().start()))


@app.command()
def stop() -> None:
    """Stop it; sessions are kept. It starts again at the next login."""
    _done(lambda: manager().stop())
    out.print("Stopped.")


@app.command()
def restart() -> None:
    """Stop it and start it again, as after an upgrade. Sessions are kept."""
    refuse_another_daemon()
    _show(_done(lambda: manager().restart()))


@app.command()
def status(as_json: AsJson = False) -> None:
    """Tell whether it is installed and running. Leaves with 1 when it neither runs nor waits for a client."""
    found = _done(lambda: manager().status())
    if as_json:
        out.print_json(data=asdict(found))
    else:
        _show(found)
    if not found.running and not found.listening:
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
    if found.listening:
        state += "; its first client starts it" if not found.running else ", started for a client"
    out.print(f"{'installed' if found.installed else 'not installed'}, {state}")
    if found.installed:
        say(found.where)
    if found.last_exit is not None:
        say(f"last exit: {found.last_exit}")
    if found.note:
        err.print(plain(found.note), markup=False)
