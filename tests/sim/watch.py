"""Watches a schedule at work: how long each job waits for its turn, and how much of the device owners had."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from tests.sim.must import must

from stateroom.daemon.scheduler.pace import ALONE_EVERY
from stateroom.daemon.scheduler.places import BACKGROUND_EVERY, OLDEST_EVERY, SLICE_STEPS
from stateroom.daemon.scheduler.plan import Job, Plan

LOOK_EVERY = 16  # turns


class Device(Protocol):
    rows_max: int

    def of(self, rows: int, tokens: list[int]) -> float: ...


class Watch:
    """Counts in milliseconds of the device, which stand still while it has nothing to do or is stalled."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.now_ms = 0.0
        self.turn_ms = 0.0  # of the longest turn
        self.ms_of: Counter[str] = Counter()  # by owner
        self._jobs: dict[int, Job] = {}
        self._since_ms: dict[int, float] = {}  # since when each job waits
        self._there: Counter[tuple[str, bool]] = Counter()  # jobs by kind and class
        self._most: Counter[tuple[str, bool]] = Counter()  # of them, at once
        self._turns = 0

    def added(self, job: Job) -> None:
        self._jobs[job.key], self._since_ms[job.key] = job, self.now_ms
        kind = (job.kind, job.background)
        self._there[kind] += 1
        self._most[kind] = max(self._most[kind], self._there[kind])

    def removed(self, key: int) -> None:
        job = self._jobs.pop(key)
        self._there[job.kind, job.background] -= 1
        self._waited(job)
        del self._since_ms[key]

    def turn(self, plan: Plan, rows: Sequence[int], pieces: Sequence[tuple[int, int]], ms: float) -> None:
        """A turn was over after `ms`."""
        must(len(rows) == len(set(rows)) <= self.device.rows_max, "a row steps twice, or there are too many")
        self.now_ms += ms
        self.turn_ms = max(self.turn_ms, ms)
        self._charge(rows, pieces, ms)
        for key in (*rows, *(key for key, _ in pieces)):
            self._since_ms[key] = self.now_ms
        self._turns += 1
        if not self._turns % LOOK_EVERY:
            for job in self._jobs.values():
                self._waited(job)

    def _waited(self, job: Job) -> None:
        bound_ms, waited_ms = self._bound_ms(job), self.now_ms - self._since_ms[job.key]
        must(waited_ms <= bound_ms, f"{job} has waited {waited_ms:.0f} ms of {bound_ms:.0f}")

    def _charge(self, rows: Sequence[int], pieces: Sequence[tuple[int, int]], ms: float) -> None:
        step_ms = self.device.of(len(rows), [])
        pass_ms = self.device.of(0, [tokens for _, tokens in pieces])
        noise = ms / (step_ms + pass_ms)
        total = sum(tokens for _, tokens in pieces)
        for key in rows:
            self.ms_of[self._jobs[key].owner] += step_ms * noise / len(rows)
        for key, tokens in pieces:
            self.ms_of[self._jobs[key].owner] += pass_ms * noise * tokens / total

    def _bound_ms(self, job: Job) -> float:
        """The most that a job waits, as docs/architecture.md publishes it."""
        most = self._most[job.kind, job.background]
        if job.kind == "fill":
            turns = math.ceil((most + 1) * SLICE_STEPS * (ALONE_EVERY + 1) / ALONE_EVERY) + 1
            return turns * self.turn_ms * (BACKGROUND_EVERY if job.background else 1)
        places = 1 if job.background else max(self.device.rows_max - 1, 1)
        slices = OLDEST_EVERY * OLDEST_EVERY * math.ceil(most / places) + 2
        alone = job.background and self.device.rows_max == 1
        return slices * SLICE_STEPS * self.turn_ms * (BACKGROUND_EVERY if alone else 1)
