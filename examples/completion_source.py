"""A completion source for an editor: suggestions at the cursor, from a buffer that stays resident.

An editor plugin calls `typed` with the text before the cursor whenever it changes, and shows what `show` is
given. What this does, and every such plugin has to:

- **buffer sync**: `sync` sends the whole text; only what is new since the last time is computed.
- **debounce**: nothing is asked while the user types on; the pause is one constant.
- **cancel on keystroke**: what was asked for an older text is dropped, here and in the daemon.
- **several suggestions by fork**: each goes its own way from tokens that are there already.

Run it by itself to see it at work: `python examples/completion_source.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from stateroom.client import AsyncRoom, AsyncSession, connect_async

PAUSE_S = 0.15  # without a keystroke, before anything is asked
SUGGESTIONS = 3
TOKENS = 24
STOP = ["\n"]

Show = Callable[[str, list[str]], None]


class CompletionSource:
    """One buffer's suggestions. `show(text, suggestions)`: for the text before the cursor as it was then."""

    def __init__(self, room: AsyncRoom, show: Show, pause_s: float = PAUSE_S) -> None:
        self._room, self._show, self._pause_s = room, show, pause_s
        self._buffer: AsyncSession | None = None
        self._asking: asyncio.Task[None] | None = None
        self.computed = 0  # tokens, over all: what a plugin without sessions would pay at every keystroke

    def typed(self, before_cursor: str) -> None:
        """The text before the cursor is this now. Returns at once; what was being asked for is dropped."""
        if self._asking is not None:
            self._asking.cancel()
        self._asking = asyncio.create_task(self._ask(before_cursor, self._asking))

    async def settled(self) -> None:
        """Waits until nothing is being asked for any more."""
        while self._asking is not None and not self._asking.done():
            with suppress(asyncio.CancelledError):
                await self._asking

    async def close(self) -> None:
        """With its buffer; the app's other sessions stay."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
        if self._buffer is not None:
            await self._buffer.close()

    async def _ask(self, text: str, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])  # it gives its forks back first
        await asyncio.sleep(self._pause_s)
        if self._buffer is None:
            self._buffer = await self._room.open(text=text)
        else:
            await self._buffer.sync(text=text)
        receipt = self._buffer.receipt
        self.computed += receipt.prefilled if receipt is not None else 0
        forks = await self._buffer.fork(SUGGESTIONS)
        try:
            found = await asyncio.gather(*(self._suggest(fork, n) for n, fork in enumerate(forks)))
            self._show(text, list(dict.fromkeys(one for one in found if one.strip())))
        finally:
            await asyncio.gather(*(fork.close() for fork in forks))

    @staticmethod
    async def _suggest(fork: AsyncSession, n: int) -> str:
        """The first one is the likeliest; the others are drawn."""
        temperature = 0.0 if n == 0 else 0.8
        async with fork.decode(max_tokens=TOKENS, stop=STOP, temperature=temperature, seed=n) as stream:
            return (await stream.wait()).text


async def main() -> None:
    """Types a line, a key at a time, with a pause now and then."""

    def show(text: str, suggestions: list[str]) -> None:
        print(f"{text!r}")
        for one in suggestions:
            print(f"    {one!r}")

    room = await connect_async(app="completion-example")
    async with room:
        source = CompletionSource(room, show)
        line = "def fibonacci(n):\n    # the n-th number of the sequence\n    if n < 2:"
        for n in range(1, len(line) + 1):
            source.typed(line[:n])
            await asyncio.sleep(0.4 if line[n - 1] in ":\n" else 0.02)
        await source.settled()
        print(f"{source.computed} tokens computed for {len(line)} keystrokes")
        await source.close()


if __name__ == "__main__":
    asyncio.run(main())
