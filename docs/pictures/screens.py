"""What `stateroom demo` and `stateroom top` show, as SVG: of real runs with the demo model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from docs.pictures.svg import plain
from rich.console import Console
from rich.text import Text

from stateroom.daemon.demo.run import ended_with_us, own_environment, start_daemon, wait_for_model
from stateroom.daemon.models import add_demo
from stateroom.daemon.top.picture import picture
from stateroom.daemon.top.snapshot import Snapshot
from stateroom.daemon.top.source import DaemonSource

DEMO_COLUMNS = 112
TOP_SIZE = (110, 20)
TOP_LOOKS = 4
LOOK_S = 1.0
# Few places and little memory, so that there is something to wait for.
SETTINGS = {"STATEROOM_ROWS_MAX": "4", "STATEROOM_KV_BUDGET": "1GiB"}
USUAL_ENDPOINT = "ipc://~/.stateroom/run/stateroom.sock"  # shown in place of the private one


def demo() -> str:
    """The demo as it runs on this machine, with its colours."""
    add_demo()
    environment = os.environ | {"COLUMNS": str(DEMO_COLUMNS), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "stateroom.daemon.cli", "demo"]
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    return drawn(said.decode())  # not as text: that would make new lines of a spinner's returns


def drawn(said: str) -> str:
    """What the demo wrote to a terminal, as it stands there at the end."""
    console = Console(record=True, width=DEMO_COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print("[bold]$ stateroom demo[/bold]", highlight=False)
    console.print(Text.from_ansi(_settled(said)), soft_wrap=False, highlight=False)
    return plain(console.export_svg(title="stateroom demo", unique_id="demo"))


def _settled(said: str) -> str:
    """Without what a spinner wrote and took back, and without the number of a process."""
    said = re.sub(r"\x1b\[\?25[lh]", "", said)
    said = re.sub(r"[^\n]*\n\r?\x1b\[1A\x1b\[2K", "", said)
    said = re.sub(r"^[^\n]*(?:\r|\x1b\[2K|\x1b\[1A)+", "", said, flags=re.MULTILINE)
    return re.sub(r" \(process [^)]*\)", "", said)


class Unhurried(DaemonSource):
    """A second between looks, as on a terminal: rates are of what happened in between."""

    async def look(self) -> Snapshot:
        await asyncio.sleep(LOOK_S)
        return replace(await super().look(), endpoint=USUAL_ENDPOINT)


def top() -> str:
    """The live view while an editor, a chat, an agent and an indexer are at work."""
    with _daemon() as endpoint:
        command = [sys.executable, "-m", "docs.pictures.programs", endpoint]
        programs = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert programs.stdout is not None
            if not programs.stdout.readline():
                raise RuntimeError("the programs of the picture failed; their lines are above")
            seen = picture(Unhurried(endpoint, LOOK_S), TOP_SIZE, TOP_LOOKS)
        finally:
            programs.kill()
            programs.wait()
    return plain(seen)


@contextlib.contextmanager
def _daemon() -> Iterator[str]:
    """A private one with the demo model, as the demo's own."""
    folder = Path(tempfile.mkdtemp(prefix="stateroom-", dir="/tmp"))
    try:
        with ended_with_us() as processes:
            environment = own_environment(folder) | SETTINGS
            endpoint = environment["STATEROOM_ENDPOINT"]
            daemon = start_daemon(add_demo().path, folder, environment, processes)
            wait_for_model(daemon, folder, endpoint)
            yield endpoint
    finally:
        shutil.rmtree(folder, ignore_errors=True)
