"""The broker's ZeroMQ sockets: the public ROUTER with its monitor, and one DEALER for each engine worker.

Nothing here blocks. A ZeroMQ socket's descriptor is edge-triggered, and any call on the socket may swallow
the edge, so a `_Pump` asks the socket again after every send and after every message. The sockets are plain
ones: what arrives is handed on in a callback, in order, with no future and no cancellation around a receive.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import socket as sockets
from collections.abc import Callable
from typing import cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from stateroom.client.limits import MESSAGE_BYTES_MAX
from stateroom.daemon.curve import Door, demand_keys
from stateroom.daemon.keys import Guest, Pair
from stateroom.daemon.peers import Delivery

BURST_MAX = 64  # messages of one socket handled before others get their turn
PEER_QUEUE_MESSAGES = 256  # in libzmq, each way and client, before the outbox begins to fill
LINK_QUEUE_MESSAGES = 4_096  # to and from a worker; more than requests can be open
LINGER_MS = 200  # unsent replies may delay the exit by this much
BACKLOG = 512  # connections waiting to be accepted
NO_DESCRIPTOR = -1  # libzmq's word for a socket that it makes itself
FILES_SPARED = 4_096  # open files that are not for clients, and for those who come before they are counted

# As numbers: pyzmq takes its time over its enums.
EVENTS, READABLE, NOT_BLOCKING = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
NOT_LAST = int(zmq.NOBLOCK | zmq.SNDMORE)

_monitors = itertools.count()


def admit_own_user_only(socket: zmq.Socket[bytes]) -> bool:
    """Lets processes of this user alone connect to what the socket binds from here on, if it is `ipc://`.

    The kernel tells libzmq whose the other end is (SO_PEERCRED; LOCAL_PEERCRED on macOS). Modes of files
    protect the socket already; this holds where somebody opened them. False: this libzmq can't.
    """
    try:
        socket.set(zmq.IPC_FILTER_UID, os.getuid())
    except zmq.ZMQError:
        return False
    return True


def connections_most(files: int) -> int:
    """How many connections there may be with so many open files: libzmq aborts where the next finds none."""
    return files - min(files // 2, FILES_SPARED)


def hang_up(descriptor: int) -> None:
    """Ends a connection of libzmq's from below; libzmq takes it for the peer's doing."""
    with contextlib.suppress(OSError):
        taken = sockets.socket(fileno=descriptor)
        try:
            taken.shutdown(sockets.SHUT_RDWR)
        finally:
            taken.detach()


def is_local(descriptor: int) -> bool:
    """Whether a connection of libzmq's came over `ipc://`."""
    try:
        taken = sockets.socket(fileno=descriptor)
    except OSError:
        return False
    family = taken.family
    taken.detach()
    return family == sockets.AF_UNIX


def _readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message has come. A fifth of what a receive in vain costs."""
    return bool(cast("int", socket.get(EVENTS)) & READABLE)


class _Pump:
    """Calls `receive` for each message, whenever one may have come; then `after`."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        receive: Callable[[], object],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket, self._receive, self._after = socket, receive, after
        self._descriptor = socket.FD
        self._due = False
        self._closed = False
        self._loop.add_reader(self._descriptor, self._run)
        self.look()

    def look(self) -> None:
        """Looks soon, once, however often it is asked."""
        if not self._due and not self._closed:
            self._due = True
            self._loop.call_soon(self._run)

    def glance(self) -> None:
        """After a call on the socket, which may have swallowed the edge."""
        if _readable(self._socket):
            self.look()

    def _run(self) -> None:
        self._due = False
        left, received = not self._closed, 0
        try:
            while left and received < BURST_MAX:
                left = not self._closed and _readable(self._socket)
                if left:
                    self._receive()
                    received += 1
            self._after()
        finally:
            if left:
                self.look()

    def close(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._descriptor)


