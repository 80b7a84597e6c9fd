"""Keeps a Mac from going to sleep while requests run, and no longer.

macOS sends an idle machine to sleep though a long prefill goes on: nobody types. `caffeinate -i -w PID` holds
that off while it runs, and leaves when the process PID does, so that a daemon that was killed holds nothing.
The screen may go dark, a lid that is closed still counts, and what can't be held is no failure.

Other systems: nothing. Theirs do not go to sleep under a busy process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from structlog.typing import FilteringBoundLogger

from stateroom.daemon.clock import Clock

LEAVE_S = 0.5  # for the program to leave, at the daemon's end; it takes a millisecond
AGAIN_S = 60.0  # a program that left by itself is started again this much later

Start = Callable[[Sequence[str]], "subprocess.Popen[bytes]"]


def keeper_of(system: str = sys.platform) -> tuple[str, ...] | None:
    """The program that keeps this system awake; None: there is no need of one."""
    return ("/usr/bin/caffeinate", "-i", "-w", str(os.getpid())) if system == "darwin" else None


def started(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Raises OSError: there is no such program."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)


class Wakefulness:
    """Starts `command` once requests have run for `after_s`, and ends it when none has for `until_s`.

    `look` is called with whether any runs, about once a second. None for a command: nothing is ever done.
    """

    def __init__(
        self,
        command: Sequence[str] | None,
        after_s: float,
        until_s: float,
        clock: Clock,
        log: FilteringBoundLogger,
        start: Start = started,
    ) -> None:
        self._command, self._after_s, self._until_s = command, after_s, until_s
        self._clock, self._log, self._start = clock, log, start
        self._first_s = self._last_s = 0.0  # of the requests that ran without a pause of `until_s`
        self._busy = False
        self._again_s = clock()
        self._program: subprocess.Popen[bytes] | None = None

    @property
    def held(self) -> bool:
        return self._program is not None

    def look(self, runs: bool) -> None:
        if self._command is None:
            return
        now_s = self._clock()
        if runs:
            self._first_s = self._first_s if self._busy else now_s
            self._busy, self._last_s = True, now_s
        elif self._busy and now_s - self._last_s >= self._until_s:
            self._busy = False
        if self._program is not None and self._program.poll() is not None:
            self._program, self._again_s = None, now_s + AGAIN_S
        if self._busy and self._program is None:
            if now_s - self._first_s >= self._after_s and now_s >= self._again_s:
                self._hold(self._command)
        elif not self._busy and self._program is not None:
            self.let_go()

    def let_go(self) -> None:
        """Ends the program, if it runs. Waits for it, and not for long."""
        program, self._program = self._program, None
        if program is None:
            return
        with contextlib.suppress(OSError):
            program.terminate()
            try:
                program.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()

    def _hold(self, command: Sequence[str]) -> None:
        try:
            self._program = self._start(command)
        except OSError as error:
            self._log.warning("may go to sleep", program=command[0], error=str(error))
            self._command = None
