"""A language model that is a checksum: its next token depends on every token before it, and on nothing else.

So whoever knows a session's tokens knows what must follow: a token that was lost, doubled or taken from
another session, anywhere between client and engine, shows in the next answer.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable

VOCAB = 1000
EOS = 0
POISON = VOCAB - 1  # in worlds that have it, a pass over a session with it kills the worker
CONTEXT = 4096


def next_token(tokens: array[int]) -> int:
    return zlib.crc32(tokens) % VOCAB


def continuation(tokens: Iterable[int], count: int) -> list[int]:
    """The `count` tokens that follow."""
    longer = array("I", tokens)
    start = len(longer)
    for _ in range(count):
        longer.append(next_token(longer))
    return longer[start:].tolist()


def spoken(token: int) -> str:
    return chr(97 + token % 26)


def encode(text: str) -> list[int]:
    return [1 + byte for byte in text.encode()]
