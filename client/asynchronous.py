"""`connect_async()` and the socket behind an `AsyncRoom`: the client's shell for asyncio.

The same as `blocking.py`, with tasks where that has a thread: one that receives for as long as the link
lives, and is only cancelled with it, since a cancelled receive may lose a frame; and one at the monitor.
Sending is done where the request is made. All of it belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from typing import cast

import zmq
import zmq.asyncio

from stateroom.client.async_room import AsyncRoom
from stateroom.client.blocking import (
    BURST_MAX,
    CLOSED,
    FAILURES,
    FRAMES_MAX,
    GONE,
    LINK_EVENTS,
    LOST_EVENTS,
    RETRY_S,
    event_of,
    hello,
    key_refused,
    no_daemon,
    prepare,
)
from stateroom.client.connection import Connection
from stateroom.client.errors import (
    BadEndpoint,
    ClientError,
    Disconnected,
    RequestTimeout,
    StateroomError,
    WrongProcess,
)
from stateroom.client.inbox import AsyncInbox, Exchange
from stateroom.client.keyfile import ClientKey, key_for
from stateroom.client.paths import check_endpoint, default_endpoint
from stateroom.client.protocol import HelloResult, Request, Result
from stateroom.client.timeouts import CONNECT_TIMEOUT_S, STARTING_TIMEOUT_S, Timeouts, Wait


def connect_async(
    endpoint: str | None = None,
    *,
    app: str = "default",
    key: str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
    timeouts: Timeouts | None = None,
) -> AsyncRoom:
    """As `connect`, for asyncio: `async with connect_async() as room`, or `room = await connect_async()`.

    Errors as for `connect`, when it is awaited or entered; `BadEndpoint` and `BadKey` at once.
    """
    where = default_endpoint() if endpoint is None else endpoint
    check_endpoint(where)
    return AsyncRoom(AsyncSocket(where, app, timeout_s, timeouts or Timeouts(), key_for(where, key)))


class _AsyncLink:
    """A socket, its monitor, the requests in flight on it, and the tasks that serve them.

    Attributes:
        connected: somebody listens there; `greeted`: and speaks.
        refused: and doesn't let us in; `denied`: because of our key, as it said itself.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        first_id: int,
        timeouts: Timeouts,
        key: ClientKey | None,
    ) -> None:
        self.exchange: Exchange[AsyncInbox] = Exchange(
            Connection(first_id=first_id, cancel_s=timeouts.cancel_s)
        )
        self.connected = self.greeted = self.refused = self.denied = False
        self._loop = asyncio.get_running_loop()
        self._dealer = context.socket(zmq.DEALER)
        prepare(self._dealer, key)
        self._monitor = self._dealer.get_monitor_socket(LINK_EVENTS)
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        try:
            self._dealer.connect(endpoint)
        except zmq.ZMQError as error:
            self.close(GONE)
            raise BadEndpoint(f"ZeroMQ can't connect to {endpoint}: {error}.") from error
        self._tasks = [
            self._loop.create_task(self._receive()),
            self._loop.create_task(self._look_at_monitor()),
        ]

    @property
    def lost(self) -> bool:
        return self.exchange.connection.closed

    def flush(self) -> None:
        """Sends what is due, and sets the timer to the next deadline."""
        for frame in self.exchange.connection.frames_to_send():
            sent = cast("asyncio.Future[None]", self._dealer.send(frame, zmq.NOBLOCK))  # done already
            if sent.exception() is not None:
                self.exchange.lose(f"The daemon has left {FRAMES_MAX} frames unread.")
                return
        deadline = self.exchange.connection.next_deadline
        if deadline is not None and (self._timer is None or self._timer.when() > deadline):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self.exchange.expire(self._loop.time())
        self.flush()

    async def _receive(self) -> None:
        try:
            while True:
                for _ in range(BURST_MAX):
                    parts = await self._dealer.recv_multipart()
                    self.exchange.receive(b"".join(parts), self._loop.time())
                    self.flush()
                await asyncio.sleep(0)  # while there is more, the wait above doesn't give way
        finally:
            self.exchange.lose(GONE)

    async def _look_at_monitor(self) -> None:
        event = 0
        while not event & LOST_EVENTS:
            event = event_of(await self._monitor.recv_multipart())
            self.connected = self.connected or event == zmq.EVENT_CONNECTED
            self.greeted = self.greeted or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.refused = self.refused or bool(event & FAILURES)
            self.denied = self.denied or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        with suppress(zmq.Again):  # what came before the end still counts
            for _ in range(FRAMES_MAX):
                parts = await self._dealer.recv_multipart(zmq.NOBLOCK)
                self.exchange.receive(b"".join(parts), self._loop.time())
        self.exchange.lose(GONE)

    def close(self, why: str) -> None:
        if self._dealer.closed:
            return
        self.exchange.lose(why)
        for task in self._tasks:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._dealer.disable_monitor()
        self._monitor.close(0)
        self._dealer.close(0)


