"""The scheduler: jobs and costs go in, one plan a turn comes out. Pure; costs are its only time.

The engine and the simulation use it alike: `add` what has work, `plan` a turn and carry it out, tell with
`spent` what it took. A plan may be settled after the next one was made: a device never waits for its host.

What it promises is written in docs/architecture.md, "Fairness, as published", and tested in tests/scheduler.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from stateroom.daemon.scheduler.fairness import OWNERS_KEPT, Ledger
from stateroom.daemon.scheduler.fills import Fills
from stateroom.daemon.scheduler.pace import Pace
from stateroom.daemon.scheduler.places import BACKGROUND_EVERY, SLICE_STEPS, Places
from stateroom.daemon.scheduler.plan import Job, Plan


@dataclass(slots=True)
class Spent:
    """Milliseconds of the device by owner, since the start; of the `OWNERS_KEPT` that had the most."""

    by_owner: dict[str, float] = field(default_factory=dict)

    def add(self, owner: str, ms: float) -> None:
        self.by_owner[owner] = self.by_owner.get(owner, 0.0) + ms
        if len(self.by_owner) > OWNERS_KEPT:
            for least in sorted(self.by_owner, key=self.by_owner.__getitem__)[: OWNERS_KEPT // 2]:
                del self.by_owner[least]


class Schedule:
    """Decides who runs.

    Args:
        rows_max: streams that take a step together, over all batches of an engine.
        pace: sizes the quanta.
        weights: of owners that don't count as 1.
    """

    def __init__(
        self, rows_max: int, *, pace: Pace | None = None, weights: Mapping[str, float] | None = None
    ) -> None:
        self.pace = pace or Pace()
        self.ledgers = (Ledger(weights), Ledger(weights))  # of interactive and background work
        self.places = Places(rows_max, self.ledgers)
        self._fills = (Fills(self.ledgers[0]), Fills(self.ledgers[1]))
        self._jobs: dict[int, Job] = {}
        self._run: tuple[int, ...] | None = ()  # None: to be made anew
        self._quanta_since_background = 0
        self._turns_since_oldest = [0, 0]
        self._row_ms = 1.0  # of a step, for each row; any number until one was measured
        self.spent_ms = Spent()

    # ------------------------------------------------------------ jobs

    def add(self, job: Job) -> None:
        """A fill with tokens to compute, or a stream, begins to wait."""
        assert job.key not in self._jobs
        assert job.kind == "stream" or job.tokens > 0
        self._jobs[job.key] = job
        if job.kind == "fill":
            self._fills[job.background].add(job)
        else:
            self.places.add(job)

    def remove(self, key: int) -> None:
        """A job has ended, failed or was cancelled, wherever it stands. Unknown keys are passed over."""
        job = self._jobs.pop(key, None)
        if job is None:
            return
        if job.kind == "fill":
            self._fills[job.background].remove(key)
        else:
            self.places.remove(key)
            self._run = None

    def planned(self, plan: Plan, key: int) -> bool:
        """Whether a job of the plan is still there, the same and not another one of its key."""
        return key in self._jobs and self._jobs[key] is plan.jobs.get(key)

    @property
    def filling(self) -> int:
        """Prefills that are not done."""
        return len(self._fills[0]) + len(self._fills[1])

    # ------------------------------------------------------------ a turn

    def plan(self) -> Plan:
        """The next turn. Its quantum counts as taken; `spent` tells what was fed in truth."""
        park, admit = self.places.turn(self._row_ms)
        if park or admit or self._run is None:
            self._run = tuple(self.places.running)
        pieces = self._quantum()
        jobs = {job.key: job for job, _ in pieces}
        jobs.update((key, self._jobs[key]) for key in self._run)
        quantum = tuple((job.key, tokens) for job, tokens in pieces)
        total = sum(tokens for _, tokens in quantum)
        pass_ms = self.pace.cost.of(width(quantum) * len(quantum))
        booked = {key: pass_ms * tokens / total for key, tokens in quantum}
        self._book(jobs, booked, 1)
        return Plan(tuple(park), tuple(admit), self._run, quantum, jobs, booked)

    def _quantum(self) -> list[tuple[Job, int]]:
        if not self.filling or (self.places.running and self.pace.alone_due()):
            return []
        interactive, background = self._fills
        pressed = len(interactive) > 0 or self.places.waits(background=False)
        due = not pressed or self._quanta_since_background + 1 >= BACKGROUND_EVERY
        theirs = len(background) > 0 and due
        self._quanta_since_background = 0 if theirs else self._quanta_since_background + 1
        fills = self._fills[theirs]
        had = fills.least_had()
        if had is None:
            return []
        self._turns_since_oldest[theirs] += 1
        oldest = self._turns_since_oldest[theirs] >= SLICE_STEPS
        if oldest:
            self._turns_since_oldest[theirs] = 0
        elif self._withheld(had, background=theirs):
            return []
        room = self.pace.room(hurried=self.places.hurried())
        return fills.take(room, self.pace.cost, self.places.rows_max, oldest=oldest)

    def _withheld(self, had: float, *, background: bool) -> bool:
        """Whether streams of an owner that has had less wait for places: without quanta slices end sooner."""
        if background and self.places.hurried():
            return False  # the time would not be theirs
        least = self.places.least_had(background)
        return least is not None and least < had

    def spent(
        self,
        plan: Plan,
        ms: float,
        *,
        rows: Collection[int] = (),
        fed: Sequence[tuple[int, int]] = (),
        steady: bool = True,
    ) -> tuple[float, float]:
        """Settles a plan, once: what the turn took is charged to those for whom it ran.

        Gives the milliseconds of the step and of the quantum, as they are charged.

        Args:
            ms: of the whole turn.
            rows: of `plan.run`, those that took a step; they may have ended since.
            fed: of `plan.quantum`, (fill, tokens) that were computed.
            steady: no rows were moved or copied, so that the pace may learn from it.
        """
        self._book(plan.jobs, plan.booked, -1)
        given = dict(fed)
        for key, tokens in plan.quantum:
            if self.planned(plan, key):
                self._fills[plan.jobs[key].background].give_back(key, tokens - given.get(key, 0))
        passed = width(fed) * len(fed)
        if steady:
            self.pace.measured_turn(ms, tokens=passed, streams=bool(rows))
        step_ms, quantum_ms = self.pace.split(ms, tokens=passed, streams=bool(rows))
        if rows:
            self._row_ms = step_ms / len(rows)
        for key in rows:
            self.places.stepped(key)
            self._charge(plan.jobs[key], step_ms / len(rows))
        total = sum(tokens for _, tokens in fed)
        for key, tokens in fed:
            self._charge(plan.jobs[key], quantum_ms * tokens / total)
        return step_ms, quantum_ms

    def _book(self, jobs: Mapping[int, Job], booked: Mapping[int, float], sign: int) -> None:
        for key, ms in booked.items():
            self.ledgers[jobs[key].background].book(jobs[key].owner, sign * ms)

    def _charge(self, job: Job, ms: float) -> None:
        self.ledgers[job.background].charge(job.owner, ms)
        self.spent_ms.add(job.owner, ms)


def width(pieces: Collection[tuple[int, int]]) -> int:
    """Tokens of the longest row of a pass."""
    return max((tokens for _, tokens in pieces), default=0)
