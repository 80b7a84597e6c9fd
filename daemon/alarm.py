"""A timer of the event loop that rings once, at the earliest of the times asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """Calls back once at the earliest of the times asked for."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def ring_in(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._handle is not None:
            if self._handle.when() <= loop.time() + seconds:
                return
            self._handle.cancel()
        self._handle = loop.call_later(seconds, self._ring)

    def _ring(self) -> None:
        self._handle = None
        self._callback()

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
