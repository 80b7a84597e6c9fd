"""The commands of `stateroom`, one module each.

A command raises what went wrong; `run` turns it into one line on stderr and an exit code, so that
nobody who types a command sees a traceback for a daemon that isn't there.
"""

from __future__ import annotations

import sys

import typer

from stateroom.client.errors import ClientError, StateroomError
from stateroom.daemon.commands.version import version

INTERRUPTED = 130  # as a shell reports a program ended by Ctrl-C

app = typer.Typer(
    name="stateroom",
    help="Language-model sessions that stay on the GPU, lent to every program on the machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.callback()(lambda: None)  # keeps a single command from becoming the whole program
app.command()(version)


def run() -> int:
    """Runs the command line and gives its exit code."""
    try:
        app(standalone_mode=True)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0
    except (ClientError, StateroomError) as error:
        sys.stderr.write(f"stateroom: {error}\n")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
