"""A simulated device: the scheduler's plans are carried out at made-up costs, and written down."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

from stateroom.daemon.scheduler.plan import Job, Plan
from stateroom.daemon.scheduler.schedule import Schedule, width


@dataclass
class Costs:
    """Milliseconds. Measurements are off by up to `noise` of themselves."""

    step: float = 10.0
    row: float = 0.5
    pass_: float = 6.0
    token: float = 0.2
    noise: float = 0.0

    def of_step(self, rows: int) -> float:
        return self.step + self.row * rows if rows else 0.0

    def of_pass(self, tokens: int) -> float:
        return self.pass_ + self.token * tokens if tokens else 0.0


@dataclass
class Record:
    """One turn as it was: its time, whom it served."""

    plan: Plan
    step_ms: float
    quantum_ms: float
    fed: tuple[tuple[int, int], ...]


@dataclass
class Device:
    """Runs a schedule. `lag`: plans are settled a turn late, as the engine settles them."""

    schedule: Schedule
    costs: Costs = field(default_factory=Costs)
    lag: bool = True
    seed: int = 0
    now_ms: float = 0.0
    records: list[Record] = field(default_factory=list)
    ms_of: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    left: dict[int, int] = field(default_factory=dict)  # of fills, as the device counts
    jobs: dict[int, Job] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    _late: Record | None = None

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def add(
        self, key: int, owner: str, tokens: int = 0, *, background: bool = False, joins: bool = True
    ) -> None:
        """A fill of so many tokens, or a stream, where there are none."""
        job = Job(key, owner, "fill" if tokens else "stream", background, tokens, joins, joins)
        self.jobs[key] = job
        if tokens:
            self.left[key] = tokens
        self.schedule.add(job)

    def end(self, key: int) -> None:
        self.schedule.remove(key)
        self.left.pop(key, None)
        self.done.add(key)

    def turn(self) -> Record:
        plan = self.schedule.plan()
        self._check(plan)
        fed = tuple(plan.quantum)
        step_ms = self.costs.of_step(len(plan.run))
        quantum_ms = self.costs.of_pass(width(fed) * len(fed))
        record = Record(plan, step_ms, quantum_ms, fed)
        self.records.append(record)
        for key in plan.run:
            self.ms_of[self.jobs[key].owner] += step_ms / len(plan.run)
        for key, tokens in fed:
            self.ms_of[self.jobs[key].owner] += quantum_ms * tokens / sum(n for _, n in fed)
        self.now_ms += step_ms + quantum_ms
        due: Record | None = record
        if self.lag:
            due, self._late = self._late, record
        if due is not None:
            self._settle(due)
        for key, tokens in fed:
            self.left[key] -= tokens
            if not self.left[key]:
                self.end(key)
        return record

    def _settle(self, record: Record) -> None:
        ms = record.step_ms + record.quantum_ms
        ms *= 1.0 + self.costs.noise * (2.0 * self._random.random() - 1.0)
        self.schedule.spent(record.plan, ms, rows=record.plan.run, fed=record.fed)

    def _check(self, plan: Plan) -> None:
        """What holds of every plan."""
        assert len(plan.run) == len(set(plan.run)) <= self.schedule.places.rows_max
        assert not set(plan.park) & set(plan.run)
        assert set(plan.admit) <= set(plan.run)
        assert not (set(plan.run) | {key for key, _ in plan.quantum}) & self.done
        before = set(self.records[-1].plan.run) - self.done if self.records else set()
        assert before - set(plan.park) | set(plan.admit) == set(plan.run)
        longest = width(plan.quantum)
        for key, tokens in plan.quantum:
            assert 0 < tokens <= self.left[key]
            assert tokens == longest or tokens == self.left[key]  # a padded row ends with the pass
        assert len({self.jobs[key].background for key, _ in plan.quantum}) <= 1
