"""A thread for files, beside the one that owns mlx. It does what it is asked in order; no mlx in here.

Whoever sleeps in a poller adds `fileno`, which becomes readable when something was done; the answers are
taken by the thread that asked.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

WAKES = 4096  # bytes taken from the pipe at once, one for each outcome

_Task = Callable[[], Callable[[], None]]  # what is to be done; gives what is to be done with the outcome


class Files:
    """One thread, and what comes of its work."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[_Task | None] = SimpleQueue()
        self._done: deque[Callable[[], None]] = deque()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._thread = threading.Thread(target=self._run, name="files", daemon=True)
        self._thread.start()

    def ask(self, do: Callable[[], T], then: Callable[[T | Exception], None]) -> None:
        """`do` on the thread; `then` takes what it gave or raised, in a `turn` of whoever asks."""

        def task() -> Callable[[], None]:
            try:
                outcome: T | Exception = do()
            except Exception as error:
                outcome = error
            return lambda: then(outcome)

        self._asked.put(task)

    @property
    def ready(self) -> bool:
        """There is an outcome."""
        return bool(self._done)

    def turn(self) -> None:
        """Hands one outcome over, so that a turn stays short."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, WAKES)  # before looking, so that none is missed
        if self._done:
            self._done.popleft()()

    def wait(self, seconds: float) -> bool:
        """Sleeps until there is an outcome; False when there is none yet."""
        return bool(self._done or select.select([self._woken], [], [], max(seconds, 0.0))[0])

    def fileno(self) -> int:
        return self._woken

    def close(self) -> None:
        """Ends the thread once it has done all that it was asked."""
        self._asked.put(None)
        self._thread.join()
        os.close(self._woken)
        os.close(self._wake)

    def _run(self) -> None:
        while self._next():
            with contextlib.suppress(BlockingIOError):  # full: it is readable
                os.write(self._wake, b".")

    def _next(self) -> bool:
        """False at the end. In a frame of its own: nothing of what was done is held until more is asked."""
        task = self._asked.get()
        if task is not None:
            self._done.append(task())
        return task is not None
