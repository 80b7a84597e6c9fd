"""`stateroom version`."""

from __future__ import annotations

from importlib.metadata import version as installed

import typer

from stateroom.client.limits import PROTOCOL_VERSION


def version() -> None:
    """Show the versions of the program and of the protocol it speaks."""
    typer.echo(f"stateroom {installed('stateroom')}, protocol {PROTOCOL_VERSION}")
