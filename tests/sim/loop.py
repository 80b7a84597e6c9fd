"""An asyncio loop of virtual time, which stands while something is to do and leaps to the next timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Stuck(AssertionError):
    """Nothing is left that could ever happen, and somebody waits."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs real asyncio code in an order that depends on nothing but the program.

    An exception in a callback ends the run: `first` keeps the first, for nothing may be swallowed here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.jumped_s = 0.0  # of it, in which nobody was awake
        self.first: BaseException | None = None
        self._selector = self  # all that BaseEventLoop asks of it is `select`

    def time(self) -> float:
        return self.now_s

    def select(self, timeout: float | None) -> list[Any]:
        if self.first is not None:
            error, self.first = self.first, None
            raise error
        if timeout is None:
            raise Stuck("nothing is left that could ever happen")
        if timeout > 0:
            self.now_s += timeout
        return []

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def after(self, seconds: float, act: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        """Calls `act` so many seconds from now; what it raises ends the run."""
        return self.call_later(seconds, self._act, act, arguments)

    def soon(self, act: Callable[..., object], *arguments: Any) -> None:
        self.call_soon(self._act, act, arguments)

    @property
    def awake_s(self) -> float:
        return self.now_s - self.jumped_s

    def jump(self, seconds: float) -> None:
        """Time passes at once, as when the machine sleeps."""
        self.now_s += seconds
        self.jumped_s += seconds

    def fail(self, error: BaseException) -> None:
        self.first = self.first or error

    def _act(self, act: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        try:
            act(*arguments)
        except BaseException as error:
            self.fail(error)
