"""`stateroom doctor`: what is right, what isn't, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from stateroom.client.errors import BadConfig, BadEndpoint
from stateroom.daemon.commands.config import holding, taken_by
from stateroom.daemon.commands.options import AsJson
from stateroom.daemon.commands.terminal import err, out, plain
from stateroom.daemon.doctor.check import Check, problem
from stateroom.daemon.exits import Leave

MARKS = {"pass": "[green]✓[/green]", "note": "[yellow]•[/yellow]", "problem": "[red]✗[/red]"}
NAME_WIDTH = 13


def doctor(
    context: typer.Context,
    as_json: AsJson = False,
    bundle_file: Annotated[
        Path | None,
        typer.Option(
            "--bundle",
            metavar="FILE.tar.gz",
            help="Write what somebody who helps needs to see: findings, figures, settings, the end of the "
            "log; no prompts, no answers, no names. The exit code is 0 then.",
        ),
    ] = None,
) -> None:
    """Check the installation and the daemon; the exit code is 1 when something is wrong."""
    from stateroom.daemon.doctor import bundle  # what it looks at, no other command needs
    from stateroom.daemon.doctor.examine import examine, told

    if bundle_file is not None:
        bundle.check_free(bundle_file)  # said before all else
    found = []
    for check in chain(examine(), environment(context)):
        found.append(check)
        if not as_json:
            show(check)
    if as_json:
        out.print_json(data=told(found))
    if bundle_file is not None:
        bundle.write(bundle_file, found, settings(context))
        err.print(
            f"Written: {bundle_file}. It holds {bundle.SUMMARY}; README.txt in it tells all. Look through it "
            "before you send it.",
            markup=False,
            soft_wrap=True,
        )
    elif any(check.state == "problem" for check in found):
        raise typer.Exit(1)


def environment(context: typer.Context) -> Iterator[Check]:
    """A variable that `serve` would refuse. Of what else it refuses, the other checks tell."""
    try:
        taken_by("serve", [], context)
    except Leave as refused:
        yield problem("environment", refused.message, "Unset it, or set it right.")
    except (BadConfig, BadEndpoint, typer.BadParameter):
        pass


def settings(context: typer.Context) -> list[dict[str, object]]:
    """Those that hold, with their origins; none where they can't be read, of which the findings tell."""
    try:
        return [held.told() for held in holding(context, [])]
    except (BadConfig, BadEndpoint, Leave, typer.BadParameter):
        return []


def show(check: Check) -> None:
    out.print(MARKS[check.state], check.name.ljust(NAME_WIDTH), end=" ")
    out.print(plain(check.finding), markup=False, soft_wrap=True)
    if check.advice:
        out.print(" " * (NAME_WIDTH + 2), "→", plain(check.advice), markup=False, soft_wrap=True)
