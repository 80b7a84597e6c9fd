"""What happened to each request in this worker, remembered for a while: what `trace` tells. Pure.

A ring of the last events, for all requests together. A step is no event: those that the same rows took one
after the other are one, with their number, until something else happened. So a step costs the recorder one
look at what it has open, however many rows took it.

The device does one thing at a time, so what lies between two ends is the second one's. (Launching a step may
block until the quantum before it is nearly done: then a step has what such steps took alone, and the quantum
the rest, as the schedule has it: `Pace.split`.) What a request spent
behind steps and quanta that were not its own is worked out when somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from stateroom.daemon.link import Mark

EVENTS_MAX = 16_384  # remembered; 6 MiB, 10 with 64 rows; see docs/tracing.md for the time of a look
STEPS_MAX = 256  # told as one event, so that a long stream shows where it was slow
PAUSE_MS = 20.0  # between two steps: longer, and they are told as two events
OPEN_MAX = 64  # runs of steps; there are as many as batches, and some of batches that were
OWN_MAX = 500  # events of one request that are told: its first and its last
OTHERS_MIN_MS = 0.1  # behind others: less isn't told
TAKEN, ANSWERED, OTHERS, NOW = "taken", "answered", "others", "now"
WORK = frozenset(("prefill", "score", "verify", "decode", "rounds"))  # of the device


class Event(NamedTuple):
    """`tokens`: of each of the rids, where they differ. `guesses`: likewise, where there were any.

    Where thousands are looked through, their fields go by number, which is quicker.
    """

    rids: tuple[int, ...]
    name: str
    start_ms: float
    end_ms: float
    details: dict[str, Any]
    tokens: Sequence[int] = ()
    guesses: Sequence[int] = ()

    def mark(self, rid: int) -> Mark:
        details = dict(self.details)
        if self.tokens:
            details["tokens"] = self.tokens[self.rids.index(rid)]
        if self.guesses:
            details["guesses"] = self.guesses[self.rids.index(rid)]
        return Mark(self.name, self.start_ms, self.end_ms - self.start_ms, details)


@dataclass(slots=True)
class _Run:
    """Steps of the same rows, one after the other."""

    rids: tuple[int, ...]
    start_ms: float
    end_ms: float
    steps: int
    busy_ms: float
    most_ms: float
    tokens: list[int] | None = None  # of each row, where not every step brought each just one
    guesses: list[int] | None = None

    def event(self) -> Event:
        details = {
            "steps": self.steps,
            "tokens": self.steps,
            "rows": len(self.rids),
            "slowest_ms": round(self.most_ms, 3),
        }
        if self.end_ms - self.start_ms - self.busy_ms > OTHERS_MIN_MS:
            details["busy_ms"] = round(self.busy_ms, 3)  # another batch's steps lay between
        name = "decode" if self.guesses is None else "rounds"
        return Event(
            self.rids, name, self.start_ms, self.end_ms, details, self.tokens or (), self.guesses or ()
        )


class Recorder:
    """Of one engine. Times are milliseconds of its clock.

    Attributes:
        on: it records. What it remembers stays when it is switched off.
    """

    def __init__(self, *, on: bool = True, events_max: int = EVENTS_MAX) -> None:
        self.on = on
        self._past: deque[Event] = deque(maxlen=events_max)
        self._runs: dict[int, _Run] = {}  # by batch
        self._waits: dict[int, tuple[str, float, dict[str, Any]]] = {}  # by rid
        self._until_ms = 0.0  # when the device last ended something

    # ------------------------------------------------------------ a request

    def taken(self, rid: int, op: str, now_ms: float) -> None:
        """The request has come."""
        if self.on:
            self._past.append(Event((rid,), TAKEN, now_ms, now_ms, {"op": op}))

    def wait(self, rid: int, name: str, now_ms: float, **details: Any) -> None:
        """It waits from now on, until it waits for something else, goes on or is answered."""
        self.go(rid, now_ms)
        if self.on:
            self._waits[rid] = name, now_ms, details

    def go(self, rid: int, now_ms: float) -> None:
        """It waits no longer, if it did."""
        wait = self._waits.pop(rid, None)
        if wait is not None:
            name, start_ms, details = wait
            self._past.append(Event((rid,), name, start_ms, now_ms, details))

    def answered(self, rid: int, code: str, now_ms: float) -> None:
        """It had its final answer."""
        self.go(rid, now_ms)
        if self.on:
            self._past.append(Event((rid,), ANSWERED, now_ms, now_ms, {"code": code}))

    # ------------------------------------------------------------ the device

    def quantum(
        self, name: str, rids: tuple[int, ...], tokens: Sequence[int], launched_ms: float, now_ms: float
    ) -> None:
        """A pass over prompts has ended, a row each."""
        if not self.on:
            return
        self._close()
        start_ms, self._until_ms = max(self._until_ms, launched_ms), now_ms
        details = {"rows": len(rids), "width": max(tokens)}
        self._past.append(Event(rids, name, start_ms, now_ms, details, tokens))

    def stepped(
        self,
        batch: int,
        rids: tuple[int, ...],
        launched_ms: float,
        now_ms: float,
        tokens: Sequence[int] = (),
        guesses: Sequence[int] = (),
        most_ms: float | None = None,
    ) -> None:
        """A step of a batch has ended. `tokens`: of each row, unless it brought each just one; `guesses`:
        of each row in a round, which it verified. `most_ms`: it took no longer; what lies behind it on the
        device may have ended by now, too."""
        if not self.on or not rids:
            return
        start_ms = max(self._until_ms, launched_ms)
        if most_ms is not None and start_ms + most_ms < now_ms:
            now_ms = start_ms + most_ms
        self._until_ms, ms = now_ms, now_ms - start_ms
        run = self._runs.get(batch)
        if run is None or not _goes_on(run, rids, start_ms, bool(guesses)):
            self._begin_run(batch, _Run(rids, start_ms, now_ms, 1, ms, ms), tokens, guesses)
            return
        run.end_ms = now_ms
        run.steps += 1
        run.busy_ms += ms
        if ms > run.most_ms:
            run.most_ms = ms
        if run.tokens is not None or tokens:
            _add(run, tokens, guesses)

    def _begin_run(self, batch: int, run: _Run, tokens: Sequence[int], guesses: Sequence[int]) -> None:
        before = self._runs.pop(batch, None)
        if before is not None:
            self._past.append(before.event())
        if len(self._runs) >= OPEN_MAX:
            self._close()
        self._runs[batch] = run
        if tokens:
            run.tokens = list(tokens)
        if guesses:
            run.guesses = list(guesses)

    def _close(self) -> None:
        for run in self._runs.values():
            self._past.append(run.event())
        self._runs.clear()

    # ------------------------------------------------------------ what is told

    def marks(self, rid: int, now_ms: float) -> tuple[list[Mark], int]:
        """What is remembered of a request, in the order of time, and how much at the least isn't told."""
        own, foreign, begun = self._since(rid)
        wait = self._waits.get(rid)
        if wait is not None:
            own.append(Event((rid,), wait[0], wait[1], now_ms, wait[2]))
        if not own:
            return [], 0
        own.sort(key=_start)
        foreign.sort(key=_start)
        if not any(event.name is ANSWERED for event in own):
            own.append(Event((rid,), NOW, now_ms, now_ms, {}))
        left_out = max(len(own) - OWN_MAX, 0)
        parts = [own[: OWN_MAX // 2], own[-(OWN_MAX // 2) :]] if left_out else [own]
        told = [mark for part in parts for mark in _with_others(part, foreign, rid)]
        return told, left_out + (not begun)

    def _since(self, rid: int) -> tuple[list[Event], list[Event], bool]:
        """What happened to a request since it came, and what the device did for others, the earliest first;
        whether its beginning is still there."""
        own: list[Event] = []
        foreign: list[Event] = []
        begun = False
        for event in chain((run.event() for run in self._runs.values()), reversed(self._past)):
            if rid in event[0]:
                own.append(event)
                if event[1] is TAKEN:
                    begun = True
                    break
            elif event[1] in WORK:
                foreign.append(event)
        return own[::-1], foreign[::-1], begun


_start = itemgetter(2)  # of an event: `start_ms`


def _goes_on(run: _Run, rids: tuple[int, ...], start_ms: float, guessed: bool) -> bool:
    return (
        run.rids == rids
        and run.steps < STEPS_MAX
        and start_ms - run.end_ms <= PAUSE_MS
        and (run.guesses is not None) == guessed
    )


def _add(run: _Run, tokens: Sequence[int], guesses: Sequence[int]) -> None:
    """Of a step that did not bring each row just one token, or comes behind one that didn't."""
    so_far = run.tokens if run.tokens is not None else [run.steps - 1] * len(run.rids)
    run.tokens = [a + b for a, b in zip(so_far, tokens or [1] * len(run.rids), strict=True)]
    if run.guesses is not None:
        run.guesses = [a + b for a, b in zip(run.guesses, guesses, strict=True)]


def _with_others(own: Sequence[Event], foreign: Iterable[Event], rid: int) -> list[Mark]:
    """The marks of a request's events, with those of others between them."""
    start_ms, end_ms = own[0].start_ms, own[-1].end_ms
    between = [event for event in foreign if event[3] > start_ms and event[2] < end_ms]
    marks = [event.mark(rid) for event in own]
    return sorted(marks + behind_others(marks, between), key=lambda mark: mark.start_ms)


def behind_others(own: Sequence[Mark], foreign: Iterable[Event]) -> list[Mark]:
    """Where nothing of its own covers a request's time, and the device was at work for others: one mark for
    each such gap. `own`, and what is `foreign`, in the order of their starts."""
    gaps = list(_gaps(own))
    behind: list[_Behind | None] = [None] * len(gaps)
    at = 0
    for event in foreign:
        name, start_ms, end_ms = event[1:4]
        while at < len(gaps) and gaps[at][1] <= start_ms:
            at += 1
        for number in range(at, len(gaps)):
            first_ms, last_ms = gaps[number]
            if first_ms >= end_ms:
                break
            begin_ms = start_ms if start_ms > first_ms else first_ms
            until_ms = end_ms if end_ms < last_ms else last_ms
            if until_ms - begin_ms >= OTHERS_MIN_MS:
                there = behind[number]
                if there is None:
                    there = behind[number] = _Behind(begin_ms)
                there.end_ms = max(there.end_ms, until_ms)
                there.ms[name] = there.ms.get(name, 0.0) + until_ms - begin_ms
    return [there.mark() for there in behind if there is not None]


@dataclass(slots=True)
class _Behind:
    """What others had of one gap."""

    start_ms: float
    end_ms: float = 0.0
    ms: dict[str, float] = field(default_factory=dict)  # by what the device did

    def mark(self) -> Mark:
        told = {f"{name}_ms": ms for name, ms in self.ms.items()}
        return Mark(OTHERS, self.start_ms, self.end_ms - self.start_ms, told)


def _gaps(own: Sequence[Mark]) -> Iterable[tuple[float, float]]:
    until_ms = own[0].start_ms
    for mark in own:
        if mark.start_ms - until_ms >= OTHERS_MIN_MS:
            yield until_ms, mark.start_ms
        until_ms = max(until_ms, mark.start_ms + mark.ms)
