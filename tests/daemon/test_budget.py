"""One budget of KV among workers: whatever order messages take, what they may hold never passes the total."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateroom.daemon.budget import DUST_PART, FLOOR_PART, REST_S, STEP_PART, WANT_S, KvBudget

TOTAL = 64_000
HAPPENINGS = ["start", "ready", "busy", "short", "end", "time", *["read", "deliver", "grow"] * 2, "deliver"]


@dataclass
class Worker:
    """As the engine's: takes more at once, gives way when it can, answers each budget, or the last of two."""

    who: int
    ready: bool = False
    budget: int = 0
    held: int = 0
    busy: int = 0
    owes: int | None = None  # the budget that it isn't within yet
    demoted: int = 0
    used_s: float = 0.0
    inbox: deque[int] = field(default_factory=deque)
    outbox: deque[tuple[str, int]] = field(default_factory=deque)

    @property
    def most(self) -> int:
        """What it may come to hold before it reads another message."""
        return max(self.budget, self.held)

    def read(self) -> None:
        self.budget = self.owes = self.inbox.popleft()
        self.yield_()

    def yield_(self) -> None:
        """Lets go of what is idle, as far as it must."""
        self.held = max(self.busy, min(self.held, self.budget))
        if self.owes is not None and self.held <= self.budget:
            self.outbox.append(("within", self.owes))
            self.owes = None

    def grow(self, by: int) -> None:
        self.held = max(self.held, min(self.held + by, self.budget))


