"""Programs of the system, run with a limit of time, and what they said."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stateroom.deploy.service import ServiceError

PROGRAM_S = 60.0


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def words(self) -> str:
        """What it complained of, in a line."""
        return " ".join((self.err or self.out).split()) or f"it left with code {self.code}"


Run = Callable[[Sequence[str]], Said]


def run(command: Sequence[str]) -> Said:
    """Raises `ServiceError` when there is no such program, or it doesn't come to an end."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROGRAM_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise ServiceError(f"There is no {command[0]} on this machine.") from None
    except subprocess.TimeoutExpired:
        raise ServiceError(f"`{' '.join(command)}` did not end within {PROGRAM_S:g} s.") from None
    return Said(done.returncode, done.stdout, done.stderr)
