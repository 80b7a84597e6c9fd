"""How a session's keys and values are stored: what is asked for, and the codecs that come of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import mlx.core as mx

from stateroom.caches.codecs.affine import Affine
from stateroom.caches.codecs.codec import Codec
from stateroom.caches.codecs.dense import Dense
from stateroom.caches.codecs.turbo import WIDTHS, Turbo

Name = Literal["dense", "affine8", "affine4", "turbo"]
NAMES: tuple[Name, ...] = get_args(Name)
AFFINE_BITS: dict[Name, int] = {"affine8": 8, "affine4": 4}
GROUPS = (64, 32, 128)  # in the order of preference
BITS_MAX = 8


class CannotQuantise(ValueError):
    """A scheme that can't be, or not of such heads; the message names what is possible."""


@dataclass(frozen=True)
class Scheme:
    """What a session asks for.

    Attributes:
        name: which codec.
        group_size: of an affine one; None: the first of 64, 32, 128 that divides the head's width.
        quantise_after: tokens up to which keys and values stay dense.
        key_bits, value_bits: of turbo, 1 to 8.

    Raises:
        CannotQuantise: for values out of range, and a group size without groups.
    """

    name: Name = "dense"
    group_size: int | None = None
    quantise_after: int = 0
    key_bits: int = 8
    value_bits: int = 3

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise CannotQuantise(f"no scheme is called {self.name!r}; there are {_listed(NAMES)}")
        if self.group_size is not None and self.name not in AFFINE_BITS:
            raise CannotQuantise(f"{self.name} has no groups; {_listed(AFFINE_BITS)} have")
        if self.group_size not in (None, *GROUPS):
            raise CannotQuantise(f"groups of {self.group_size}: groups are of {_listed(sorted(GROUPS))}")
        if self.quantise_after < 0:
            raise CannotQuantise(f"quantise_after is {self.quantise_after}: at least 0 tokens stay dense")
        for bits in (self.key_bits, self.value_bits):
            if not 1 <= bits <= BITS_MAX:
                raise CannotQuantise(f"{bits} bits: a coordinate is stored in 1 to {BITS_MAX}")


def codecs_for(scheme: Scheme, key_width: int, value_width: int, dtype: mx.Dtype) -> tuple[Codec, Codec]:
    """The codecs of keys and values of such head widths, whose activations are of `dtype`.

    Raises:
        CannotQuantise: when a width doesn't suit the scheme.
    """
    return (
        _codec(scheme, "keys", key_width, scheme.key_bits, dtype),
        _codec(scheme, "values", value_width, scheme.value_bits, dtype),
    )


def _codec(scheme: Scheme, what: str, width: int, turbo_bits: int, dtype: mx.Dtype) -> Codec:
    if scheme.name == "dense" or not width:  # some layers store keys only
        return Dense()
    if scheme.name == "turbo":
        if width not in WIDTHS:
            raise _refused(scheme, what, width)
        return Turbo(turbo_bits, width, dtype)
    fitting = _groups(width)
    if scheme.group_size is not None:
        fitting = [group for group in fitting if group == scheme.group_size]
    if not fitting:
        raise _refused(scheme, what, width)
    return Affine(AFFINE_BITS[scheme.name], fitting[0], dtype)


def _groups(width: int) -> list[int]:
    return [group for group in GROUPS if width and width % group == 0]


def _refused(scheme: Scheme, what: str, width: int) -> CannotQuantise:
    asked = scheme.name if scheme.group_size is None else f"{scheme.name} in groups of {scheme.group_size}"
    possible = ["dense"]
    if groups := _groups(width):
        possible += [f"{name} in groups of {_listed(sorted(groups), 'or')}" for name in AFFINE_BITS]
    if width in WIDTHS:
        possible.append("turbo")
    return CannotQuantise(f"{what} of width {width} can't be {asked}; they can be {_listed(possible, 'or')}")


def _listed(words: Iterable[object], last: str = "and") -> str:
    *first, end = map(str, words)
    return f"{', '.join(first)} {last} {end}" if first else end
