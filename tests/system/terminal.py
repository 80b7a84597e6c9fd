"""A program on a pseudo-terminal, as a person would use it: reads what it shows, types, presses Ctrl-C."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import termios
import time
from types import TracebackType
from typing import Self

CTRL_C, CTRL_D = "\x03", "\x04"
WAIT_S = 60.0


class Terminal:
    """Starts a program whose stdin, stdout and stderr are one terminal. Leaving the `with` ends it."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        attributes = termios.tcgetattr(slave)
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        # A session of its own with this terminal as its controlling one: Ctrl-C then is a SIGINT to it.
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env | {"TERM": "dumb", "COLUMNS": "200"},
            start_new_session=True, preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
        )  # fmt: skip
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, since: int = 0, timeout_s: float = WAIT_S) -> str:
        """Reads until `text` is shown after position `since`; gives what follows that position."""
        deadline = time.monotonic() + timeout_s
        while text not in self.shown[since:]:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} was not shown, but: {self.shown[since:]!r}"
            self.read(left)
        return self.shown[since:]

    def leave(self, timeout_s: float = WAIT_S) -> int:
        """Reads to the end; gives the exit code."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running after: {self.shown!r}"
            self.read(0.1)
        return self.process.returncode

    def wait_for_length(self, length: int, timeout_s: float = WAIT_S) -> None:
        """Reads until this many characters were shown."""
        deadline = time.monotonic() + timeout_s
        while len(self.shown) < length:
            assert time.monotonic() < deadline, f"not more was shown than: {self.shown!r}"
            self.read(0.1)

    def read(self, timeout_s: float) -> None:
        """Takes what is shown within `timeout_s`, if anything."""
        if select.select([self._master], [], [], timeout_s)[0]:
            try:
                self.shown += os.read(self._master, 65536).decode(errors="replace")
            except OSError:  # Linux says EIO once the other side is closed
                time.sleep(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
