"""`connect()` and the thread behind a `Room`: the client's shell for threads.

One thread owns the ZeroMQ socket. Everyone else puts a command into a queue, wakes that thread through a
socket pair, and waits at an inbox; so any number of threads may use a Room and its sessions at once,
with no lock held across a wait.

A link is one socket, connected once. It never reconnects by itself (`RECONNECT_IVL` lies beyond its
life), so that nothing meant for one daemon reaches the next before `hello` has said whose requests
these are. When it is lost, which the socket's monitor tells at once, open requests fail with
`Disconnected`; the next request makes a new link, whose ids go on where the last one's ended.
"""

from __future__ import annotations

import atexit
import math
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, cast

import zmq

from stateroom.client.connection import Connection
from stateroom.client.errors import (
    BadEndpoint,
    BadKey,
    ClientError,
    Disconnected,
    KeyRefused,
    NoDaemon,
    RequestTimeout,
    StateroomError,
    WrongProcess,
)
from stateroom.client.inbox import Exchange, Inbox
from stateroom.client.keyfile import VARIABLE, ClientKey, key_for
from stateroom.client.paths import check_endpoint, default_endpoint
from stateroom.client.protocol import Hello, HelloResult, Request, Result
from stateroom.client.room import Room
from stateroom.client.timeouts import CONNECT_TIMEOUT_S, STARTING_TIMEOUT_S, Timeouts, Wait

FRAMES_MAX = 1_024  # unread frames in either direction of the socket; ZeroMQ's high-water marks
NEVER_MS = 24 * 3600 * 1000  # "reconnect" after this long
RETRY_S = 0.05  # between attempts to connect
BURST_MAX = 256  # frames taken at a time, so that a flood doesn't starve commands and deadlines
JOIN_S = 2.0  # for the thread to leave, which takes it milliseconds
GONE = "The daemon went away, or closed the connection."
CLOSED = "This Room is closed."

FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
LOST_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | FAILURES
LINK_EVENTS = LOST_EVENTS | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED


def connect(
    endpoint: str | None = None,
    *,
    app: str = "default",
    key: str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
    timeouts: Timeouts | None = None,
) -> Room:
    """Connects to a daemon; starts none.

    Args:
        endpoint: where it listens; by default as docs/protocol.md says, from the environment.
        app: who asks. Sessions belong to an app, and an app sees only its own.
        key: the file that lets this client in at a `tcp://` endpoint; by default `$STATEROOM_KEY_FILE`.
        timeout_s: how long to keep trying until a daemon answers; by default 1.5 s, and 10 s where a service
            manager listens, and so may be starting one. (When it was lost later, the next
            request tries as long, but `CONNECT_TIMEOUT_S` at most.)
        timeouts: the patience of single requests.

    Raises:
        NoDaemon: none answers. The message says how to start one.
        BadEndpoint: the endpoint can't work.
        BadKey: the key file can't be used.
        KeyRefused: the daemon doesn't let this key in.
        StateroomError: the daemon refuses (say, `WrongVersion`).
    """
    where = default_endpoint() if endpoint is None else endpoint
    check_endpoint(where)
    thread = SocketThread(where, app, timeout_s, timeouts or Timeouts(), key_for(where, key))
    try:
        thread.greet()
    except BaseException:
        thread.stop()
        raise
    return Room(thread)


def prepare(dealer: zmq.Socket[Any], key: ClientKey | None) -> None:
    """Sets a socket's options, before it is connected.

    Raises:
        BadKey: libzmq doesn't take these keys.
    """
    if key is not None:
        try:
            dealer.set(zmq.CURVE_SERVERKEY, key.server.encode())
            dealer.set(zmq.CURVE_PUBLICKEY, key.public.encode())
            dealer.set(zmq.CURVE_SECRETKEY, key.secret.encode())
        except (zmq.ZMQError, UnicodeEncodeError) as error:
            dealer.close(0)
            raise BadKey(f"{key.path} holds no keys that ZeroMQ could use; make it anew.") from error
    dealer.set(zmq.LINGER, 0)  # else unsent frames keep the process from leaving
    dealer.set(zmq.SNDHWM, FRAMES_MAX)
    dealer.set(zmq.RCVHWM, FRAMES_MAX)
    dealer.set(zmq.RECONNECT_IVL, NEVER_MS)


def event_of(message: list[bytes]) -> int:
    """The event of a monitor's message. (pyzmq has this too, where it brings in asyncio: 30 ms.)"""
    return int.from_bytes(message[0][:2], sys.byteorder)


def hello(app: str) -> Hello:
    return Hello(app=app, client=f"stateroom-python, process {os.getpid()}")


