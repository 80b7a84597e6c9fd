"""What lies between processes: queues with delays, which break off. Stands where `daemon/sockets.py` does.

Like ZeroMQ: in order on one connection, bounded each way, and the end of a connection may be known before its
last messages are read, or long after replies began to go nowhere.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.sim.loop import VirtualLoop

from stateroom.daemon.peers import Delivery

BURST_MAX = 64  # messages that the public socket handles before it says that it is drained
UNNOTICED_S = 0.2  # for which replies to a client that is gone still seem to arrive, at the most


class Line:
    """A client's connection. `hear(frames)` is its process; `reads` is whether that takes what comes."""

    def __init__(self, network: Network, routing_id: bytes, hear: Callable[[list[bytes]], None]) -> None:
        self.network, self.routing_id, self.hear = network, routing_id, hear
        self.descriptor = network.next_descriptor()
        self.reads = True
        self.pauses = 0  # in its reading
        self.closed = False  # by the client
        self.unreachable = False  # as the daemon's socket knows by now
        self.on_unreachable: Callable[[], object] = lambda: None
        self.down: deque[list[bytes]] = deque()
        self._up: deque[list[bytes]] = deque()
        self._up_s = self._down_s = 0.0

    def send(self, frames: list[bytes]) -> None:
        """To the daemon."""
        self._up_s = max(self._up_s, self.network.arrival_s())
        self.network.travelling += 1
        self._up.append(frames)  # timers of one moment ring in any order
        self.network.loop.after(self._up_s - self.network.loop.time(), self._arrive)

    def _arrive(self) -> None:
        self.network.arrive(self, self._up.popleft())

    def coming(self, frames: list[bytes]) -> None:
        """From the daemon."""
        self.down.append(frames)
        if self.reads:
            self._deliver_later()

    def pause(self) -> None:
        """The client reads no more."""
        self.reads = False
        self.pauses += 1

    def read_on(self) -> None:
        """The client reads again: what waits arrives."""
        self.reads = True
        for _ in self.down:
            self._deliver_later()

    def _deliver_later(self) -> None:
        self._down_s = max(self._down_s, self.network.arrival_s())
        self.network.loop.after(self._down_s - self.network.loop.time(), self._deliver)

    def _deliver(self) -> None:
        if self.reads and self.down and not self.closed:
            self.hear(self.down.popleft())

    def close(self) -> None:
        """The client's process is gone. What it sent last may still be on its way."""
        self.closed = True
        self.down.clear()
        self.network.closing(self)


