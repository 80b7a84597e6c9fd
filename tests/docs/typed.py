"""What a page has its reader type, and a reader who types it, on a machine where nothing is set up."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from tests.system.terminal import CTRL_C, Terminal
from tests.tiny import write_tiny_model

from stateroom.client import connect

ROOT = Path(__file__).resolve().parents[2]
CONSOLE = ("", "sh", "console")  # languages of blocks that are typed into a shell
PYTHON = "python"
SHOWN = ("mermaid", "toml", "yaml", "json", "promql", "text")  # of those that nobody types
COMMAND_S = 60.0
START_S = 60.0
LEAVE_S = 10.0
CONTEXT = 16_384


@dataclass(frozen=True)
class Block:
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """Line by line; a line that ends in a backslash goes on in the next."""
        return [line for line in self.text.replace("\\\n", " ").splitlines() if command(line)]


def command(line: str) -> str:
    """Of a line of a shell, without the comment behind it."""
    return re.sub(r"(^|\s)#.*$", "", line).strip()


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    found = [Block(*pair) for pair in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.M)]
    strange = {block.language for block in found} - {*CONSOLE, PYTHON, *SHOWN}
    assert not strange, f"{page.name} has blocks of {strange}: are they typed?"
    return found


@dataclass(frozen=True)
class Screen:
    """What a program that stays shows first, and how its reader leaves it."""

    shows: str
    types: str = ""
    then_shows: str = ""
    leaves_by: str = CTRL_C
    code: int = 130  # of a program that is ended by Ctrl-C
    terminal: str = "dumb"


class Reader:
    """Types commands, with nothing set that a fresh account hasn't. His `demo` model is a tiny random one.

    Leaving the `with` ends whatever was started, and removes the home.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sr-", dir="/tmp"))  # a socket's path is limited
        self.home, self.here = self.folder / "home", self.folder / "here"
        self.here.mkdir()
        write_tiny_model(self.home / ".stateroom" / "models" / "demo", context=CONTEXT)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("STATEROOM_")}
        inherited.pop("XDG_RUNTIME_DIR", None)
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.env = inherited | {"HOME": str(self.home), "PATH": programs}

    def types(self, line: str, given: str = "") -> str:
        """One line; gives what it showed. What is started by `&` is waited for as a person would."""
        said = self.folder / "said"
        with said.open("wb") as out:  # not a pipe: what stays in the background would hold it open
            done = subprocess.run(
                ["bash", "-c", line], env=self.env, cwd=self.here, timeout=COMMAND_S,
                input=given.encode(), stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        shown = said.read_text(errors="replace")
        assert done.returncode == 0, f"{line}\nfailed with {done.returncode}: {shown}"
        assert "Traceback" not in shown, f"{line}\n{shown}"
        if command(line).endswith("&"):
            self._wait_until_it_answers()
        return shown

    def runs(self, program: str) -> str:
        """A Python program, as it stands."""
        done = subprocess.run(
            [sys.executable, "-c", program], env=self.env, cwd=self.here,
            capture_output=True, text=True, timeout=COMMAND_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{program}\n{done.stderr}"
        assert done.stderr == ""
        return done.stdout

    def looks_at(self, line: str, screen: Screen) -> str:
        """A program that shows something until it is left."""
        with Terminal(
            ["bash", "-c", f"exec env TERM={screen.terminal} {command(line)}"], env=self.env
        ) as terminal:
            terminal.wait_for(screen.shows)
            if screen.types:
                since = len(terminal.shown)
                terminal.type(screen.types)
                terminal.wait_for(screen.then_shows, since)
            terminal.type(screen.leaves_by)
            assert terminal.leave() == screen.code, terminal.shown
            assert "Traceback" not in terminal.shown
            return terminal.shown

    def _wait_until_it_answers(self) -> None:
        endpoint = f"ipc://{self.home}/.stateroom/run/stateroom.sock"
        with connect(endpoint, app="reader", timeout_s=START_S) as room:
            room.hello()

    def leaves(self) -> list[psutil.Process]:
        """What runs on though it was stopped: a daemon's last steps may take a moment."""
        return psutil.wait_procs(self._processes(), timeout=LEAVE_S)[1]

    def _processes(self) -> list[psutil.Process]:
        """What runs with this home."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("HOME") == str(self.home):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes():
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
