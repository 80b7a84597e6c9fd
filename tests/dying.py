"""A process that is killed while it works: how far it said that it had come."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator


def steps_told(work: Iterator[None], seconds: float) -> int:
    """How many steps of `work`, run in a fork, followed the first, until it was killed so long after that."""
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        for _ in work:
            os.write(into, b".")
    os.close(into)
    assert os.read(out, 1) == b"."
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    told = 0
    while more := os.read(out, 4096):
        told += len(more)
    os.close(out)
    return told
