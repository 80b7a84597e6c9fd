"""`stateroom stop`."""

from __future__ import annotations

import os
import signal
import time
from typing import Annotated

import typer

from stateroom.client.paths import runtime_dir
from stateroom.daemon.exits import FAILED, Leave
from stateroom.daemon.lock import LOCK_NAME, holder

WAIT_S = 10.0  # a daemon leaves within 5 s
POLL_S = 0.05


def stop(
    wait_s: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="How long to wait for its end.")
    ] = WAIT_S,
) -> None:
    """Stop the daemon: running requests end as cancelled, then it leaves."""
    path = runtime_dir() / LOCK_NAME
    found = holder(path)
    if found is None:
        typer.echo("No daemon is running.")
        return
    try:
        os.kill(found.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError as error:
        raise Leave(FAILED, f"Process {found.pid} is another user's; it was left alone.") from error
    until_s = time.monotonic() + wait_s
    while (now := holder(path)) is not None and now.pid == found.pid:
        if time.monotonic() > until_s:
            raise Leave(FAILED, f"Process {found.pid} is still there {wait_s:g} s after it was told to stop.")
        time.sleep(POLL_S)
    typer.echo(f"Stopped process {found.pid}.")
