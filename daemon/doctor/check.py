"""One finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["pass", "note", "problem"]


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
