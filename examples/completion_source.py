"""A completion source for an editor: suggestions at the cursor, from a buffer that stays resident.

An editor plugin calls `typed` with the text before the cursor whenever it changes, and shows what `show` is
given. What this does, and every such plugin has to:

- **buffer sync**: `sync` sends the whole text; only what is new since the last time is computed.
- **debounce**: nothing is asked while the user types on; the pause is one constant.
- **cancel on keystroke**: what was asked for an older text is dropped, here and in the daemon.
- **several suggestions by fork**: each goes its own way from tokens that are there already.
- **a daemon that comes and goes**: without it there are no suggestions, and the next keystroke tries again.

Run it by itself to see it at work: `python examples/completion_source.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from stateroom.client import AsyncRoom, AsyncSession, ClientError, StateroomError, connect_async
from stateroom.client.errors import NotFound

PAUSE_S = 0.15  # without a keystroke, before anything is asked
SUGGESTIONS = 3
TOKENS = 24
STOP = ["\n"]
KEPT_S = 3600.0  # a buffer that nobody types in any more is closed by the daemon
CHARACTERS_MAX, CUT = 12_000, 4_000  # of the text before the cursor, and what is left out at once

Show = Callable[[str, list[str]], None]


def kept(before_cursor: str) -> str:
    """Its end. What is left out grows in large steps: text that begins elsewhere is computed anew."""
    over = max(0, len(before_cursor) - CHARACTERS_MAX)
    return before_cursor[-(-over // CUT) * CUT :]


class CompletionSource:
    """One buffer's suggestions. `show(text, suggestions)`: for the text before the cursor as it was then."""

    def __init__(self, room: AsyncRoom, show: Show, pause_s: float = PAUSE_S) -> None:
        self._room, self._show, self._pause_s = room, show, pause_s
        self._buffer: AsyncSession | None = None
        self._asking: asyncio.Task[None] | None = None
        self.computed = 0  # tokens, over all: what a plugin without sessions would pay at every keystroke
        self.problem = ""  # why there are no suggestions just now

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
            with suppress(ClientError):  # then it ends by itself
                await self._buffer.close()

    async def _ask(self, text: str, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])  # it gives its forks back first
        await asyncio.sleep(self._pause_s)
        try:
            buffer = await self._synced(kept(text))
            self._show(text, await self._suggestions(buffer))
            self.problem = ""
        except (ClientError, StateroomError) as error:  # no daemon, no room, …: for the status line
            self.problem = str(error)

    async def _synced(self, text: str) -> AsyncSession:
        """The buffer's session with this text; a new one where there is none, or none any more."""
        try:
            if self._buffer is not None:
                await self._buffer.sync(text=text)
        except NotFound:  # closed: it wasn't used for too long
            self._buffer = None
        if self._buffer is None:
            self._buffer = await self._room.open(text=text, ttl_s=KEPT_S)
        receipt = self._buffer.receipt
        self.computed += receipt.prefilled if receipt is not None else 0
        return self._buffer

    async def _suggestions(self, buffer: AsyncSession) -> list[str]:
        forks = await buffer.fork(SUGGESTIONS)
        try:
            found = await asyncio.gather(*(self._suggest(fork, n) for n, fork in enumerate(forks)))
            return list(dict.fromkeys(one for one in found if one.strip()))
        finally:
            await asyncio.gather(*(fork.close() for fork in forks), return_exceptions=True)

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
        line = "def fibonacci(n):\n    # the n-th number of the sequence\n    if n < 2:\n        return"
        for n in range(1, len(line) + 1):
            source.typed(line[:n])
            await asyncio.sleep(0.02)
            if line[n - 1] in "(#<":  # whoever types stops to think, and sees what is suggested
                await source.settled()
        await source.settled()
        print(f"{source.computed} tokens computed for {len(line)} keystrokes")
        await source.close()


if __name__ == "__main__":
    asyncio.run(main())
