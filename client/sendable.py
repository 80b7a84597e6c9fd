"""What can travel: finite numbers of at most 64 bits, Unicode text, lists and maps of them. Pure.

The rest would fail inside msgpack, in its words (OverflowError, UnicodeEncodeError), or only at the daemon.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from stateroom.client.limits import INT64_MIN, UINT64_MAX


class Flaw(NamedTuple):
    field: str  # named as the daemon would name it: `sampling.seed`, `messages.3.content`
    wrong: str  # to be read after the field


def first_flaw(value: Any, field: str = "", *, every_integer: bool = False) -> Flaw | None:
    """The first value that can't travel, or None.

    Lists that begin with an integer are token ids, up to a million of them, and msgpack refuses the wrong
    ones by itself: they are read only with `every_integer`, to find the one that it refused.
    """
    if isinstance(value, dict):
        parts = [(f"{field}.{name}" if field else str(name), part) for name, part in value.items()]
    elif isinstance(value, tuple) or (isinstance(value, list) and (every_integer or not _is_ids(value))):
        parts = [(f"{field}.{index}", part) for index, part in enumerate(value)]
    elif isinstance(value, list):
        return None
    else:
        wrong = _wrong(value)
        return Flaw(field, wrong) if wrong else None
    return next(
        (flaw for name, part in parts if (flaw := first_flaw(part, name, every_integer=every_integer))), None
    )


def _is_ids(value: list[Any]) -> bool:
    return bool(value) and type(value[0]) is int


def _wrong(value: Any) -> str | None:
    if value is None or isinstance(value, bool | bytes):
        return None
    if isinstance(value, int):
        return None if INT64_MIN <= value <= UINT64_MAX else "must fit 64 bits"
    if isinstance(value, float):
        return None if math.isfinite(value) else f"must be a finite number; it is {value}"
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return f"holds a lone surrogate at {error.start}, which is no Unicode text"
        return None
    return f"can't be sent: a {type(value).__name__} has no form in the protocol"
