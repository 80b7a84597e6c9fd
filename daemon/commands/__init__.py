"""The commands of `stateroom`, one module each.

A command raises what went wrong; `run` turns it into one line on stderr and an exit code, so that
nobody who types a command sees a traceback for a daemon that isn't there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from io import TextIOWrapper

from stateroom.client.errors import BadConfig, BadEndpoint, ClientError, StateroomError
from stateroom.daemon.commands.bench import bench
from stateroom.daemon.commands.chat import chat
from stateroom.daemon.commands.config import app as config
from stateroom.daemon.commands.demo import demo
from stateroom.daemon.commands.doctor import doctor
from stateroom.daemon.commands.generate import generate
from stateroom.daemon.commands.keys import app as keys
from stateroom.daemon.commands.logs import logs
from stateroom.daemon.commands.model import app as model
from stateroom.daemon.commands.ps import ps
from stateroom.daemon.commands.serve import ServeCommand, serve
from stateroom.daemon.commands.service import app as service
from stateroom.daemon.commands.sessions import close, park, verify
from stateroom.daemon.commands.snapshots import export, forget, import_, restore, save, snapshots
from stateroom.daemon.commands.stats import stats
from stateroom.daemon.commands.stop import stop
from stateroom.daemon.commands.switches import Commands
from stateroom.daemon.commands.terminal import plain
from stateroom.daemon.commands.top import top
from stateroom.daemon.commands.trace import trace
from stateroom.daemon.commands.version import version
from stateroom.daemon.commands.watch import watch
from stateroom.daemon.exits import (
    CONFIG,
    FAILED,
    INTERRUPTED,
    LAUNCHD,
    OK,
    PERMANENT,
    SERVICE_VARIABLE,
    Leave,
)
from stateroom.daemon.models import ModelsError

NAME = "stateroom"
COMPLETING = "_STATEROOM_COMPLETE"  # set by a shell that asks for completions

app = Commands(
    name=NAME,
    help="Language-model sessions that stay on the GPU, lent to every program on the machine.",
    pretty_exceptions_enable=False,
)
# By the panels of `stateroom --help`.
COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Run": (serve, stop, demo),
    "Talk": (generate, chat),
    "Sessions": (ps, close, park, verify),
    "Snapshots": (save, restore, snapshots, forget, export, import_),
    "Look": (top, watch, trace, stats, logs, doctor, bench, version),
}
GROUPS = {"Set up": {"model": model, "config": config, "service": service, "keys": keys}}
for panel, commands in COMMANDS.items():
    for command in commands:
        kind = ServeCommand if command is serve else None
        app.command(command.__name__.rstrip("_"), cls=kind, rich_help_panel=panel)(command)
for panel, groups in GROUPS.items():
    for name, group in groups.items():
        app.add_typer(group, name=name, rich_help_panel=panel)


def run() -> int:
    """Runs the command line and gives its exit code."""
    prepare_streams()
    return written_out(obeyed())


def obeyed() -> int:
    try:
        app(prog_name=NAME)
    except SystemExit as leaving:
        return told_to_manager(leaving.code) if isinstance(leaving.code, int) else OK
    except Leave as leaving:
        return failed(leaving.message, leaving.code)
    except (BadConfig, BadEndpoint) as error:
        return failed(str(error), CONFIG)
    except (ClientError, StateroomError, ModelsError) as error:
        return failed(str(error), FAILED)
    except OSError as error:  # a full disk, say
        return failed(in_words(error), FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def prepare_streams() -> None:
    """Makes the standard streams what every command expects: there, and able to take any text."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by who started this: `>&-`
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (for as long as we run)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def written_out(code: int) -> int:
    """Writes what is still to be written: of a full disk the interpreter would tell in words of its own."""
    try:
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read it has seen enough
        code = code or FAILED
    except OSError as error:
        code = code or failed(in_words(error), FAILED)
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def in_words(error: OSError) -> str:
    """What the system says, and of which file."""
    words = error.strerror or str(error)
    return words if error.filename is None else f"{error.filename}: {words}"


def failed(message: str, code: int) -> int:
    if COMPLETING not in os.environ:  # else it would stand in the middle of what is typed
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{NAME}: {plain(message)}\n")
    return told_to_manager(code)


def told_to_manager(code: int) -> int:
    """The code that is left with: 0 where launchd would try for ever what can't be."""
    by_launchd = os.environ.get(SERVICE_VARIABLE) == LAUNCHD
    return OK if code in PERMANENT and by_launchd else code
