"""On which line of a TOML file each key stands: `tomllib` doesn't tell. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

PARSED_MAX = 2**20  # characters read again and again: where that is too little, no further line is told
DEPTH_MAX = 4  # of tables; ours have 3

Place = tuple[str, ...]  # a key and the tables around it: ("quota", "editor", "sessions")


def lines_of(text: str) -> dict[Place, int]:
    """The first line of each key and table of a text that is TOML, counted from 1.

    A statement is as many lines as it takes until they are TOML by themselves, so that `tomllib` alone says
    what a string, an array or a header is.
    """
    found: dict[Place, int] = {}
    table: Place = ()
    begun, first, parsed = "", 1, 0
    for number, line in enumerate(text.split("\n"), 1):
        begun += f"{line}\n"
        parsed += len(begun)
        if parsed > PARSED_MAX:
            break
        try:
            said = tomllib.loads(begun)
        except (ValueError, RecursionError):
            continue
        places = list(_places(said))
        if begun.lstrip().startswith("["):
            table = places[-1]
            places = [table[: depth + 1] for depth in range(len(table))]
        else:
            places = [table + place for place in places]
        for place in places:
            found.setdefault(place, first)
        begun, first = "", number + 1
    return found


def _places(values: dict[str, Any], above: Place = ()) -> Iterator[Place]:
    for name, value in values.items():
        yield (*above, name)
        if isinstance(value, dict) and len(above) < DEPTH_MAX:
            yield from _places(value, (*above, name))
