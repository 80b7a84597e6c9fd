"""The two sides of a claim: a private daemon with a connected client, and the peer in a process of its own.

Both processes that step a model are started with the same BLAS and thread counts, and only one of them
works at a time: the other sleeps, in `poll` or in `read`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.peer import Peer

from stateroom.client import Room, connect
from stateroom.daemon.blas import VARIABLE as BLAS
from stateroom.daemon.commands.model import fetch_demo
from stateroom.daemon.settings.known import PREFIX

START_S = 120.0  # for the daemon to answer and its model to load
STOP_S = 10.0
ROOT = Path(__file__).parent.parent
TEXT = ROOT / "LICENSE"  # prose of 2,400 tokens that never changes; longer prompts repeat it


@dataclass(frozen=True)
class Model:
    """Which model a claim runs on. `layers`: of a toy made for the purpose; None: the demo model."""

    layers: int | None = None
    width: int = 32
    vocab: int = 300
    context: int = 4096

    @property
    def name(self) -> str:
        return "135M" if self.layers is None else f"toy, {self.layers} layers"


DEMO = Model()
TOY = Model(layers=2)


@dataclass(frozen=True)
class Sides:
    """Ours and theirs, over the same weights."""

    model: Model
    room: Room
    peer: Peer

    def prompt(self, tokens: int, start: int = 0) -> list[int]:
        """Tokens of real text; of a toy, numbers that only look like some."""
        if self.model.layers is not None:
            return [(7 * (start + i) ** 2 + 13 * (start + i) + 5) % self.model.vocab for i in range(tokens)]
        text = self.peer.encode(TEXT.read_text(encoding="utf-8"))
        return (text * ((start + tokens) // len(text) + 1))[start : start + tokens]


class Rig:
    """Makes the sides a claim asks for, keeps those last asked for, and ends all at the end.

    Attributes:
        quick: a toy instead of the demo model, few tokens and rounds: to see that the scripts work.
        scratch: a folder for files, which goes at the end.
    """

    def __init__(self, quick: bool = False) -> None:
        self.quick = quick
        self.scratch = Path(tempfile.mkdtemp(prefix="sr-bench-", dir="/tmp"))  # socket paths are limited
        self._sides: Sides | None = None
        self._open = ExitStack()

    def rounds(self, wanted: int) -> int:
        return 1 if self.quick else wanted

    def sides(self, model: Model) -> Sides:
        """A daemon and a peer that have the model loaded."""
        model = self.chosen(model)
        if self._sides is None or self._sides.model != model:
            self._open.close()
            path = self.path(model)
            peer = self._open.enter_context(Peer(path))
            self._sides = Sides(model, self._open.enter_context(self.daemon(path)), peer)
        return self._sides

    def peer(self, model: Model) -> AbstractContextManager[Peer]:
        """Only the peer's process, for claims that need no daemon."""
        return Peer(self.path(self.chosen(model)))

    def folder(self, model: Model) -> Path:
        """The model as a directory that mlx-lm's own programs load."""
        model = self.chosen(model)
        if model.layers is not None:
            return self.path(model)
        folder = self.scratch / "exported"
        if not folder.exists():
            self.sides(model).peer.export(folder)
        return folder

    def chosen(self, model: Model) -> Model:
        return TOY if self.quick and model == DEMO else model

    def path(self, model: Model) -> Path:
        if model.layers is None:
            return fetch_demo().path
        path = self.scratch / f"toy-{model.layers}-{model.width}-{model.vocab}"
        if not path.exists():
            from tests.tiny import write_tiny_model  # brings in mlx

            write_tiny_model(
                path,
                "llama",
                layers=model.layers,
                width=model.width,
                vocab=model.vocab,
                context=model.context,
            )
        return path

    @contextmanager
    def daemon(self, model: Path, *options: str) -> Iterator[Room]:
        """A private daemon that has the model loaded. `options`: more of `serve`."""
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        kept = {
            name: value for name, value in os.environ.items() if name == BLAS or not name.startswith(PREFIX)
        }
        own = {"STATEROOM_RUNTIME_DIR": str(folder / "run"), "STATEROOM_HOME": str(folder / "home")}
        command = [sys.executable, "-m", "stateroom.daemon.cli", "serve", "--model", str(model)]
        command += options
        with open(folder / "log", "w+b") as log:
            process = subprocess.Popen(
                command, env=kept | own, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            try:
                endpoint = f"ipc://{folder / 'run' / 'stateroom.sock'}"
                room = connect(endpoint, app="benchmarks", timeout_s=START_S)
                with room:
                    _wait_until_loaded(room, process)
                    yield room
            except BaseException:
                log.seek(0)
                sys.stderr.write(log.read().decode("utf-8", "replace")[-4000:])
                raise
            finally:
                process.terminate()
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._open.__exit__(kind, error, trace)  # with what went wrong, the daemon's log is shown
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)


def _wait_until_loaded(room: Room, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while not any(model.loaded for model in room.hello().models):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the daemon has not loaded the model")
        time.sleep(0.05)