class PublicSocket:
    """The ROUTER that clients connect to.

    `on_message(routing id, descriptor, frames after the routing id, guest)`. `on_gone(descriptor)` once a
    connection closed, before any message of a successor with its descriptor; messages of its own may follow
    until `on_drained()`, which is called when what had come was received. `door`: knows whom a key lets in,
    where some endpoint demands keys; it is closed with this. A key that was revoked isn't heard any more.
    `on_expelled(count)`: so many connections were ended, because there were too many or a key was revoked.

    Attributes:
        own_user_only: the kernel is asked whose a connection is.
        received, received_bytes, sent, sent_bytes: messages and their content, since the start.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        on_message: Callable[[bytes, int, list[bytes], Guest | None], None],
        on_gone: Callable[[int], None],
        on_drained: Callable[[], None],
        door: Door | None = None,
        on_expelled: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._on_expelled = on_expelled
        self._door = door
        self.received = self.received_bytes = self.sent = self.sent_bytes = 0
        self._on_message, self._on_gone, self._on_drained = on_message, on_gone, on_drained
        self._alive: set[int] = set()
        self._most = connections_most(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._unwanted: set[int] = set()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        self._socket.set(zmq.SNDHWM, PEER_QUEUE_MESSAGES)
        self._socket.set(zmq.RCVHWM, PEER_QUEUE_MESSAGES)
        self._socket.set(zmq.LINGER, LINGER_MS)
        self._socket.set(zmq.BACKLOG, BACKLOG)
        self.own_user_only = admit_own_user_only(self._socket)
        events = f"inproc://connections-{next(_monitors)}"
        self._socket.monitor(events, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.set(zmq.RCVHWM, 0)  # a lost event would be a client never missed
        self._monitor.set(zmq.LINGER, 0)
        self._monitor.connect(events)
        self._pumps: list[_Pump] = []

    def bind(self, endpoint: str, pair: Pair | None = None, descriptor: int = NO_DESCRIPTOR) -> str:
        """Binds, begins to receive, and gives the endpoint with its real port.

        `pair`: keys are demanded there, and at what is bound later. `descriptor`: of a socket that listens at
        the endpoint already; it is libzmq's from here on, which leaves its file where it is.
        """
        if pair is not None:
            demand_keys(self._socket, pair)
        # libzmq takes it for every bind that follows, until it is told otherwise.
        self._socket.set(zmq.USE_FD, descriptor)
        try:
            self._socket.bind(endpoint)
        finally:
            self._socket.set(zmq.USE_FD, NO_DESCRIPTOR)
        if not self._pumps:
            messages = _Pump(self._socket, self._receive, self._on_drained)
            self._pumps = [messages, _Pump(self._monitor, self._receive_event, self._events_received)]
            if self._door is not None:
                self._pumps.append(_Pump(self._door.socket, self._door.answer))
        bound = self._socket.get(zmq.LAST_ENDPOINT)
        return (bound.decode() if isinstance(bound, bytes) else str(bound)).rstrip("\0")

    def send(self, routing_id: bytes, frames: list[bytes]) -> Delivery:
        try:
            self._socket.send(routing_id, NOT_LAST)
            for frame in frames[:-1]:
                self._socket.send(frame, NOT_LAST)
            self._socket.send(frames[-1], NOT_BLOCKING)
        except zmq.Again:
            return Delivery.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return Delivery.GONE
            raise
        finally:
            for pump in self._pumps:
                pump.glance()
        self.sent += 1
        self.sent_bytes += sum(map(len, frames))
        return Delivery.SENT

    def traffic(self) -> dict[str, int]:
        """For `stats`."""
        return {
            "messages_received": self.received,
            "bytes_received": self.received_bytes,
            "messages_sent": self.sent,
            "bytes_sent": self.sent_bytes,
        }

    def close(self) -> None:
        for pump in self._pumps:
            pump.close()
        self._pumps = []
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        if self._door is not None:
            self._door.close()

    def _receive_event(self) -> None:
        event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
        descriptor = int(event["value"])
        if event["event"] == zmq.EVENT_ACCEPTED:
            self._alive.add(descriptor)
            if len(self._alive) > self._most:
                self.expel(descriptor)
        else:
            self._alive.discard(descriptor)
            self._unwanted.discard(descriptor)
            self._on_gone(descriptor)

    def expel(self, descriptor: int) -> None:
        """Ends a connection soon, if it is not over by itself."""
        self._unwanted.add(descriptor)
        self._pumps[1].look()

    def _events_received(self) -> None:
        """All that is known to have ended is out of `_unwanted`: a descriptor may be another's by now."""
        if self._unwanted and not _readable(self._monitor):
            unwanted, self._unwanted = self._unwanted, set()
            for descriptor in unwanted:
                hang_up(descriptor)
            self._on_expelled(len(unwanted))
        self._pumps[0].look()

    def _receive(self) -> None:
        frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        self.received += 1
        self.received_bytes += sum(map(len, frames[1:]))
        # Whatever became of earlier connections with this descriptor is in the monitor by now.
        while _readable(self._monitor):
            self._receive_event()
        try:
            descriptor = int(frames[-1].get(zmq.SRCFD))
        except zmq.ZMQError:
            # ZeroMQ 2 (ZMTP 1.0), which any garbage looks like, names no connection: its end would go unseen.
            return
        allowed, guest = (True, None) if self._door is None else self._guest(self._door, frames[-1])
        if allowed:
            self._on_message(frames[0].bytes, descriptor, [frame.bytes for frame in frames[1:]], guest)
        if descriptor not in self._alive:
            self._on_gone(descriptor)  # its last message came after its end was told

    def _guest(self, door: Door, frame: zmq.Frame) -> tuple[bool, Guest | None]:
        """Whether who sent this may still be heard, and whose key it was."""
        try:
            user = str(frame.get("User-Id"))
        except zmq.ZMQError:
            return True, None  # it came by an endpoint that demands none
        guest = door.allowed.guest(user)
        return guest is not None, guest


class LinkSocket:
    """The broker's end of the link to one worker process; each process gets an endpoint of its own."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        on_frame: Callable[[bytes], None],
    ) -> None:
        self._on_frame = on_frame
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, LINK_QUEUE_MESSAGES)
        self._socket.set(zmq.RCVHWM, LINK_QUEUE_MESSAGES)
        self._socket.set(zmq.LINGER, 0)
        admit_own_user_only(self._socket)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._socket.close()
            raise
        self._pump = _Pump(self._socket, self.receive)

    def send(self, frame: bytes) -> bool:
        """False if the worker does not read what it is sent."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            self._pump.glance()
        return True

    def receive(self) -> bool:
        """Hands on one frame, if there is one."""
        try:
            frame = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._on_frame(frame)
        return True

    def close(self) -> None:
        self._pump.close()
        self._socket.close()
