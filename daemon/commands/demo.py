"""`stateroom demo`."""

from __future__ import annotations

import signal
from types import FrameType

from stateroom.daemon.commands.model import fetch_demo
from stateroom.daemon.commands.terminal import out


def demo() -> None:
    """Watch two programs share one daemon and one small model; under a minute, nothing stays running."""
    from stateroom.daemon.demo.run import run

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)  # what it started is stopped then, too
    run(fetch_demo().path, out)
