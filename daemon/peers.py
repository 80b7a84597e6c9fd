"""Clients: who is connected, what they have open, and the replies that wait for those who do not read.

Pure: `transmit` is the socket. A reply that is not final may be refused when the outbox is full, which
ends the client's streams; final replies always find a place, because requests are counted. A client that
neither reads nor stops asking has its further requests dropped unread (`deaf`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from stateroom.client.limits import OUTBOX_MESSAGES_MAX, REQUESTS_PER_CLIENT_MAX
from stateroom.daemon.keys import Guest

if TYPE_CHECKING:
    from stateroom.daemon.tickets import Ticket

DEFAULT_APP = "default"
OWN_NAME = b"\0"  # what routing ids begin with that ZeroMQ chose: it never gives one twice
OUTBOX_BYTES_MAX = 64 * 1024 * 1024  # of one client; four of the largest replies
FINALS_MAX = OUTBOX_MESSAGES_MAX + 2 * REQUESTS_PER_CLIENT_MAX  # final replies waiting beside stream replies
BURIED_MAX = 16_384  # routing ids of connections that ended, remembered for what of theirs is read late
RECENT_MAX = REQUESTS_PER_CLIENT_MAX  # ended request ids remembered, so that a late cancel is no error


class Delivery(Enum):
    SENT = "sent"
    FULL = "full"  # the client does not read
    GONE = "gone"  # no such client any more


Transmit = Callable[[bytes, list[bytes]], Delivery]


@dataclass(slots=True, eq=False)
class Peer:
    """One connection. `app` is the owner of what it opens; below its name, for who came with a key."""

    routing_id: bytes
    descriptor: int
    guest: Guest | None = None
    app: str = ""
    client: str = ""
    open: dict[int, Ticket] = field(default_factory=dict)
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_MAX))
    outbox: deque[list[bytes]] = field(default_factory=deque)
    outbox_bytes: int = 0
    gone: bool = False  # nothing is sent to it any more
    buried: bool = False  # it has vanished: nothing of it is heard any more

    def __post_init__(self) -> None:
        self.call_itself(self.app or DEFAULT_APP)

    def call_itself(self, app: str) -> None:
        """Takes the app's own word for who it is, as far as its key goes: it can be nobody beyond that."""
        self.app = app if self.guest is None else f"{self.guest.name}/{app}"

    @property
    def name_chosen(self) -> bool:
        """It chose its routing id, which another may choose, too, and get late replies that are not his."""
        return not self.routing_id.startswith(OWN_NAME)

    @property
    def full(self) -> bool:
        return len(self.outbox) >= OUTBOX_MESSAGES_MAX or self.outbox_bytes >= OUTBOX_BYTES_MAX

    @property
    def deaf(self) -> bool:
        return self.buried or len(self.outbox) >= FINALS_MAX or self.outbox_bytes >= 2 * OUTBOX_BYTES_MAX


class Peers:
    """The connections by routing id.

    `on_gone(peer)` is called once for each that vanishes; `on_waiting()` when a reply has to wait, and
    `flush` should be called soon.
    """

    def __init__(
        self, transmit: Transmit, on_gone: Callable[[Peer], None], on_waiting: Callable[[], None]
    ) -> None:
        self._transmit = transmit
        self._on_gone, self._on_waiting = on_gone, on_waiting
        self._peers: dict[bytes, Peer] = {}
        self._waiting: dict[Peer, None] = {}  # with something in the outbox, in the order they came to it
        self._buried: dict[bytes, None] = {}  # in the order they were
        self._leaving: list[Peer] = []  # connection closed, but messages of theirs may still be unread

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def of(self, routing_id: bytes, descriptor: int, guest: Guest | None = None) -> tuple[Peer, bool]:
        """The connection a message came by, and whether it is a new one.

        One that ended stays who it was, though more of its messages are read: taken for a new one, it would
        own by another name what they make.
        """
        if routing_id in self._buried:
            return Peer(routing_id, descriptor, guest, gone=True, buried=True), False
        peer = self._peers.get(routing_id)
        if peer is not None:
            same = (peer.descriptor, peer.guest) == (descriptor, guest)
            if same and not (peer.gone and peer.name_chosen):
                return peer, False
            # A client that chose its routing id has connected anew.
            self._leaving.append(peer)
            self.bury()
        peer = self._peers[routing_id] = Peer(routing_id, descriptor, guest)
        return peer, True

    def send(self, peer: Peer, frames: list[bytes], final: bool) -> bool:
        """Sends or keeps one reply; False if it is neither, because the client does not read.

        To a client that is gone everything counts as sent.
        """
        if peer.gone:
            return True
        delivery = Delivery.FULL if peer.outbox else self._transmit(peer.routing_id, frames)
        if delivery is Delivery.GONE:
            self._unreachable(peer)
        elif delivery is Delivery.FULL:
            if peer.full and not final:
                return False
            peer.outbox.append(frames)
            peer.outbox_bytes += sum(len(frame) for frame in frames)
            self._waiting[peer] = None
            self._on_waiting()
        return True

    def flush(self) -> None:
        """Sends what waits, as far as it goes."""
        for peer in list(self._waiting):
            while peer.outbox:
                delivery = self._transmit(peer.routing_id, peer.outbox[0])
                if delivery is Delivery.FULL:
                    break
                if delivery is Delivery.GONE:
                    self._unreachable(peer)
                    break
                peer.outbox_bytes -= sum(len(frame) for frame in peer.outbox.popleft())
            if not peer.outbox:
                self._waiting.pop(peer, None)

    def lost(self, descriptor: int) -> None:
        """The connection with this descriptor closed. Its last messages are still heard, until `bury`."""
        self._leaving += [peer for peer in self._peers.values() if peer.descriptor == descriptor]

    def expel(self, unwanted: Callable[[Guest], bool]) -> list[Peer]:
        """Those whose key is no longer allowed vanish; who that was. Their sessions stay."""
        found = [peer for peer in self._peers.values() if peer.guest is not None and unwanted(peer.guest)]
        self._leaving += found
        self.bury()
        return found

    def bury(self) -> None:
        """What had come was read: those whose connection closed vanish. Call it after sending, too."""
        leaving, self._leaving = self._leaving, []
        for peer in leaving:
            if self._peers.get(peer.routing_id) is peer:
                del self._peers[peer.routing_id]
                self._drop_outbox(peer)
                if not peer.name_chosen:
                    self._remember(peer)
                self._on_gone(peer)

    def _remember(self, peer: Peer) -> None:
        self._buried[peer.routing_id] = None
        if len(self._buried) > BURIED_MAX:
            del self._buried[next(iter(self._buried))]

    def _unreachable(self, peer: Peer) -> None:
        # Found out in the middle of a reply, when nobody expects requests to end: they do in `bury`.
        self._leaving.append(peer)
        self._drop_outbox(peer)

    def _drop_outbox(self, peer: Peer) -> None:
        peer.gone = True
        peer.outbox.clear()
        peer.outbox_bytes = 0
        self._waiting.pop(peer, None)
