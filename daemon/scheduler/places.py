"""Which streams run: at most `rows_max` take a step together, the others wait, parked. Pure.

- A free place goes to an interactive stream before a background one. An interactive stream that waits takes a
  background one's place at once.
- One place is the background's as long as it has a stream. Where there is one place only, every
  `BACKGROUND_EVERY`-th slice of it is.
- When streams wait, a place is held for a slice of `SLICE_STEPS` steps; then it goes to a stream of the
  owner that has had the least, and within an owner to the one that waits longest. What the slices under way
  will cost is counted with what was paid: places are dealt out evenly, not all to whoever is behind.
- Whatever their owners have had, every `OLDEST_EVERY`-th place goes to the stream of its class that waits
  longest, and nobody keeps one for more than so many slices while others wait: an owner's prefills can't
  starve its streams.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from stateroom.daemon.scheduler.fairness import Ledger
from stateroom.daemon.scheduler.plan import Job

SLICE_STEPS = 32  # a row's joining and leaving cost at most a step or two
OLDEST_EVERY = 8
BACKGROUND_EVERY = 8  # slices of a single place, and quanta: one of so many is the background's


@dataclass(slots=True, eq=False)
class Row:
    """A stream that holds a place; `steps` of its slice. `kept`: a slice that is the background's own."""

    job: Job
    kept: bool = False
    steps: int = 0

    @property
    def over(self) -> bool:
        return self.steps >= SLICE_STEPS


