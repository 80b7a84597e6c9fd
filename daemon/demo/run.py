"""Runs the demo: a private daemon in a temporary directory, two client processes at once, a summary.

Nothing of the user's own daemon is touched, and it may run meanwhile; the model alone comes from the usual
place. Whatever ends the demo, the processes it started end with it, by their ids.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stateroom.client import connect
from stateroom.client.errors import NoDaemon
from stateroom.daemon.blas import VARIABLE as BLAS
from stateroom.daemon.demo.tally import Tally
from stateroom.daemon.exits import FAILED, Leave
from stateroom.daemon.settings.known import PREFIX

PROGRAMS = {"editor": "cyan", "chat": "magenta"}
LOAD_S = 180.0  # the model on a slow disk and two slow cores
CLIENTS_S = 300.0
STOP_S = 8.0  # the daemon promises to leave within 5
POLL_S = 0.1
LOG_LINES = 20
SHORT = Path("/tmp")  # socket paths are limited, and macOS's own temporary directories are long

Processes = list[subprocess.Popen[str]]


def run(model: Path, console: Console) -> None:
    """The whole demo.

    Raises:
        Leave: the daemon or a program failed; the message says where.
    """
    begin = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="stateroom-", dir=SHORT if SHORT.is_dir() else None))
    try:
        with ended_with_us() as processes:
            environment = own_environment(folder)
            daemon = start_daemon(model, folder, environment, processes)
            with console.status("a private daemon loads SmolLM2-135M …"):
                wait_for_model(daemon, folder, environment["STATEROOM_ENDPOINT"])
            console.print(f"A private daemon (process {daemon.pid}) has the model after {_since(begin)}.")
            console.print("Two programs use it at the same time, as separate processes:\n")
            run_programs(folder, environment, processes, console)
        show(folder, console)
        console.print(f"Everything is stopped; the demo took {_since(begin)}.")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _since(begin: float) -> str:
    return f"{time.monotonic() - begin:.0f} s"


@contextlib.contextmanager
def ended_with_us() -> Iterator[Processes]:
    """Processes to end when this is left, however: the last one started first."""
    processes: Processes = []
    try:
        yield processes
    finally:
        for process in reversed(processes):
            if process.poll() is None:
                process.terminate()
        for process in reversed(processes):
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def own_environment(folder: Path) -> dict[str, str]:
    """The environment in which the daemon and its clients find each other and nobody else.

    The home is its own, too: the sessions, log and settings of the user's daemon are in the usual one.
    """
    runtime = folder / "run"
    inherited = {
        name: value for name, value in os.environ.items() if name == BLAS or not name.startswith(PREFIX)
    }
    return inherited | {
        "STATEROOM_HOME": str(folder / "home"),
        "STATEROOM_RUNTIME_DIR": str(runtime),
        "STATEROOM_ENDPOINT": f"ipc://{runtime}/stateroom.sock",
    }


def start_daemon(
    model: Path, folder: Path, environment: dict[str, str], processes: Processes
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stateroom.daemon.cli", "serve", "--model", str(model)]
    with (folder / "daemon.log").open("w") as log:
        # A session of its own: Ctrl-C in the terminal is for us, and we end the others in order.
        daemon = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True,
            start_new_session=True,
        )  # fmt: skip
    processes.append(daemon)
    return daemon


def wait_for_model(daemon: subprocess.Popen[str], folder: Path, endpoint: str) -> None:
    deadline = time.monotonic() + LOAD_S
    while daemon.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(NoDaemon), connect(endpoint, app="demo") as room:
            states = {model["state"]: model["failure"] for model in room.stats().models}
            if "ready" in states:
                return
            if "failed" in states:
                raise Leave(FAILED, f"The model can't be loaded: {states['failed']}")
        time.sleep(POLL_S)
    lines = (folder / "daemon.log").read_text(errors="replace").splitlines()[-LOG_LINES:]
    raise Leave(FAILED, "The daemon did not get ready. Its log ends with:\n" + "\n".join(lines))


def run_programs(folder: Path, environment: dict[str, str], processes: Processes, console: Console) -> None:
    """Runs the clients at once and shows their lines as they come."""
    clients, readers = {}, []
    for name, colour in PROGRAMS.items():
        command = [sys.executable, "-m", f"stateroom.daemon.demo.{name}", str(folder / f"{name}.json")]
        client = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        processes.append(client)
        clients[name] = client
        readers.append(threading.Thread(target=relay, args=(name, colour, client, console), daemon=True))
        readers[-1].start()
    deadline = time.monotonic() + CLIENTS_S
    for name, client in clients.items():
        try:
            code = client.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Leave(FAILED, f"The {name} program did not end within {CLIENTS_S:.0f} s.") from None
        if code != 0:
            raise Leave(FAILED, f"The {name} program failed with exit code {code}; its lines are above.")
    for reader in readers:
        reader.join()
    console.print()


def relay(name: str, colour: str, client: subprocess.Popen[str], console: Console) -> None:
    assert client.stdout is not None
    width = max(len(other) for other in PROGRAMS)
    for line in client.stdout:
        console.print(f"[{colour}]{name:{width}}[/{colour}] │ {escape(line.rstrip())}", soft_wrap=True)


def show(folder: Path, console: Console) -> None:
    """What was reused, and the time it saved.

    A token's price is the lower of what the two programs paid in their first prefill: they ran side by
    side, and the one that waited more for the other would make the saving look larger than it was.
    """
    tallies = {name: Tally.read(folder / f"{name}.json") for name in PROGRAMS}
    price_s = min(tally.cold_ms for tally in tallies.values()) / 1000
    table = Table("", "tokens reused", "computed", "decoded", "time saved", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, tally in tallies.items():
        figures = f"{tally.reused:,}", f"{tally.computed:,}", f"{tally.decoded:,}"
        table.add_row(f"[{PROGRAMS[name]}]{name}[/]", *figures, f"{tally.reused * price_s:.1f} s")
    console.print(table)
    reused = sum(tally.reused for tally in tallies.values())
    share = reused / (reused + sum(tally.computed for tally in tallies.values()))
    console.print(
        f"\n{share:.0%} of all prompt tokens were there already. Computing them again would have\n"
        f"taken about [bold]{reused * price_s:.0f} s[/bold] more, at {price_s * 1000:.1f} ms a token."
    )
