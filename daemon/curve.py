"""CURVE on the public socket: who has a key that is allowed gets in, and its messages say whose they are.

libzmq asks at `inproc://zeromq.zap.01` about every new connection of a socket that has a domain; a `Door`
answers there, on the broker's loop. What it gives as user id is the key itself, which libzmq attaches to each
message of that connection.
"""

from __future__ import annotations

import zmq
from zmq.utils import z85

from stateroom.daemon.keys import Allowed, Keys, Pair, zap_answer, zap_key

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"stateroom"
HANDSHAKE_MS = 5_000  # after which who hasn't shown a key is gone
WAITING_MAX = 1_024  # questions about connections that may wait for their answer


def make_pair() -> Pair:
    """A new pair, from the system's random bytes (libsodium or tweetnacl, within libzmq)."""
    public, secret = zmq.curve_keypair()
    return Pair(public.decode(), secret.decode())


def demand_keys(socket: zmq.Socket[bytes], pair: Pair) -> None:
    """From here on what the socket binds is encrypted, and asks the door about who comes."""
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, pair.secret.encode())
    socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a door nobody comes in
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


class Door:
    """Answers who may connect. `socket` is to be watched; call `answer` for each message on it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self.allowed = Allowed(keys)
        self.allowed.refresh()
        self.refused = 0
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVHWM, WAITING_MAX)
        self.socket.bind(ZAP_ENDPOINT)

    def answer(self) -> None:
        """Takes one question and answers it, by the list as it is now."""
        frames = self.socket.recv_multipart(zmq.NOBLOCK)
        raw = zap_key(frames)
        self.allowed.refresh()
        guest = self.allowed.guest(z85.encode(raw).decode()) if raw is not None else None
        self.refused += guest is None
        self.socket.send_multipart(zap_answer(frames, guest.key if guest else None), zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.close()