class World:
    """Workers and the budget, with messages on their way. After each step the total must not be passed."""

    def __init__(self, seed: int, total: int = TOTAL) -> None:
        self.random = random.Random(seed)
        self.budget = KvBudget(total)
        self.workers: dict[int, Worker] = {}
        self.now_s = 0.0
        self.made = 0
        self.told = 0
        self.fell = False  # the total fell, and some hold more than it

    def settle(self) -> None:
        for who, nbytes in self.budget.settle(self.now_s).items():
            assert nbytes >= 0
            self.workers[who].inbox.append(nbytes)
            self.told += 1
        self.check()

    def check(self) -> None:
        held = sum(worker.held for worker in self.workers.values())
        could = sum(max([worker.most, *worker.inbox]) for worker in self.workers.values())
        for who, worker in self.workers.items():
            member = self.budget.member(who)
            assert member is not None
            assert max([worker.most, *worker.inbox]) <= member.bound, "more than is believed"
        self.fell = self.fell and self.budget.bound > self.budget.total
        if not self.fell:
            assert self.budget.bound <= self.budget.total
            assert held <= could <= self.budget.total
        assert self.budget.granted <= self.budget.total or self.fell

    def start(self) -> Worker:
        self.made += 1
        self.workers[self.made] = Worker(self.made)
        self.budget.join(self.made)
        return self.workers[self.made]

    def make_ready(self, worker: Worker) -> None:
        worker.ready = True
        worker.inbox.append(self.budget.ready(worker.who))

    def deliver(self, worker: Worker) -> None:
        kind, nbytes = worker.outbox.popleft()
        if kind == "within":
            self.budget.within(worker.who, nbytes)
        elif kind == "short":
            self.budget.short(worker.who, nbytes, self.now_s)
        else:
            self.budget.holds(worker.who, nbytes, worker.busy, worker.demoted, worker.used_s, self.now_s)

    def step(self) -> None:
        """Anything that can happen."""
        chance = self.random
        ready = [worker for worker in self.workers.values() if worker.ready]
        waiting = [worker for worker in self.workers.values() if not worker.ready]
        what = chance.choice(HAPPENINGS)
        if what == "start" and len(self.workers) < 5:
            self.start()
        elif what == "ready" and waiting:
            self.make_ready(chance.choice(waiting))
        elif what == "end" and self.workers and chance.random() < 0.2:
            self.budget.leave(self.workers.pop(chance.choice(list(self.workers))).who)
        elif what == "time":
            self.now_s += chance.choice([0.1, 1.0, WANT_S, REST_S])
        elif ready:
            worker = chance.choice(ready)
            if what == "read" and worker.inbox:
                worker.read()
            elif what == "deliver" and worker.outbox:
                self.deliver(worker)
            elif what == "grow" and worker.owes is None:
                worker.grow(chance.randrange(TOTAL // 4))
                worker.outbox.append(("pulse", worker.held))
            elif what == "busy":
                worker.busy = chance.randrange(worker.held + 1)
                worker.demoted += chance.randrange(2)
                worker.used_s = self.now_s
                worker.yield_()
            elif what == "short":
                worker.outbox.append(("short", chance.randrange(1, TOTAL)))
        self.settle()

    def quiet(self) -> None:
        """All messages arrive, and what is in use is given back in time."""
        for _ in range(200):
            self.settle()
            moved = False
            for worker in self.workers.values():
                if not worker.ready:
                    self.make_ready(worker)
                while worker.inbox or worker.outbox or worker.owes is not None:
                    moved = True
                    worker.busy = 0
                    worker.yield_()
                    if worker.inbox:
                        worker.read()
                    while worker.outbox:
                        self.deliver(worker)
            if not moved:
                return
        raise AssertionError("messages go to and fro without end")


@given(st.integers(0, 2**32), st.integers(50, 400))
def test_what_workers_may_hold_never_passes_the_total(seed: int, steps: int) -> None:
    """B49: under any order of messages, starts and deaths; and what each may hold is known."""
    world = World(seed)
    for _ in range(steps):
        world.step()
    world.quiet()
    if any(worker.ready for worker in world.workers.values()):
        world.now_s += WANT_S
        world.quiet()
        spare = world.budget.total - world.budget.granted
        dust = len(world.workers) * (TOTAL // DUST_PART + 1)
        assert spare <= dust, "what nobody has is of no use to anybody"


@given(st.integers(0, 2**32), st.lists(st.integers(0, TOTAL), min_size=1, max_size=6))
def test_a_total_that_falls_and_rises_is_followed(seed: int, totals: list[int]) -> None:
    world = World(seed)
    for total in totals:
        for _ in range(40):
            world.step()
        world.fell = True
        world.budget.total = total
        world.settle()
        world.quiet()
        assert world.budget.bound <= total
        assert sum(worker.held for worker in world.workers.values()) <= total


@pytest.fixture
def two() -> tuple[World, Worker, Worker]:
    world = World(0)
    first, second = world.start(), world.start()
    world.settle()
    world.quiet()
    return world, first, second


def say(world: World, worker: Worker, kind: str, nbytes: int) -> None:
    worker.outbox.append((kind, nbytes))
    world.quiet()


Two = tuple[World, Worker, Worker]


def test_a_lone_worker_has_all_of_it() -> None:
    world = World(0)
    worker = world.start()
    world.settle()
    world.quiet()
    assert worker.budget == TOTAL


def test_who_comes_gets_an_equal_share_at_once_or_when_others_gave_way() -> None:
    world = World(0)
    first = world.start()
    world.settle()
    world.quiet()
    first.held = first.busy = TOTAL
    second = world.start()
    world.settle()
    world.make_ready(second)
    second.read()
    assert second.budget == 0
    first.read()
    assert second.inbox == deque()  # all is in use
    first.busy = TOTAL // 4
    first.yield_()
    world.deliver(first)
    world.settle()
    second.read()
    assert (first.budget, second.budget) == (TOTAL // 2, TOTAL // 2)


def test_who_is_short_gets_what_others_do_not_hold(two: Two) -> None:
    world, first, second = two
    assert (first.budget, second.budget) == (TOTAL // 2, TOTAL // 2)
    second.held = 1_000
    say(world, second, "pulse", 1_000)
    say(world, first, "short", 10_000)
    assert first.budget >= TOTAL // 2 + 10_000
    assert second.budget >= TOTAL // 2 // FLOOR_PART
    assert second.held == 1_000


def test_who_is_short_gets_what_others_hold_and_do_not_use(two: Two) -> None:
    world, first, second = two
    second.held = TOTAL // 2
    say(world, second, "pulse", second.held)
    say(world, first, "short", 10_000)
    assert first.budget >= TOTAL // 2 + 10_000
    assert second.held <= TOTAL // 2 - 10_000


def test_what_is_in_use_stays(two: Two) -> None:
    world, first, second = two
    second.held = second.busy = TOTAL // 2
    second.outbox += [("pulse", second.held)]
    world.deliver(second)
    first.outbox += [("short", 10_000)]
    world.deliver(first)
    world.settle()
    assert not first.inbox
    assert not second.inbox


def test_nobody_is_asked_below_its_floor(two: Two) -> None:
    world, first, second = two
    say(world, first, "short", TOTAL // 2 - TOTAL // 2 // FLOOR_PART)
    assert second.budget >= TOTAL // 2 // FLOOR_PART
    before = first.budget
    world.now_s += 2 * REST_S
    say(world, first, "short", TOTAL)  # can't be had, so nothing is moved for it
    assert (first.budget, second.budget) == (before, TOTAL - before)


def test_two_that_want_everything_come_to_rest_at_equal_shares(two: Two) -> None:
    """Sessions would be moved to disk and back without end otherwise."""
    world, first, second = two
    for worker in two[1:]:
        worker.held = worker.budget
        say(world, worker, "pulse", worker.held)
    told = []
    for _ in range(50):
        for worker in (first, second):
            worker.grow(TOTAL)
            worker.outbox.append(("pulse", worker.held))
            say(world, worker, "short", 5_000)
            world.now_s += 1.0
        told.append(world.told)
    assert told[-1] == told[9]
    assert abs(first.budget - second.budget) <= 2 * TOTAL // STEP_PART


def test_who_has_rested_gives_and_gets_its_share_back_when_it_wants(two: Two) -> None:
    world, first, second = two
    second.held = second.budget
    say(world, second, "pulse", second.held)
    say(world, first, "short", 20_000)
    first.grow(TOTAL)
    say(world, first, "pulse", first.held)
    assert first.held >= TOTAL // 2 + 20_000
    say(world, second, "short", 15_000)
    assert second.budget >= TOTAL // 2 - 5_000
    assert first.held <= TOTAL // 2 + 5_000


def test_the_dead_leave_all_they_had(two: Two) -> None:
    world, first, second = two
    world.budget.leave(second.who)
    del world.workers[second.who]
    world.quiet()
    assert first.budget == TOTAL
    world.budget.within(second.who, 5)  # what comes late is of no meaning
    world.budget.short(second.who, 5, world.now_s)
    world.budget.holds(second.who, 5, 0, 0, 0.0, 0.0)
    world.settle()


def gives_way(world: World, worker: Worker) -> None:
    """A session of its own gave way to another one of its own."""
    worker.demoted += 1
    worker.used_s = world.now_s
    say(world, worker, "pulse", worker.held)


def test_who_has_sessions_give_way_gets_what_others_do_not_hold(two: Two) -> None:
    world, first, second = two
    first.held = first.budget
    world.now_s = second.used_s = REST_S
    for _ in range(10):
        first.grow(TOTAL)
        gives_way(world, first)
    assert first.budget >= TOTAL - TOTAL // 2 // FLOOR_PART - TOTAL // DUST_PART
    second.grow(TOTAL)
    world.now_s += REST_S
    first.used_s = world.now_s
    say(world, first, "pulse", first.held)
    gives_way(world, second)  # it is used again, and has its share back from what isn't in use
    for _ in range(3):
        world.now_s += WANT_S / 3
        gives_way(world, second)
        second.grow(TOTAL)
    assert abs(second.budget - TOTAL // 2) <= TOTAL // DUST_PART


def test_sessions_of_whom_nobody_used_for_long_give_way_first(two: Two) -> None:
    """Whoever has them; and back and forth they don't go."""
    world, first, second = two
    for worker in two[1:]:
        worker.held = worker.budget
        say(world, worker, "pulse", worker.held)
    world.now_s = 2 * REST_S
    second.used_s = world.now_s
    say(world, second, "pulse", second.held)
    gives_way(world, first)
    assert first.budget == second.budget == TOTAL // 2
    world.now_s += REST_S
    gives_way(world, first)
    assert first.budget > TOTAL // 2
    assert second.held < TOTAL // 2
    told = []
    for _ in range(100):
        for worker in two[1:]:
            worker.grow(TOTAL)
            gives_way(world, worker)
        world.now_s += 5.0
        told.append(world.told)
    assert told[-1] == told[20]
    assert abs(first.budget - second.budget) <= 2 * TOTAL // STEP_PART
