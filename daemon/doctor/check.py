"""One finding of the doctor, and a limit on how long a disk may take to give one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

State = Literal["pass", "note", "problem"]
T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """One line of the doctor. `note` is nothing wrong, but worth knowing; `advice` says what to do."""

    name: str
    state: State
    finding: str
    advice: str | None = None


def passed(name: str, finding: str) -> Check:
    return Check(name, "pass", finding)


def noted(name: str, finding: str, advice: str | None = None) -> Check:
    return Check(name, "note", finding, advice)


def problem(name: str, finding: str, advice: str | None = None) -> Check:
    return Check(name, "problem", finding, advice)


def within(limit_s: float, action: Callable[[], T]) -> T:
    """What the action gives. It may go on behind our back: a disk that sleeps can't be interrupted.

    Raises TimeoutError when it takes longer, and whatever the action raises.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def act() -> None:
        try:
            done.append(action())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(limit_s)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return done[0]
