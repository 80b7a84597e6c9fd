"""`stateroom doctor`: what is right, what isn't, and what to do about it."""

from __future__ import annotations

import json

import typer

from stateroom.daemon.commands.options import AsJson
from stateroom.daemon.commands.terminal import out
from stateroom.daemon.doctor.check import Check
from stateroom.daemon.doctor.examine import examine, told

MARKS = {"pass": "[green]✓[/green]", "note": "[yellow]•[/yellow]", "problem": "[red]✗[/red]"}
NAME_WIDTH = 13


def doctor(as_json: AsJson = False) -> None:
    """Check the installation and the daemon; the exit code is 1 when something is wrong."""
    found = []
    for check in examine():
        found.append(check)
        if not as_json:
            show(check)
    if as_json:
        out.print_json(json.dumps(told(found)))
    if any(check.state == "problem" for check in found):
        raise typer.Exit(1)


def show(check: Check) -> None:
    out.print(MARKS[check.state], check.name.ljust(NAME_WIDTH), end=" ")
    out.print(check.finding, markup=False, soft_wrap=True)
    if check.advice:
        out.print(" " * (NAME_WIDTH + 2), "→", check.advice, markup=False, soft_wrap=True)