class AsyncSocket:
    """The link of an `AsyncRoom`, made when it is needed and again when it was lost.

    Attributes:
        greeting: what the daemon said when it was last connected to.
    """

    greeting: HelloResult

    def __init__(
        self, endpoint: str, app: str, connect_s: float | None, timeouts: Timeouts, key: ClientKey | None
    ) -> None:
        self.endpoint = endpoint
        self._key = key
        self.app = app
        self.timeouts = timeouts
        self.closed = False
        self._connect_s = CONNECT_TIMEOUT_S if connect_s is None else connect_s
        self._starting_s = STARTING_TIMEOUT_S if connect_s is None else connect_s
        self._process = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._connecting = asyncio.Lock()
        self._context: zmq.asyncio.Context | None = None
        self._link: _AsyncLink | None = None
        self._attempted: _AsyncLink | None = None  # until it has been greeted
        self._next_id = 1

    async def start(self, request: Request, wait: Wait) -> AsyncInbox:
        """Sends a request, whose replies, or failure, come into the inbox. Connects first where it must.

        Raises:
            Disconnected: the room was closed.
            WrongProcess: this is a forked child, or another event loop.
            NoDaemon, StateroomError: as for `connect`.
        """
        link = await self.link()
        inbox = AsyncInbox(self._running_loop(), self._cancel)
        link.exchange.start(request, wait, inbox, self._running_loop().time())
        link.flush()
        return inbox

    async def link(self) -> _AsyncLink:
        """The link, connected and greeted. Errors as for `start`."""
        self._running_loop()
        async with self._connecting:
            if self._link is not None and self._link.lost:
                self._part(self._link)
            if self._link is None:
                self._link = await self._establish()
            return self._link

    def close(self) -> None:
        """Ends the link, and open requests with `Disconnected`."""
        self.closed = True
        if os.getpid() != self._process:
            return
        for link in (self._link, self._attempted):
            if link is not None:
                link.close(CLOSED)
        if self._context is not None:
            self._context.term()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if os.getpid() != self._process:
            raise WrongProcess("This room was opened before a fork; open another in the child.")
        if self._loop is None:
            self._loop, self._thread = loop, threading.get_ident()
        elif self._loop is not loop:
            raise WrongProcess("This room belongs to another event loop; open another in this one.")
        return loop

    def _cancel(self, inbox: AsyncInbox) -> None:
        # Called from finalizers too, so perhaps from another thread, or when the loop has ended.
        if self._loop is None or os.getpid() != self._process:
            return
        if threading.get_ident() == self._thread:
            self._cancel_here(inbox)
        else:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel_here, inbox)

    def _cancel_here(self, inbox: AsyncInbox) -> None:
        if self._link is not None and self._loop is not None and not self._loop.is_closed():
            self._link.exchange.cancel(inbox, self._loop.time())
            self._link.flush()

    async def _establish(self) -> _AsyncLink:
        """Connects and says hello, trying again until a daemon answers or the time is up."""
        loop = self._running_loop()
        begin, limit_s = loop.time(), self._connect_s
        while not self.closed:
            link, answer = await self._attempt(begin + limit_s - loop.time())
            if isinstance(answer, HelloResult):
                self.greeting = answer
                self._connect_s = min(self._connect_s, CONNECT_TIMEOUT_S)  # a daemon lost is not one starting
                return link
            self._part(link)
            if isinstance(answer, RequestTimeout):
                if link.connected and not link.greeted and limit_s < self._starting_s:
                    limit_s = self._starting_s  # there may be a daemon yet
                    continue
                raise no_daemon(self.endpoint, limit_s, silent=link.connected)
            if not isinstance(answer, Disconnected):
                raise cast("StateroomError | ClientError", answer)
            late = loop.time() + RETRY_S >= begin + limit_s
            if link.denied or (late and link.refused):
                raise key_refused(self.endpoint, self._key)
            if late:
                raise no_daemon(self.endpoint, limit_s, silent=False)
            await asyncio.sleep(RETRY_S)
        raise Disconnected(CLOSED)

    async def _attempt(self, timeout_s: float) -> tuple[_AsyncLink, Result | StateroomError | ClientError]:
        loop = self._running_loop()
        self._context = self._context or zmq.asyncio.Context()
        link = _AsyncLink(self._context, self.endpoint, self._next_id, self.timeouts, self._key)
        self._attempted = link
        inbox = AsyncInbox(loop, self._cancel)
        try:
            link.exchange.start(hello(self.app), Wait(timeout_s), inbox, loop.time())
            link.flush()
            return link, await inbox.drain()
        except BaseException:
            self._part(link)
            raise
        finally:
            self._attempted = None

    def _part(self, link: _AsyncLink) -> None:
        self._next_id = link.exchange.connection.next_id
        link.close(GONE)
        self._link = None
