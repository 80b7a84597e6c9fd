"""What goes into the scheduler, and what comes out: facts of jobs, and a plan for one turn of the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["fill", "stream"]


@dataclass(frozen=True, slots=True)
class Job:
    """Facts of one request that has work for the device.

    Attributes:
        key: names it; a decode that computes missing KV first is a fill, and then a stream of the same key.
        owner: who pays.
        kind: a fill computes `tokens` once; a stream draws, a token a step, for as long as it holds a place.
        background: served behind interactive ones.
        tokens: a fill's, to be computed.
        joins: a fill whose pass others may share as rows of it. `pads`: also rows that are longer than it is:
            what is fed beyond its end can be trimmed away.
    """

    key: int
    owner: str
    kind: Kind
    background: bool = False
    tokens: int = 0
    joins: bool = False
    pads: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """One turn: rows move, everyone in `run` takes a step, then `quantum` is one pass of a prefill.

    Attributes:
        park: streams that give their places up, before anybody is admitted.
        admit: streams that take places.
        run: all streams that hold places then.
        quantum: (fill, tokens) of each row of the pass, empty: none. Rows with fewer tokens than the longest
            end with this pass and are padded behind.
        jobs: the facts of all these.
        booked: owners' milliseconds that the quantum is expected to cost, until it is settled.
    """

    park: tuple[int, ...] = ()
    admit: tuple[int, ...] = ()
    run: tuple[int, ...] = ()
    quantum: tuple[tuple[int, int], ...] = ()
    jobs: Mapping[int, Job] = field(default_factory=dict)
    booked: Mapping[int, float] = field(default_factory=dict)