class Places:
    """The places of an engine. `ledgers`: of interactive and of background owners."""

    def __init__(self, rows_max: int, ledgers: tuple[Ledger, Ledger]) -> None:
        assert rows_max >= 1
        self.rows_max = rows_max
        self._ledgers = ledgers
        self.running: dict[int, Row] = {}
        self._waiting: tuple[dict[str, OrderedDict[int, Job]], ...] = ({}, {})  # of either class, by owner
        self._by_age: tuple[dict[int, Job], dict[int, Job]] = ({}, {})
        self._since_oldest = [0, 0]  # places given
        self._rows_of_background = 0
        self._slices_since_background = 0
        self._booked: dict[tuple[bool, str], int] = {}  # steps of slices under way
        self._row_ms = 1.0

    # ------------------------------------------------------------ coming and going

    @property
    def parked(self) -> int:
        """Streams that wait."""
        return len(self._by_age[0]) + len(self._by_age[1])

    def waits(self, background: bool) -> bool:
        return bool(self._by_age[background])

    def hurried(self) -> bool:
        """Whether an interactive stream runs."""
        return len(self.running) > self._rows_of_background

    def add(self, job: Job) -> None:
        """A stream waits for a place."""
        self._ledgers[job.background].wait(job.owner)
        self._queue(job)

    def _queue(self, job: Job, *, first: bool = False) -> None:
        queue = self._waiting[job.background].setdefault(job.owner, OrderedDict())
        queue[job.key] = job
        if first:
            queue.move_to_end(job.key, last=False)
        self._by_age[job.background][job.key] = job

    def remove(self, key: int) -> None:
        """A stream has ended, or is gone."""
        if key in self.running:
            self._leave(key)
        else:
            self._wait_ends(self._by_age[key in self._by_age[1]][key])

    def _wait_ends(self, job: Job) -> None:
        del self._by_age[job.background][job.key]
        owners = self._waiting[job.background]
        del owners[job.owner][job.key]
        if not owners[job.owner]:
            del owners[job.owner]
        self._ledgers[job.background].waits_no_more(job.owner)

    def _enter(self, job: Job) -> None:
        oldest = next(iter(self._by_age[job.background])) == job.key
        self._since_oldest[job.background] = 0 if oldest else self._since_oldest[job.background] + 1
        kept = job.background and self.rows_max == 1 and self._background_due()
        self._wait_ends(job)
        self.running[job.key] = Row(job, kept)
        self._rows_of_background += job.background
        self._slices_since_background = 0 if job.background else self._slices_since_background + 1
        self._book(job, SLICE_STEPS)

    def _leave(self, key: int) -> Row:
        row = self.running.pop(key)
        self._rows_of_background -= row.job.background
        self._book(row.job, -max(SLICE_STEPS - row.steps, 0))
        return row

    def _book(self, job: Job, steps: int) -> None:
        at = (job.background, job.owner)
        booked = self._booked.pop(at, 0) + steps
        if booked:
            self._booked[at] = booked

    def stepped(self, key: int) -> None:
        """A row took one step."""
        row = self.running.get(key)
        if row is not None:
            if row.steps < SLICE_STEPS:
                self._book(row.job, -1)
            row.steps += 1

    # ------------------------------------------------------------ a turn

    def turn(self, row_ms: float) -> tuple[list[int], list[int]]:
        """Who gives a place up, and who takes one. `row_ms`: what a row's step costs, as far as is known."""
        if not self.parked:
            return [], []
        self._row_ms = row_ms
        admitted: list[int] = []
        while len(self.running) < self.rows_max and self.parked:
            self._admit(self._next_of(self._background_due() or not self.waits(False)), admitted)
        rows: list[Row] = []  # they wait from the next turn on: nobody is parked and admitted in one
        while self.waits(False) and self._rows_of_background > self._background_share():
            row = self._least_entitled()
            self._give_up(row, rows)
            self._admit(self._next_of(False), admitted)
        for row in self._slices_over():
            heir = self._heir(row)
            if heir is not None:
                self._give_up(row, rows)
                self._admit(heir, admitted)
            elif self.rows_max == 1:
                self._renew(row)
        for row in reversed(rows):
            if not row.over:
                self._queue(row.job, first=True)
        for row in rows:
            if row.over:
                self._queue(row.job)
        return [row.job.key for row in rows], admitted

    def _admit(self, job: Job, admitted: list[int]) -> None:
        self._enter(job)
        admitted.append(job.key)

    def _give_up(self, row: Row, rows: list[Row]) -> None:
        self._leave(row.job.key)
        self._ledgers[row.job.background].wait(row.job.owner, comes=False)
        rows.append(row)

    def _renew(self, row: Row) -> None:
        row.steps = 0
        self._book(row.job, SLICE_STEPS)
        self._slices_since_background += not row.job.background

    def _background_due(self) -> bool:
        """Whether the next place is the background's before any interactive stream's."""
        if not self.waits(True):
            return False
        if self.rows_max == 1:
            return self._slices_since_background >= BACKGROUND_EVERY - 1
        return not self._rows_of_background

    def _background_share(self) -> int:
        """Rows that the background keeps although interactive streams wait."""
        if self.rows_max > 1:
            return 1
        return int(any(row.kept and not row.over for row in self.running.values()))

    def _next_of(self, background: bool) -> Job:
        """Of the owner that has had the least, the stream that waits longest; or that of all owners."""
        if self._since_oldest[background] + 1 >= OLDEST_EVERY:
            return self._oldest(background)
        owners = self._waiting[background]
        owner = min(owners, key=lambda owner: self._had(background, owner))
        return next(iter(owners[owner].values()))

    def _oldest(self, background: bool) -> Job:
        return next(iter(self._by_age[background].values()))

    def least_had(self, background: bool) -> float | None:
        """The least that an owner of waiting streams was charged; None: there is none."""
        ledger = self._ledgers[background]
        return min((ledger.had(owner) for owner in self._waiting[background]), default=None)

    def _had(self, background: bool, owner: str) -> float:
        ledger = self._ledgers[background]
        booked_ms = self._booked.get((background, owner), 0) * self._row_ms
        return ledger.had(owner) + booked_ms / ledger.weight(owner)

    def _least_entitled(self) -> Row:
        """The background row that gives way first: of whoever had the most, the last that came."""
        rows = [row for row in self.running.values() if row.job.background]
        return max(reversed(rows), key=lambda row: self._had(True, row.job.owner))

    def _slices_over(self) -> list[Row]:
        """Rows that have had their slice, those first whose owners have had the most."""
        over = [row for row in self.running.values() if row.over]
        return sorted(over, key=lambda row: -self._had(row.job.background, row.job.owner))

    def _heir(self, row: Row) -> Job | None:
        """Who takes this row's place, now that its slice is over; None: nobody has more of a right to it."""
        job = row.job
        if not job.background and self._background_due():
            return self._next_of(True)
        if not self.waits(job.background):
            return None
        if row.steps >= OLDEST_EVERY * SLICE_STEPS or self._since_oldest[job.background] + 1 >= OLDEST_EVERY:
            return self._oldest(job.background)
        heir = self._next_of(job.background)
        if heir.owner == job.owner:
            return heir
        if self._had(job.background, heir.owner) < self._had(job.background, job.owner):
            return heir
        own = self._waiting[job.background].get(job.owner)
        return next(iter(own.values())) if own else None
