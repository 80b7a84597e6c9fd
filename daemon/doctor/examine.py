"""All checks, in the order in which they are shown, and what a program is given of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from stateroom.daemon.doctor.check import Check, problem
from stateroom.daemon.doctor.configuration import configuration
from stateroom.daemon.doctor.device import device
from stateroom.daemon.doctor.installation import packages, program, python
from stateroom.daemon.doctor.machine import clock, files, memory
from stateroom.daemon.doctor.models import models
from stateroom.daemon.doctor.places import disk, kept, permissions, socket
from stateroom.daemon.doctor.running import daemon
from stateroom.daemon.doctor.service import service

CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    python, program, packages, device, memory, files, clock,
    configuration, socket, permissions, disk, kept, models, service, daemon,
)  # fmt: skip


def examine() -> Iterator[Check]:
    """All checks, as they are made. One that fails in a way of its own is a problem, and ends no other."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:
            yield problem(check.__name__, f"could not be checked: {type(error).__name__}: {error}")


def told(found: Sequence[Check]) -> dict[str, Any]:
    """The findings as JSON has them; this shape only grows."""
    return {
        "version": version("stateroom"),
        "ok": not any(check.state == "problem" for check in found),
        "checks": [asdict(check) for check in found],
    }
