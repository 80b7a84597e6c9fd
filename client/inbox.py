"""Between a shell's socket and those who wait: an inbox for every open request. Pure but for waking a waiter.

`Inbox` wakes a thread, `AsyncInbox` a coroutine; an `Exchange` puts what a `Connection` says into them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

from stateroom.client.connection import (
    Connection,
    Failed,
    Happening,
    Ignored,
    Part,
    Update,
    makes_unnamed,
)
from stateroom.client.errors import ClientError, SlowConsumer, StateroomError
from stateroom.client.protocol import Request, Result
from stateroom.client.timeouts import Wait

if TYPE_CHECKING:
    import asyncio

# Replies of one stream waiting for a reader that does not take them: some megabytes, minutes of decoding.
INBOX_REPLIES_MAX = 65_536

LOOK_UP_S = 1.0  # between two looks of a thread that waits

Error = StateroomError | ClientError
Item = Part | Result | Error


class Ending:
    """How a request ended, as far as its reader has read. The last reply stays, for whoever asks again.

    Attributes:
        request_id: the request's id, once it was sent.
        final: the result or the error that was its last reply, once that was taken.
        cancelled: the reader has asked for the end.
        unnamed: the request makes sessions that nobody knows of who hasn't read its result.
    """

    request_id: int | None = None
    final: Result | Error | None = None
    cancelled: bool = False
    unnamed: bool = False

    def _open(self, item: Item) -> Part | Result:
        if isinstance(item, Result | StateroomError | ClientError):
            self.final = item
        if isinstance(item, StateroomError | ClientError):
            raise item
        return item


class Inbox(Ending):
    """Filled by the thread that owns the socket, read by another.

    Args:
        on_cancel: asks the daemon to end this inbox's request; called from any thread.
    """

    def __init__(self, on_cancel: Callable[[Inbox], None]) -> None:
        self._on_cancel = on_cancel
        self._items: SimpleQueue[Item] = SimpleQueue()

    def __len__(self) -> int:
        return self._items.qsize()

    def put(self, item: Item) -> None:
        self._items.put(item)

    def take(self) -> Part | Result:
        """Waits for the next reply; a `Result` is the last.

        Raises:
            StateroomError, ClientError: the request failed. Its deadline limits the wait.
        """
        item = self._next()
        if isinstance(item, Result | StateroomError | ClientError):
            self._items.put(item)
        return self._open(item)

    def _next(self) -> Item:
        # A Ctrl-C in the instant before a thread falls asleep doesn't wake it: it looks up now and then.
        while True:
            try:
                return self._items.get(timeout=LOOK_UP_S)
            except Empty:
                continue

    def unread(self) -> list[Item]:
        """What nobody will read any more."""
        items = []
        with suppress(Empty):
            while True:
                items.append(self._items.get_nowait())
        return items

    def cancel(self) -> None:
        """Asks the daemon to end the request, if it hasn't ended; waits for nothing."""
        if self.final is None and not self.cancelled:
            self.cancelled = True
            self._on_cancel(self)

    def drain(self) -> Result | Error:
        """Waits for the end; an error is returned, not raised."""
        while self.final is None:
            with suppress(StateroomError, ClientError):
                self.take()
        return self.final


class AsyncInbox(Ending):
    """Filled and read in one event loop. As `Inbox`, else."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_cancel: Callable[[AsyncInbox], None]) -> None:
        self._loop = loop
        self._on_cancel = on_cancel
        self._items: deque[Item] = deque()
        self._waiters: list[asyncio.Future[None]] = []

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        self._items.append(item)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def take(self) -> Part | Result:
        """As `Inbox.take`; a wait that is cancelled loses no reply."""
        while not self._items:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter
        item = self._items[0]
        if not isinstance(item, Result | StateroomError | ClientError):
            self._items.popleft()
        return self._open(item)

    def unread(self) -> list[Item]:
        return list(self._items)

    def cancel(self) -> None:
        if self.final is None and not self.cancelled:
            self.cancelled = True
            self._on_cancel(self)

    async def drain(self) -> Result | Error:
        while self.final is None:
            with suppress(StateroomError, ClientError):
                await self.take()
        return self.final


I = TypeVar("I", Inbox, AsyncInbox)  # noqa: E741


class Exchange(Generic[I]):
    """A connection, and who waits for each of its requests.

    After each call the shell sends what `connection.frames_to_send()` gives.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._inboxes: dict[int, I] = {}

    def start(self, request: Request, wait: Wait, inbox: I, now: float) -> None:
        """Opens a request; what can't even be sent fails in its inbox."""
        try:
            inbox.request_id = self.connection.start(request, wait, now)
        except (StateroomError, ClientError) as error:
            inbox.put(error)
        else:
            self._inboxes[inbox.request_id] = inbox
            inbox.unnamed = makes_unnamed(request)

    def receive(self, frame: bytes, now: float) -> None:
        self._deliver(self.connection.receive(frame, now))

    def cancel(self, inbox: I, now: float) -> None:
        if inbox.request_id in self._inboxes:
            self.connection.cancel(inbox.request_id, now)
        elif inbox.unnamed:
            # Its result has come, but whoever waited was gone by then.
            for item in inbox.unread():
                if isinstance(item, Result):
                    self.connection.discard(item)

    def expire(self, now: float) -> None:
        self._deliver(self.connection.expire(now))

    def lose(self, why: str) -> None:
        self._deliver(self.connection.lose(why))

    def _deliver(self, happenings: list[Happening]) -> None:
        for happening in happenings:
            if isinstance(happening, Ignored):
                continue  # late, or not ours: nobody waits for it
            inbox = self._inboxes[happening.request_id]
            if isinstance(happening, Update):
                inbox.put(happening.body)
                if len(inbox) >= INBOX_REPLIES_MAX:
                    self._deliver(self.connection.abandon(happening.request_id, _slow()))
                continue
            del self._inboxes[happening.request_id]
            if inbox.cancelled and inbox.unnamed and not isinstance(happening, Failed):
                self.connection.discard(happening.result)
            inbox.put(happening.error if isinstance(happening, Failed) else happening.result)


def _slow() -> SlowConsumer:
    return SlowConsumer(
        f"{INBOX_REPLIES_MAX} replies of this stream were waiting to be read, so it was cancelled. Read it "
        "while it runs, or decode with stream=False."
    )
