"""How the simulation says that something can't be."""

from __future__ import annotations


class Broken(AssertionError):
    """An invariant does not hold."""


def must(true: object, what: str) -> None:
    if not true:
        raise Broken(what)
