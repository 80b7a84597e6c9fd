"""Outboxes: bounded, in order, final replies always kept, other clients untouched."""

from __future__ import annotations

from stateroom.client.limits import OUTBOX_MESSAGES_MAX
from stateroom.daemon.peers import BURIED_MAX, FINALS_MAX, OWN_NAME, Delivery, Peer, Peers


class Wire:
    """A socket whose clients read, don't read, or are gone."""

    def __init__(self) -> None:
        self.stuck: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.sent: list[tuple[bytes, bytes]] = []
        self.vanished: list[Peer] = []
        self.wakes = 0
        self.peers = Peers(self.transmit, self.vanished.append, self.wake)

    def transmit(self, routing_id: bytes, frames: list[bytes]) -> Delivery:
        if routing_id in self.gone:
            return Delivery.GONE
        if routing_id in self.stuck:
            return Delivery.FULL
        self.sent.append((routing_id, frames[-1]))
        return Delivery.SENT

    def wake(self) -> None:
        self.wakes += 1


def test_replies_that_wait_are_sent_in_order_once_they_can_be() -> None:
    wire = Wire()
    slow, quick = wire.peers.of(b"slow", 1)[0], wire.peers.of(b"quick", 2)[0]
    wire.stuck.add(b"slow")
    assert wire.peers.send(slow, [b"0"], final=False)
    assert wire.wakes == 1
    wire.stuck.clear()
    assert wire.peers.send(slow, [b"1"], final=False)  # not past the one that waits
    assert wire.peers.send(quick, [b"x"], final=False)
    assert wire.sent == [(b"quick", b"x")]
    wire.peers.flush()
    assert wire.sent[1:] == [(b"slow", b"0"), (b"slow", b"1")]
    assert not wire.peers.waiting
    assert slow.outbox_bytes == 0


def test_a_full_outbox_takes_final_replies_only() -> None:
    wire = Wire()
    peer, _ = wire.peers.of(b"slow", 1)
    wire.stuck.add(b"slow")
    for number in range(OUTBOX_MESSAGES_MAX):
        assert wire.peers.send(peer, [b"%d" % number], final=False)
    assert not wire.peers.send(peer, [b"too much"], final=False)
    assert not peer.deaf
    while not peer.deaf:
        assert wire.peers.send(peer, [b"final"], final=True)
    assert len(peer.outbox) == FINALS_MAX
    wire.stuck.clear()
    wire.peers.flush()
    assert len(wire.sent) == FINALS_MAX
    assert not peer.deaf
    assert not peer.full


def test_large_replies_fill_an_outbox_by_their_bytes() -> None:
    wire = Wire()
    peer, _ = wire.peers.of(b"slow", 1)
    wire.stuck.add(b"slow")
    large = bytes(16 * 1024 * 1024)
    accepted = [wire.peers.send(peer, [large], final=False) for _ in range(6)]
    assert accepted == [True] * 4 + [False] * 2


def test_a_client_that_is_gone_is_told_of_once_and_forgotten() -> None:
    wire = Wire()
    peer, new = wire.peers.of(b"a", 7)
    assert new
    wire.stuck.add(b"a")
    wire.peers.send(peer, [b"0"], final=False)
    wire.gone.add(b"a")
    wire.peers.flush()
    assert wire.vanished == []  # not in the middle of things
    wire.peers.lost(7)
    wire.peers.bury()
    wire.peers.bury()
    assert wire.vanished == [peer]
    assert wire.peers.send(peer, [b"1"], final=True)
    assert wire.sent == []
    assert len(wire.peers) == 0
    assert wire.peers.of(b"a", 8)[1]  # another connection, though of the same name


def test_what_is_read_of_a_connection_after_its_end_is_no_new_clients() -> None:
    wire = Wire()
    peer, _ = wire.peers.of(OWN_NAME + b"abcd", 7)
    peer.call_itself("secretive")
    wire.gone.add(peer.routing_id)
    wire.peers.send(peer, [b"0"], final=True)  # found out in the middle of a burst
    assert peer.gone
    assert wire.peers.of(peer.routing_id, 7) == (peer, False)  # it asked for this before it left
    assert not peer.deaf
    wire.peers.bury()
    late, new = wire.peers.of(peer.routing_id, 7)
    assert not new
    assert late.deaf
    wire.peers.bury()
    assert wire.vanished == [peer]
    assert len(wire.peers) == 0


def test_the_connections_that_are_remembered_are_counted() -> None:
    wire = Wire()
    for number in range(BURIED_MAX + 1):
        wire.peers.of(OWN_NAME + b"%d" % number, 7)
        wire.peers.lost(7)
        wire.peers.bury()
    assert wire.peers.of(OWN_NAME + b"1", 7)[0].deaf
    assert wire.peers.of(OWN_NAME + b"0", 7)[1]


def test_a_client_that_chose_its_name_and_connects_anew_is_another_connection() -> None:
    wire = Wire()
    old, _ = wire.peers.of(b"chosen", 7)
    old.app = "someone"
    young, new = wire.peers.of(b"chosen", 8)
    assert new
    assert wire.vanished == [old]
    assert young.app == "default"
    wire.peers.lost(7)
    wire.peers.bury()
    assert wire.peers.of(b"chosen", 8) == (young, False)


def test_a_descriptor_used_again_takes_only_its_own_connection_along() -> None:
    wire = Wire()
    old, _ = wire.peers.of(b"old", 7)
    wire.peers.lost(7)
    assert wire.peers.of(b"old", 7) == (old, False)  # a last message
    assert wire.vanished == []
    young, _ = wire.peers.of(b"young", 7)
    other, _ = wire.peers.of(b"other", 8)
    wire.peers.bury()
    assert wire.vanished == [old]
    wire.peers.lost(7)
    wire.peers.bury()
    assert wire.vanished == [old, young]
    assert not other.gone
