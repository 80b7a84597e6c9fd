"""Frames near to right ones: valid requests of every operation, bent by a seed. Pure."""

from __future__ import annotations

import random
from typing import Any

import msgpack
from tests.system.hostile import good_arguments, pack, wrong_values

from stateroom.client.protocol import OPERATIONS

SESSION = "a-session"
EDITS_MAX = 4
# Heads of msgpack values: a length or type where another was.
HEADS = [0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xC4, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCF]
HEADS += [0xD3, 0xD4, 0xD8, 0xD9, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xE0, 0xFF]


def requests(*without: str) -> list[bytes]:
    """One valid frame of each operation."""
    return [
        pack({"v": 1, "id": n, "op": op, **good_arguments(op, SESSION)})
        for n, op in enumerate(OPERATIONS, 1)
        if op not in without
    ]


def seeds() -> list[bytes]:
    """One valid frame of each operation, and replies."""
    replies: list[dict[str, Any]] = [
        {"v": 1, "id": 1, "seq": 0, "kind": "token", "final": False, "tokens": [1], "text": "x"},
        {
            "v": 1,
            "id": 1,
            "seq": 1,
            "kind": "error",
            "final": True,
            "error": {"code": "busy", "message": "x"},
        },
        {"v": 1, "id": 1, "seq": 0, "kind": "result", "final": True, "sessions": [{"session": "x"}]},
    ]
    return [*requests(), *(pack(message) for message in replies)]


class Mutator:
    """An endless supply by a seed."""

    def __init__(self, seed: int, begin: list[bytes] | None = None) -> None:
        self._draw = random.Random(seed)
        self._seeds = begin or seeds()
        self._values = [pack(value) for value in wrong_values(self._draw)]

    def frame(self) -> bytes:
        return self.bent(self._draw.choice(self._seeds))

    def bent(self, frame: bytes) -> bytes:
        """Some edits away from it."""
        made = bytearray(frame)
        # Few edits, and every second of a value: bytes that are bent too much all fail at the first of them.
        for _ in range(self._draw.choice((1, 1, 1, 2, EDITS_MAX))):
            if self._draw.random() < 0.5:
                self._value(made)
            else:
                self._edit(made)
        return bytes(made)

    def _edit(self, frame: bytearray) -> None:
        draw = self._draw
        at = draw.randrange(len(frame) + 1)
        kind = draw.randrange(6)
        if kind == 0 and frame:
            frame[at % len(frame)] ^= 1 << draw.randrange(8)
        elif kind == 1 and frame:
            frame[at % len(frame)] = draw.choice(HEADS)
        elif kind == 2:
            frame[at:at] = draw.randbytes(draw.randint(1, 4))
        elif kind == 3:
            del frame[at : at + draw.randint(1, 8)]
        elif kind == 4:
            frame[at:at] = draw.choice(self._values)
        else:
            other = draw.choice(self._seeds)
            frame[at:] = other[draw.randrange(len(other)) :]

    def _value(self, frame: bytearray) -> None:
        """One argument of a message that can still be read gets a value of another kind."""
        try:
            message = msgpack.unpackb(bytes(frame), strict_map_key=False)
        except Exception:  # bent too far by an edit before
            return
        if isinstance(message, dict) and message:
            message[self._draw.choice(list(message))] = self._draw.choice(wrong_values(self._draw))
            try:
                frame[:] = pack(message)
            except (ValueError, TypeError, OverflowError):  # a value that has no bytes
                return
