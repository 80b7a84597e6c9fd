"""The daemon of a chaotic run: a real one, with a home and, where it can be had, a small disk of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from stateroom.client import connect
from stateroom.client.errors import ClientError, StateroomError

START_S = 60.0
STOP_S = 30.0
DISK_MIB = 64


class Daemon:
    """Starts, kills, stops one daemon again and again in the same home.

    Attributes:
        small_disk: the state has a disk of its own (a tmpfs, which only root can mount), that may be filled.
    """

    def __init__(self, folder: Path, model: Path, *arguments: str, small_disk: bool = False) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.state = self.home / "state"
        self.endpoint = f"ipc://{folder}/run/s.sock"
        self.log = folder / "daemon.log"
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.state.mkdir(parents=True, mode=0o700)
        self.small_disk = small_disk and self._mount()
        own = {
            "HOME": str(folder),
            "STATEROOM_HOME": str(self.home),
            "STATEROOM_RUNTIME_DIR": str(folder / "run"),
            "STATEROOM_ENDPOINT": self.endpoint,
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("STATEROOM_")}
        self.env = inherited | own
        self._command = [sys.executable, "-m", "tests.chaos.serve", "serve", "--log", "json"]
        self._command += ["--model", str(model), *arguments]

    def _mount(self) -> bool:
        options = f"size={DISK_MIB}m,mode=0700"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.state)], capture_output=True
        )
        return done.returncode == 0

    def start(self) -> None:
        """Until it answers."""
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self.env,
                cwd=Path(__file__).parents[2],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        self.starts += 1
        until = time.monotonic() + START_S
        while True:
            try:
                connect(endpoint=self.endpoint, app="chaos", timeout_s=1.0).close()
                return
            except (ClientError, StateroomError):
                if self._process.poll() is not None:
                    raise AssertionError(
                        f"the daemon left with {self._process.returncode}:\n{self.log_tail()}"
                    ) from None
                if time.monotonic() > until:
                    raise AssertionError(f"no daemon within {START_S} s:\n{self.log_tail()}") from None

    def wait_until_decoding(self) -> None:
        """Until streams run: a kill before that would be one of a worker that is only just starting."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            try:
                with connect(endpoint=self.endpoint, app="chaos", timeout_s=1.0) as room:
                    if any(model["gauges"].get("steps", 0) > 0 for model in room.stats().models):
                        return
            except (ClientError, StateroomError):
                pass
            time.sleep(0.05)

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def workers(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """By SIGTERM, as a service manager does."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there {STOP_S} s after SIGTERM:\n{self.log_tail()}") from None

    def clear(self) -> None:
        """At the end: no process and no mount is left."""
        if self._process is not None and self._process.poll() is None:
            below = self.workers()
            self.kill()
            for worker in below:
                if worker.is_running():
                    worker.kill()
        if self.small_disk:
            subprocess.run(["umount", "-l", str(self.state)], check=False)
