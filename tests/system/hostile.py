"""Frames that no well-meant client sends: each kind of wrongness in each field of each operation, and noise.

Pure and seeded. A `Hostile` also tells what the protocol obliges the daemon to answer: the request's id where
a strict reader can read one, `id: null` where not even a lenient one could.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import msgpack

from stateroom.client.protocol import (
    KV,
    OPERATIONS,
    Grammar,
    Message,
    Sampling,
    Speculate,
)
from stateroom.client.wire import wire_names

STREAMING = ("decode", "prefill", "watch")  # more than one reply: not for a REQ
UINT64 = 2**64
ODD_TIMESTAMP = msgpack.ExtType(127, b"odd")  # `pack` makes it type -1, a timestamp of three bytes


@dataclass(frozen=True)
class Hostile:
    """One message: its frames after the routing id, and how it must be answered.

    Attributes:
        id: the id that its final reply must carry; None: `id: null`.
        also: an id that would do as well, since a lenient reader finds it in the broken frame.
        op: the operation, where the frame comes so far.
    """

    frames: list[bytes]
    id: int | None
    also: int | None = None
    op: str | None = None


def wrong_values(draw: random.Random) -> list[Any]:
    """Values of every type, at the edges of every range. For some fields some of them are right."""
    return [
        None, True, False, -1, 0, 2**31, 2**32 - 1, 2**63, UINT64 - 1, -(2**63), draw.randrange(UINT64),
        1.0, -0.5, 1e308, float(UINT64), float("nan"), float("inf"), float("-inf"),
        "", "x", "é" * 40, "x" * 5_000, "../../etc/passwd", "\0", "\ud800", draw.choice("αβ\n") * 3,
        b"", b"\xff\x00", draw.randbytes(300),
        [], [None], [True], [1.0], [-1], [2**31 - 1], [2**32 - 1], [2**63], ["x"], [[1, float("nan")]], [[]],
        [0] * 5_000, [{"role": "user"}], [{"role": 1, "content": "x"}],
        {}, {"x": 1}, {"kind": "dense"}, nest(20), nest(40),
        msgpack.ExtType(42, b"abc"), ODD_TIMESTAMP, msgpack.Timestamp(1, 2),
    ]  # fmt: skip


def nest(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def good_arguments(op: str, session: str) -> dict[str, Any]:
    """Arguments that would be taken, so that one wrong field is all that is wrong."""
    return {
        "hello": {"app": "hostile"},
        "open": {"tokens": [1, 2, 3], "ttl_s": 60.0},
        "prefill": {"session": session, "tokens": [1]},
        "decode": {"session": session, "max_tokens": 1, "sampling": {}, "stop": ["x"]},
        "trim": {"session": session, "to": 1},
        "fork": {"session": session, "n": 1},
        "sync": {"session": session, "tokens": [1, 2]},
        "score": {"session": session, "tokens": [1]},
        "cancel": {"session": session},
        "load": {"model": "none"},
        "unload": {"model": "none"},
        "tokens": {"session": session},
        "info": {"session": session},
        "list": {"everyone": True},
        "requests": {"session": session, "everyone": False},
        "close": {"session": session},
        "publish": {"session": session, "as": "x"},
        "unpublish": {"as": "x"},
        "lease": {"session": session, "ttl_s": 60.0},
        "park": {"session": session},
        "save": {"session": session, "snapshot": "x", "replace": True},
        "restore": {"snapshot": "x", "ttl_s": 60.0},
        "forget": {"snapshot": "x"},
        "export": {"snapshot": "x"},
        "import": {"snapshot": "y", "total": 4, "data": b"data"},
        "verify": {"session": session},
        "trace": {"request": 1},
    }.get(op, {})


NESTED = {
    "sampling": Sampling,
    "kv": KV,
    "speculate": Speculate,
    "grammar": Grammar,
    "messages": Message,
}
NESTED_GOOD: dict[str, dict[str, Any]] = {
    "speculate": {"kind": "lookup"},
    "grammar": {"kind": "regex", "value": "x"},
    "messages": {"role": "user", "content": "x"},
}


def pack(message: Any) -> bytes:
    packed: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    return packed.replace(b"\xc7\x03\x7fodd", b"\xc7\x03\xffodd")


class Hostilities:
    """Makes frames by a seed. `session` is one of the hostile client's own."""

    def __init__(self, seed: int, first_id: int = 1_000_000) -> None:
        self._draw = random.Random(seed)
        self._next_id = first_id

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    # ------------------------------------------------------------ every field of every operation

    def every_field(self, sessions: list[str]) -> Iterator[Hostile]:
        """Each wrong value in each field, and in each field of the maps below."""
        for op, known in OPERATIONS.items():
            for name in (*wire_names(known.request).values(), "misspelt"):
                for value in wrong_values(self._draw):
                    yield self._with(op, sessions, {name: value})
                if name in NESTED:
                    yield from self._below(op, sessions, name)

    def _below(self, op: str, sessions: list[str], name: str) -> Iterator[Hostile]:
        for f in (*(f.name for f in fields(NESTED[name])), "misspelt"):
            for value in wrong_values(self._draw):
                inner = {**NESTED_GOOD.get(name, {}), f: value}
                changed = {name: [inner] if name == "messages" else inner}
                if name == "messages":
                    changed["tokens"] = changed["text"] = None  # type: ignore[assignment]
                yield self._with(op, sessions, changed)

    def _with(self, op: str, sessions: list[str], changed: dict[str, Any]) -> Hostile:
        session = self._draw.choice(sessions)
        arguments = {**good_arguments(op, session), **changed}
        if "session" in changed and op == "cancel":
            arguments.pop("request", None)
        return self._message({"v": 1, "id": self.new_id(), "op": op, **arguments}, op)

    def _message(self, message: Any, op: str | None) -> Hostile:
        frame = pack(message)
        return Hostile([frame], *self._readable(frame), op)

    @staticmethod
    def _readable(frame: bytes) -> tuple[int | None, int | None]:
        """The id for a strict reader; and the one that a lenient reader may find where a strict one fails."""
        strict = _uint_id(_unpacked(frame, strict_map_key=True))
        if strict is not None and not _duplicates(frame):
            return strict, strict
        return None, _uint_id(_unpacked(frame, strict_map_key=False, unicode_errors="surrogateescape"))

    # ------------------------------------------------------------ noise

    def noise(self, sessions: list[str]) -> Iterator[Hostile]:
        """For ever: a frame of some kind or other."""
        kinds = [
            self._random_bytes, self._declared, self._deep, self._cut_short, self._trailing, self._odd_key,
            self._envelope, self._ids, self._many_wrong, self._wrong_count, self._duplicate, self._unknown_op,
            self._unhashable, self._big_text,
        ]  # fmt: skip
        while True:
            yield self._draw.choice(kinds)(self._draw.choice(sessions))

    def _raw(self, frame: bytes) -> Hostile:
        return Hostile([frame], *self._readable(frame))

    def _random_bytes(self, session: str) -> Hostile:
        return self._raw(self._draw.randbytes(self._draw.randrange(200)))

    def _declared(self, session: str) -> Hostile:
        """Lengths of gigabytes, with nothing behind them; and bytes that msgpack has no meaning for."""
        head = self._draw.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
        size = struct.pack(">I", self._draw.choice([2**32 - 1, 2**31, 10**6]))
        within = b"\x84\xa1v\x01\xa2id\x07\xa2op\xa4list\xa1x"
        return self._raw(
            self._draw.choice([head + size, head + size + b"\x01", within + head + size, b"\xc1"])
        )

    def _deep(self, session: str) -> Hostile:
        levels = self._draw.choice([31, 33, 500, 2_000, 50_000])
        return self._raw(self._draw.choice([b"\x91", b"\x81\xa1x"]) * levels + b"\xc0")

    def _good(self, session: str, op: str | None = None) -> dict[Any, Any]:
        op = op or self._draw.choice([op for op in OPERATIONS if op != "watch"])
        return {"v": 1, "id": self.new_id(), "op": op, **good_arguments(op, session)}

    def _cut_short(self, session: str) -> Hostile:
        whole = pack(self._good(session))
        return self._raw(whole[: self._draw.randrange(1, len(whole))])

    def _trailing(self, session: str) -> Hostile:
        message = self._good(session)
        return Hostile(
            [pack(message) + self._draw.randbytes(self._draw.randrange(1, 4))], None, message["id"]
        )

    def _odd_key(self, session: str) -> Hostile:
        message = self._good(session)
        message[self._draw.choice([1, b"k", True, None, 2.5, -1])] = 1
        return Hostile([pack(message)], None, message["id"])

    def _unhashable(self, session: str) -> Hostile:
        """A map whose key is an array or a map: legal msgpack."""
        request_id = self.new_id()
        key = self._draw.choice([b"\x91\x01", b"\x81\xa1x\x01"])
        head = b"\x84\xa1v\x01\xa2id" + pack(request_id) + b"\xa2op\xa4list"
        return Hostile([head + key + b"\x01"], None, request_id)

    def _duplicate(self, session: str) -> Hostile:
        request_id = self.new_id()
        pair = self._draw.choice([b"\xa2id" + pack(request_id), b"\xa2op\xa4list", b"\xa1v\x01"])
        head = b"\x84\xa1v\x01\xa2id" + pack(request_id) + b"\xa2op\xa4list"
        return Hostile([head + pair], None, request_id)

    def _envelope(self, session: str) -> Hostile:
        message = self._good(session)
        op = message["op"]
        for name in self._draw.sample(["v", "op", "x"], self._draw.randrange(1, 3)):
            message[name] = self._draw.choice(wrong_values(self._draw))
        if self._draw.random() < 0.3:
            del message[self._draw.choice(["v", "op"])]
        return self._message(message, op)

    def _ids(self, session: str) -> Hostile:
        message = self._good(session, "list")
        message["id"] = self._draw.choice([-1, 2**32, 2**63, UINT64 - 1, 0, True, 1.0, None, "7", b"7", [7]])
        return self._message(message, "list")

    def _many_wrong(self, session: str) -> Hostile:
        message = self._good(session)
        known = list(wire_names(OPERATIONS[message["op"]].request).values())
        for name in self._draw.sample(known, min(len(known), 3)):
            message[name] = self._draw.choice(wrong_values(self._draw))
        message["optins"] = 1  # never taken, whatever the rest is
        return self._message(message, message["op"])

    def _unknown_op(self, session: str) -> Hostile:
        op = self._draw.choice(["fly", "", "__init__", "adopt", "x" * 300, "list\0"])
        return self._message({"v": 1, "id": self.new_id(), "op": op, "session": session}, None)

    def _big_text(self, session: str) -> Hostile:
        """More text than a message may have tokens, or than a text may have bytes."""
        size = self._draw.choice([20_000, 100_000])
        message = {"v": 1, "id": self.new_id(), "op": "open", "text": "x" * size, "optins": 1}
        return self._message(message, "open")

    def _wrong_count(self, session: str) -> Hostile:
        """More frames than one, or none to speak of. The last frame's id is the one that can be told."""
        message = self._good(session, "list")
        body, number = pack(message), message["id"]
        return self._draw.choice(
            [
                Hostile([b"junk", body], None, number),
                Hostile([b"", b"", body], None, number),
                Hostile([b"", body, b""], None, number),
                Hostile([body, body], None, number),
                Hostile([b""], None),
                Hostile([b"", b""], None),
                Hostile([b"a"] * 20, None),
                Hostile([b"", body], number, number, "list"),  # as a REQ sends it: this one is right
            ]
        )


def _unpacked(frame: bytes, **options: Any) -> Any:
    try:
        return msgpack.unpackb(frame, **options)
    except Exception:  # whatever it is, it can't be read
        return None


def _uint_id(value: Any) -> int | None:
    found = value.get("id") if isinstance(value, dict) else None
    return found if type(found) is int and 0 <= found < UINT64 else None


def _duplicates(frame: bytes) -> bool:
    pairs: list[list[tuple[Any, Any]]] = []
    msgpack.unpackb(frame, object_pairs_hook=lambda found: pairs.append(found) or dict(found))
    return any(len({key for key, _ in found}) != len(found) for found in pairs)