def key_refused(endpoint: str, key: ClientKey | None) -> KeyRefused:
    if key is None:
        return KeyRefused(
            f"Who listens at {endpoint} lets nobody in without a key. Give connect(key=FILE) or set "
            f"{VARIABLE}; `stateroom keys client NAME` makes such a file where the daemon is."
        )
    return KeyRefused(
        f"The daemon at {endpoint} doesn't let the key in {key.path} in: it was revoked, or never allowed, "
        "or is for another daemon. `stateroom keys list` there names those that are."
    )


def no_daemon(endpoint: str, waited_s: float, *, silent: bool) -> NoDaemon:
    if silent:
        what = f"Something listens at {endpoint}, but it did not answer within {waited_s:g} s."
        return NoDaemon(
            f"{what} If it is a daemon that hangs, stop it and start another with `stateroom serve`."
        )
    return NoDaemon(f"No daemon answers at {endpoint}. Start one with `stateroom serve`.")


# ---------------------------------------------------------------- one link


class _Link:
    """A socket, its monitor, and the requests in flight on it. Used by the socket's thread only.

    Attributes:
        connected: somebody listens there; `greeted`: and speaks.
        refused: and doesn't let us in; `denied`: because of our key, as it said itself.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        first_id: int,
        timeouts: Timeouts,
        key: ClientKey | None,
    ):
        self.exchange: Exchange[Inbox] = Exchange(Connection(first_id=first_id, cancel_s=timeouts.cancel_s))
        self.connected = self.greeted = self.refused = self.denied = False
        self.dealer = context.socket(zmq.DEALER)
        prepare(self.dealer, key)
        self.monitor = self.dealer.get_monitor_socket(LINK_EVENTS)
        try:
            self.dealer.connect(endpoint)
        except zmq.ZMQError as error:
            self.close(GONE)
            raise BadEndpoint(f"ZeroMQ can't connect to {endpoint}: {error}.") from error

    @property
    def lost(self) -> bool:
        return self.exchange.connection.closed

    def turn(self, wake: socket.socket | None, wait_s: float | None) -> None:
        """Sends what is due, waits for something to happen (at most `wait_s`), and takes it in."""
        try:
            for frame in self.exchange.connection.frames_to_send():
                self.dealer.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self.exchange.lose(f"The daemon has left {FRAMES_MAX} frames unread.")
            return
        deadline = self.exchange.connection.next_deadline
        until_s = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
        wait_ms = min(until_s, math.inf if wait_s is None else wait_s) * 1000
        watched: list[tuple[Any, int]] = [(self.dealer, zmq.POLLIN), (self.monitor, zmq.POLLIN)]
        if wake is not None:
            watched.append((wake.fileno(), zmq.POLLIN))
        ready = dict(zmq.zmq_poll(watched, -1 if wait_ms == math.inf else math.ceil(wait_ms)))
        if self.dealer in ready:
            self._receive(BURST_MAX)
        if self.monitor in ready:
            self._look_at_monitor()
        self.exchange.expire(time.monotonic())

    def _receive(self, most: int) -> None:
        with suppress(zmq.Again):
            for _ in range(most):
                self.exchange.receive(b"".join(self.dealer.recv_multipart(zmq.NOBLOCK)), time.monotonic())

    def _look_at_monitor(self) -> None:
        event = event_of(self.monitor.recv_multipart())
        self.connected = self.connected or event == zmq.EVENT_CONNECTED
        self.greeted = self.greeted or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        self.refused = self.refused or bool(event & FAILURES)
        self.denied = self.denied or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        if event & LOST_EVENTS:
            self._receive(FRAMES_MAX)  # what came before the end still counts
            self.exchange.lose(GONE)

    def close(self, why: str | None) -> None:
        """Closes the socket. `why` is told to those who still wait; None: they hear nothing."""
        if why is not None:
            self.exchange.lose(why)
        self.dealer.disable_monitor()
        self.monitor.close(0)
        self.dealer.close(0)


# ---------------------------------------------------------------- the thread


@dataclass(frozen=True)
class _Start:
    request: Request | None  # None: just see that there is a link; answered with its `HelloResult`
    wait: Wait
    inbox: Inbox


@dataclass(frozen=True)
class _Cancel:
    inbox: Inbox


class SocketThread:
    """Owns the socket. Its public methods may be called from any thread.

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
        self._connect_s = CONNECT_TIMEOUT_S if connect_s is None else connect_s
        self._starting_s = STARTING_TIMEOUT_S if connect_s is None else connect_s
        self._process = os.getpid()
        self._commands: SimpleQueue[_Start | _Cancel] = SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._link: _Link | None = None
        self._next_id = 1
        self._stopping = False
        self._stopped = False
        self._leaving = False
        atexit.register(self._leave)
        # A daemon thread: it must not keep a process from leaving whose Rooms were never closed.
        self._thread = threading.Thread(target=self._run, name="stateroom-client", daemon=True)
        self._thread.start()

    # ------------------------------------------------ for other threads

    @property
    def closed(self) -> bool:
        return self._stopping

    def greet(self) -> HelloResult:
        """Sees that a daemon answers; gives its greeting. Errors as for `connect`."""
        inbox = Inbox(self._cancel)
        self._submit(_Start(None, Wait(self._connect_s), inbox))
        return cast("HelloResult", inbox.take())

    def start(self, request: Request, wait: Wait) -> Inbox:
        """Sends a request, whose replies, or failure, come into the inbox.

        Raises:
            Disconnected: the Room was closed.
            WrongProcess: this is a forked child.
        """
        inbox = Inbox(self._cancel)
        self._submit(_Start(request, wait, inbox))
        return inbox

    def stop(self) -> None:
        """Ends the thread, and open requests with `Disconnected`."""
        # A forked child has no such thread.
        if os.getpid() != self._process:
            return
        atexit.unregister(self._leave)
        self._stopping = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

    def _leave(self) -> None:
        # At the interpreter's exit only threads are left that it won't wait for. They end where they are:
        # told that their Room has closed, each would print a traceback.
        self._leaving = True
        self.stop()

    def _submit(self, command: _Start) -> None:
        if os.getpid() != self._process:
            raise WrongProcess(
                "This Room was opened before a fork; open another in the child with connect()."
            )
        if self._stopping:
            raise Disconnected(CLOSED)
        self._commands.put(command)
        self._wake()
        if self._stopped:  # between the two lines above
            self._refuse(Disconnected(CLOSED))

    def _cancel(self, inbox: Inbox) -> None:
        # Called from finalizers too, so from any thread at any point: it takes no lock, and never fails.
        if os.getpid() == self._process and not self._stopping:
            self._commands.put(_Cancel(inbox))
            self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # full: it is awake anyway; closed: it has left
            self._waker.send(b"\0")

    # ------------------------------------------------ for this thread

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        why = "The client's own thread failed; its traceback is on stderr."
        try:
            while not self._stopping:
                self._wait()
                self._obey(context)
            why = CLOSED
        finally:
            self._stopping = self._stopped = True
            if not self._leaving:
                self._refuse(Disconnected(why))
            if self._link is not None:
                self._link.close(None if self._leaving else why)
            context.term()
            self._woken.close()
            self._waker.close()

    def _wait(self) -> None:
        if self._link is None:
            zmq.zmq_poll([(self._woken.fileno(), zmq.POLLIN)], -1)
            return
        self._link.turn(self._woken, None)
        if self._link.lost:
            self._part(self._link)
            self._link = None

    def _obey(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)
        with suppress(Empty):
            while not self._stopping:
                command = self._commands.get_nowait()
                if isinstance(command, _Start):
                    self._start(context, command)
                elif self._link is not None:
                    self._link.exchange.cancel(command.inbox, time.monotonic())

    def _start(self, context: zmq.Context[zmq.Socket[bytes]], command: _Start) -> None:
        try:
            link = self._link = self._link or self._establish(context)
        except (StateroomError, ClientError) as error:
            command.inbox.put(error)
            self._refuse(error)  # those in the queue would wait in turn for the same
            return
        if command.request is None:
            command.inbox.put(self.greeting)
        else:
            link.exchange.start(command.request, command.wait, command.inbox, time.monotonic())

    def _establish(self, context: zmq.Context[zmq.Socket[bytes]]) -> _Link:
        """Connects and says hello, trying again until a daemon answers or the time is up."""
        begin, limit_s = time.monotonic(), self._connect_s
        while True:
            link, answer = self._attempt(context, begin + limit_s)
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
            if self._stopping or not isinstance(answer, Disconnected):
                raise cast("StateroomError | ClientError", answer)
            late = time.monotonic() + RETRY_S >= begin + limit_s
            if link.denied or (late and link.refused):
                raise key_refused(self.endpoint, self._key)
            if late:
                raise no_daemon(self.endpoint, limit_s, silent=False)
            time.sleep(RETRY_S)

    def _attempt(
        self, context: zmq.Context[zmq.Socket[bytes]], deadline: float
    ) -> tuple[_Link, Result | StateroomError | ClientError]:
        link = _Link(context, self.endpoint, self._next_id, self.timeouts, self._key)
        inbox = Inbox(self._cancel)
        now = time.monotonic()
        link.exchange.start(hello(self.app), Wait(deadline - now), inbox, now)
        while not len(inbox):
            link.turn(None, RETRY_S)
            if self._stopping:
                link.exchange.lose(CLOSED)
        return link, inbox.drain()

    def _part(self, link: _Link) -> None:
        self._next_id = link.exchange.connection.next_id
        link.close(GONE)

    def _refuse(self, error: StateroomError | ClientError) -> None:
        with suppress(Empty):
            while True:
                command = self._commands.get_nowait()
                if isinstance(command, _Start):
                    command.inbox.put(error)
