"""What must hold of any bytes at all: the property that every fuzzer here drives. Pure, and fast.

Decode and validate either give a request, which survives being sent and read again, or refuse with a typed
error that can be sent. Nothing else is raised, whatever the bytes.
"""

from __future__ import annotations

from stateroom.client.protocol import ERROR_CODES, OPERATIONS, Reply
from stateroom.client.wire import DecodeError, decode_reply, encode_reply, encode_request
from stateroom.daemon.requests import Refused, parse, read_id

REFUSALS = frozenset(("malformed", "version", "unknown_op", "invalid"))
assert set(ERROR_CODES) >= REFUSALS


def check(frame: bytes) -> str:
    """Holds the daemon's and the client's reading to it; gives the outcome, for the tally."""
    check_as_reply(frame)
    seen = read_id(frame)
    try:
        parsed = parse(frame)
    except Refused as refused:
        assert refused.error.code in REFUSALS, refused.error.code
        assert refused.request_id is None or 0 <= refused.request_id < 2**64
        told = decode_reply(encode_reply(Reply(id=refused.request_id, seq=0, body=refused.error.body())), {})
        assert told.final
        return refused.error.code
    assert seen == parsed.id
    assert isinstance(parsed.request, OPERATIONS[parsed.op].request)
    again = parse(encode_request(parsed.id, parsed.request))
    assert again == parsed, "what was read isn't what is read when it is sent again"
    return parsed.op


def check_as_reply(frame: bytes) -> None:
    """The same bytes from a daemon gone mad, as a client reads them."""
    for op in ("decode", "open", "list", "info"):
        try:
            decode_reply(frame, {1: op})
        except DecodeError:
            return