class Network:
    """All connections of clients. Made before the broker, whose `PublicSocket` it becomes by `bound_to`."""

    def __init__(self, loop: VirtualLoop, draw: random.Random, queue_max: int) -> None:
        self.loop, self.draw, self.queue_max = loop, draw, queue_max
        self.latency_s = draw.choice([0.0, 0.0005, 0.005])
        self.burst = draw.choice([1, 7, BURST_MAX])
        self.lines: dict[bytes, Line] = {}
        self.on_sent: Callable[[Line, bytes], None] = lambda line, frame: None
        self.travelling = 0  # messages to the daemon
        self._descriptors = 10
        self._inbound: deque[tuple[Line, list[bytes]]] = deque()
        self._ends: deque[Line] = deque()
        self._due = False
        self._open = False
        self._on_message: Callable[[bytes, int, list[bytes], None], None]
        self._on_gone: Callable[[int], None]
        self._on_drained: Callable[[], None]

    def next_descriptor(self) -> int:
        self._descriptors += 1
        return self._descriptors

    def arrival_s(self) -> float:
        return self.loop.time() + self.latency_s * self.draw.random()

    # ------------------------------------------------------------ as the broker sees it

    def bound_to(
        self,
        context: Any,
        on_message: Any,
        on_gone: Any,
        on_drained: Any,
        door: Any = None,
        on_expelled: Any = None,
    ) -> Network:
        """Takes the arguments of `PublicSocket`."""
        self._on_message, self._on_gone, self._on_drained = on_message, on_gone, on_drained
        return self

    def bind(self, endpoint: str, pair: None = None, descriptor: int = -1) -> str:
        self._open = True
        return endpoint

    def traffic(self) -> dict[str, int]:
        return {}

    def send(self, routing_id: bytes, frames: list[bytes]) -> Delivery:
        line = self.lines.get(routing_id)
        if line is None or line.unreachable:
            return Delivery.GONE
        if len(line.down) >= self.queue_max:
            return Delivery.FULL
        self.on_sent(line, frames[-1])
        if not line.closed:
            line.coming(list(frames))
        return Delivery.SENT

    def close(self) -> None:
        self._open = False

    @property
    def busy(self) -> bool:
        """Something is still on its way."""
        return bool(
            self.travelling or self._inbound or self._ends or any(line.down for line in self.lines.values())
        )

    # ------------------------------------------------------------ as clients see it

    def connect(self, routing_id: bytes, hear: Callable[[list[bytes]], None]) -> Line:
        line = self.lines[routing_id] = Line(self, routing_id, hear)
        return line

    def arrive(self, line: Line, frames: list[bytes]) -> None:
        self.travelling -= 1
        self._inbound.append((line, frames))
        self._look()

    def closing(self, line: Line) -> None:
        self.loop.after(UNNOTICED_S * self.draw.random() ** 2, self._noticed, line)

    def _noticed(self, line: Line) -> None:
        line.unreachable = True
        self._ends.append(line)
        self._look()
        line.on_unreachable()

    def _look(self) -> None:
        if not self._due:
            self._due = True
            self.loop.soon(self._run)

    def _run(self) -> None:
        """As `_Pump` and `PublicSocket` do it: ends that are known first, each message, then `drained`."""
        self._due = False
        if not self._open:
            return
        self._tell_ends()
        for _ in range(min(len(self._inbound), self.burst)):
            line, frames = self._inbound.popleft()
            self._tell_ends()
            if self.lines.get(line.routing_id) is line:
                self._on_message(line.routing_id, line.descriptor, frames, None)
            if line.unreachable:
                self._on_gone(line.descriptor)
        self._on_drained()
        if self._inbound:
            self._look()

    def _tell_ends(self) -> None:
        while self._ends:
            self._on_gone(self._ends.popleft().descriptor)


class Link:
    """The broker's end of a worker's link, and the worker's. Takes the arguments of `LinkSocket`."""

    def __init__(
        self,
        loop: VirtualLoop,
        draw: random.Random,
        queue_max: int,
        on_frame: Callable[[bytes], None],
    ) -> None:
        self.loop, self.draw, self.queue_max = loop, draw, queue_max
        self.latency_s = draw.choice([0.0, 0.001])
        self.connected = False
        self.closed = False
        self.wake: Callable[[], None] = lambda: None  # the worker's
        self._on_frame = on_frame
        self._up: deque[bytes] = deque()  # from the worker
        self._down: deque[bytes] = deque()
        self._up_s = 0.0

    # ------------------------------------------------------------ the broker's

    def send(self, frame: bytes) -> bool:
        if not self.connected or len(self._down) >= self.queue_max:
            return False
        self._down.append(frame)
        self.loop.after(self.latency_s * self.draw.random(), self.wake)
        return True

    def receive(self) -> bool:
        if not self._up:
            return False
        self._on_frame(self._up.popleft())
        return True

    def close(self) -> None:
        self.closed = True
        self._up.clear()

    # ------------------------------------------------------------ the worker's

    def take(self, most: int) -> list[bytes]:
        return [self._down.popleft() for _ in range(min(most, len(self._down)))]

    def tell(self, frame: bytes) -> None:
        self._up.append(frame)
        self._up_s = max(self._up_s, self.loop.time() + self.latency_s * self.draw.random())
        self.loop.after(self._up_s - self.loop.time(), self._arrive)

    def _arrive(self) -> None:
        if not self.closed:
            self.receive()

    def cut(self) -> None:
        """The worker's process died: of what it said last, some was never sent."""
        for _ in range(self.draw.randrange(len(self._up) + 1)):
            self._up.pop()
