"""The scheduler over a simulated device: the published rules of fairness, as properties of random loads."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
from tests.scheduler.device import Costs, Device

from stateroom.daemon.scheduler.pace import ALONE_EVERY, QUANTUM_MIN, Pace
from stateroom.daemon.scheduler.places import BACKGROUND_EVERY, OLDEST_EVERY, SLICE_STEPS
from stateroom.daemon.scheduler.plan import Job
from stateroom.daemon.scheduler.schedule import Schedule

GAP_MS = 50.0


def keep_filling(
    device: Device, fills: dict[str, tuple[int, int]], keys: itertools.count[int]
) -> Callable[[], None]:
    """Gives each owner so many fills of so many tokens, again and again; to be called before each turn."""
    live: dict[str, set[int]] = defaultdict(set)

    def refill() -> None:
        for owner, (count, tokens) in fills.items():
            live[owner] -= device.done
            while len(live[owner]) < count:
                key = next(keys)
                live[owner].add(key)
                device.add(key, owner, tokens)

    return refill


# ---------------------------------------------------------------- 1: gaps


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_running_stream_waits_for_one_quantum_and_one_step(seed: int, lag: bool) -> None:
    """B19: once costs are known, a pass between steps is within the budget, or twice what it costs empty."""
    draw = random.Random(seed)
    costs = Costs(
        step=draw.uniform(2, 40),
        row=draw.uniform(0, 2),
        pass_=draw.uniform(0, 20),
        token=draw.uniform(0.05, 3),
    )
    device = Device(Schedule(8, pace=Pace(gap_ms=GAP_MS)), costs, lag, seed)
    keys = itertools.count(1)
    refill = keep_filling(device, {"filler": (3, draw.choice([30, 700, 4000]))}, keys)
    for _ in range(4):
        device.add(next(keys), "chat")
    for turn in range(400):
        refill()
        record = device.turn()
        assert len(record.plan.run) == 4  # a step in every turn
        if turn > 60:
            floor_ms = max(2.0 * costs.pass_, costs.of_pass(QUANTUM_MIN)) + costs.token * QUANTUM_MIN
            assert record.quantum_ms <= max(GAP_MS * 1.05, floor_ms)


def test_beside_background_streams_quanta_are_long() -> None:
    device = Device(Schedule(8, pace=Pace(gap_ms=10.0, idle_ms=900.0)), Costs(token=2.0))
    keys = itertools.count(1)
    refill = keep_filling(device, {"a": (1, 100_000)}, keys)
    stream = next(keys)
    device.add(stream, "b", background=True)
    for _ in range(60):
        refill()
        record = device.turn()
    assert record.quantum_ms > 500.0
    device.add(next(keys), "c")
    assert device.turn().quantum_ms <= Costs(token=2.0).of_pass(QUANTUM_MIN)


# ---------------------------------------------------------------- 2: shares

LOADS: list[tuple[int, dict[str, float], dict[str, int], dict[str, tuple[int, int]]]] = [
    (4, {}, {"a": 8, "b": 20}, {}),
    (4, {"a": 3.0}, {"a": 12, "b": 12}, {}),
    (1, {"a": 4.0}, {"a": 1, "b": 1}, {}),
    (3, {}, {"a": 8, "b": 8, "c": 8, "d": 8, "e": 8}, {}),
    (4, {"a": 2.0}, {}, {"a": (2, 3_000), "b": (3, 4_000)}),
    (4, {}, {}, {"a": (1, 100_000), "b": (20, 700), "c": (3, 50)}),
    (4, {}, {"a": 8}, {"b": (3, 3_000)}),
    (4, {"a": 2.0}, {"a": 20, "c": 9}, {"b": (2, 3_000), "d": (3, 90)}),
    (8, {}, {"a": 20}, {"a": (3, 500), "b": (3, 3_000)}),
]


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize(("rows_max", "weights", "streams", "fills"), LOADS)
def test_owners_that_always_wait_share_by_weight(
    rows_max: int,
    weights: dict[str, float],
    streams: dict[str, int],
    fills: dict[str, tuple[int, int]],
    lag: bool,
) -> None:
    """B19: over every window, milliseconds are within a tenth of the window of their weights' share.

    "served" is an owner all of whose streams have places: it waits for nothing, and takes its step's part.
    """
    device = Device(
        Schedule(rows_max, pace=Pace(gap_ms=GAP_MS), weights=weights), Costs(noise=0.2), lag, seed=5
    )
    keys = itertools.count(1)
    for owner, count in streams.items():
        for _ in range(count):
            device.add(next(keys), owner)
    refill = keep_filling(device, fills, keys)
    for _ in range(200):  # costs are learnt
        refill()
        device.turn()
    window_ms = 20.0 * SLICE_STEPS * device.costs.of_step(rows_max)
    for _ in range(4):
        before, start_ms = device.ms_of.copy(), device.now_ms
        while device.now_ms < start_ms + window_ms:
            refill()
            device.turn()
        had = {owner: ms - before[owner] for owner, ms in device.ms_of.items()}
        owners = {*streams, *fills}
        total = sum(weights.get(owner, 1.0) for owner in owners)
        for owner in owners:
            share_ms = (device.now_ms - start_ms) * weights.get(owner, 1.0) / total
            quantum_ms = max(record.quantum_ms for record in device.records)
            assert abs(had[owner] - share_ms) <= 0.1 * window_ms + quantum_ms, (owner, had, share_ms)


def test_an_owner_whose_streams_have_places_is_left_alone() -> None:
    """Its part of the steps is what it can use; the others share what is left."""
    device = Device(Schedule(4, pace=Pace(gap_ms=GAP_MS)))
    keys = itertools.count(1)
    device.add(1000, "chat")
    refill = keep_filling(device, {"a": (2, 900), "b": (2, 5_000)}, keys)
    for _ in range(1_000):
        refill()
        assert 1000 in device.turn().plan.run
    assert abs(device.ms_of["a"] - device.ms_of["b"]) <= 0.1 * device.now_ms


def test_an_owner_that_comes_late_earned_nothing_by_waiting_elsewhere() -> None:
    device = Device(Schedule(2, pace=Pace(gap_ms=GAP_MS)))
    keys = itertools.count(1)
    refill = keep_filling(device, {"early": (1, 50_000)}, keys)
    for _ in range(500):
        refill()
        device.turn()
    refill_late = keep_filling(device, {"late": (1, 50_000)}, keys)
    before = device.ms_of.copy()
    for _ in range(40):
        refill()
        refill_late()
        device.turn()
    had = {owner: ms - before[owner] for owner, ms in device.ms_of.items()}
    assert abs(had["early"] - had["late"]) <= 2 * max(record.quantum_ms for record in device.records)


# ---------------------------------------------------------------- 3: nobody starves


def fill_bound(fills: int, turn_ms: float, *, background: bool) -> float:
    """Milliseconds until a waiting prefill is served; docs/architecture.md has the formula."""
    turns = math.ceil((fills + 1) * SLICE_STEPS * (ALONE_EVERY + 1) / ALONE_EVERY) + 1
    return turns * turn_ms * (BACKGROUND_EVERY if background else 1)


def stream_bound(streams: int, places: int, turn_ms: float, *, own_slices: bool) -> float:
    """Milliseconds until a parked stream is served. `own_slices`: the background's, of a single place."""
    slices = OLDEST_EVERY * OLDEST_EVERY * math.ceil(streams / places) + 2
    return slices * SLICE_STEPS * turn_ms * (BACKGROUND_EVERY if own_slices else 1)


@pytest.mark.parametrize("seed", range(30))
def test_nobody_starves(seed: int) -> None:
    """Random loads of both classes and kinds, any costs: every wait is within the published bounds."""
    draw = random.Random(seed)
    rows_max = draw.choice([1, 1, 2, 3, 4, 8])
    owners = [f"owner{n}" for n in range(draw.randint(1, 4))]
    costs = Costs(draw.uniform(1, 100), draw.uniform(0, 5), draw.uniform(0, 80), draw.uniform(0.02, 8), 0.3)
    weights = {owner: draw.choice([0.5, 1.0, 4.0]) for owner in owners}
    pace = Pace(gap_ms=draw.choice([None, GAP_MS]))
    device = Device(Schedule(rows_max, pace=pace, weights=weights), costs, draw.random() < 0.7, seed)
    keys = itertools.count(1)
    for owner, background in itertools.product(owners, (False, True)):
        for _ in range(draw.choice([0, 0, 1, 2, 5, 12])):
            device.add(next(keys), owner, background=background)
    kinds = [
        (owner, background, draw.randint(1, 4), draw.choice([20, 100, 1_000, 5_000]))
        for owner, background in itertools.product(owners, (False, True))
        if draw.random() < 0.4
    ]
    live: dict[tuple[str, bool], set[int]] = defaultdict(set)
    since_ms: dict[int, float] = defaultdict(float)
    worst: dict[tuple[str, bool], float] = defaultdict(float)
    for _ in range(2_500):
        for owner, background, count, tokens in kinds:
            live[owner, background] -= device.done
            while len(live[owner, background]) < count:
                key = next(keys)
                live[owner, background].add(key)
                since_ms[key] = device.now_ms
                device.add(key, owner, math.ceil(tokens * draw.uniform(0.5, 1.0)), background=background)
        record = device.turn()
        for key in {*record.plan.run, *(key for key, _ in record.fed)}:
            job = device.jobs[key]
            kind = (job.kind, job.background)
            worst[kind] = max(worst[kind], device.now_ms - since_ms[key])
            since_ms[key] = device.now_ms
    open_jobs = [job for key, job in device.jobs.items() if key not in device.done]
    for job in open_jobs:
        kind = (job.kind, job.background)
        worst[kind] = max(worst[kind], device.now_ms - since_ms[job.key])
    turn_ms = max(record.step_ms + record.quantum_ms for record in device.records)
    counts = Counter((job.kind, job.background) for job in open_jobs)
    for (name, background), waited in worst.items():
        of_kind = max(sum(n for key, n in counts.items() if key == (name, background)), 1)
        if name == "fill":
            bound = fill_bound(of_kind, turn_ms, background=background)
        else:
            places = 1 if background else max(rows_max - 1, 1)
            bound = stream_bound(of_kind, places, turn_ms, own_slices=background and rows_max == 1)
        assert waited <= bound, (name, background)


def test_equal_streams_take_turns_without_debts() -> None:
    """In a plain load the wait is what one would expect: the streams in front, divided by the places."""
    device = Device(Schedule(4), Costs(noise=0.1))
    for key in range(1, 21):
        device.add(key, "a" if key % 2 else "b")
    seen: Counter[int] = Counter()
    for _ in range(SLICE_STEPS * 5 * 4):
        seen.update(device.turn().plan.run)
    assert len(seen) == 20
    assert max(seen.values()) - min(seen.values()) <= 2 * SLICE_STEPS


def test_places_are_dealt_out_evenly_from_the_start() -> None:
    """What slices under way will cost counts: not all places go to whoever is a little behind."""
    device = Device(Schedule(4))
    for key in range(1, 17):
        device.add(key, "a" if key <= 8 else "b")
    for _ in range(4 * SLICE_STEPS):
        plan = device.turn().plan
        assert sum(device.jobs[key].owner == "a" for key in plan.run) == 2


@pytest.mark.parametrize(("rows_max", "others"), [(1, 3), (3, 5), (2, 1)])
def test_an_owners_prefills_do_not_starve_its_streams(rows_max: int, others: int) -> None:
    """Its share is next to nothing, and prefills alone take more; its stream has its slices none the less."""
    pace = Pace(gap_ms=GAP_MS)
    device = Device(Schedule(rows_max, pace=pace, weights={"b": 100.0}), Costs(step=2.0, row=0.1))
    keys = itertools.count(1)
    refill = keep_filling(device, {"a": (3, 5_000)}, keys)
    for _ in range(rows_max + others):
        device.add(next(keys), "b")
    device.add(1_000_000, "a")
    bound = SLICE_STEPS * (OLDEST_EVERY**2 * math.ceil((rows_max + others + 1) / max(rows_max - 1, 1)) + 2)
    waited = 0
    for _ in range(2 * bound):
        refill()
        waited = 0 if 1_000_000 in device.turn().plan.run else waited + 1
        assert waited <= bound


def test_short_streams_do_not_keep_others_from_free_places() -> None:
    """They come and end within a slice, of an owner that has always had less."""
    device = Device(Schedule(1, weights={"b": 100.0}))
    keys = itertools.count(1)
    refill = keep_filling(device, {"a": (1, 5_000)}, keys)
    device.add(1_000_000, "a")
    for _ in range(3):
        device.add(next(keys), "b")
    ran = 0
    for turn in range(1_000):
        refill()
        run = device.turn().plan.run
        ran += 1_000_000 in run
        if turn % 10 == 9 and 1_000_000 not in run:
            device.end(run[0])
            device.add(next(keys), "b")
    assert ran > 3 * SLICE_STEPS


# ---------------------------------------------------------------- classes


def test_an_interactive_stream_takes_a_background_ones_place_at_once() -> None:
    device = Device(Schedule(4))
    for key in range(1, 5):
        device.add(key, "agent", background=True)
    device.turn()
    device.add(5, "editor")
    plan = device.turn().plan
    assert plan.park == (4,)
    assert plan.admit == (5,)
    for key in range(6, 10):
        device.add(key, "editor")
    plan = device.turn().plan
    assert len([key for key in plan.run if key < 5]) == 1  # one place stays the background's
    for key in range(5, 10):
        device.end(key)
    plan = device.turn().plan
    assert set(plan.run) == {1, 2, 3, 4}  # and they go on
    assert plan.park == ()


def test_a_parked_stream_comes_back_before_its_owners_others() -> None:
    device = Device(Schedule(2))
    for key in range(1, 4):
        device.add(key, "agent", background=True)
    device.turn()  # 1 and 2 run, 3 waits
    device.add(4, "editor")
    assert device.turn().plan.park == (2,)
    device.end(4)
    assert device.turn().plan.admit == (2,)


@pytest.mark.parametrize("rows_max", [1, 2, 4])
def test_the_background_has_its_place_or_its_slices(rows_max: int) -> None:
    device = Device(Schedule(rows_max))
    for key in range(1, 9):
        device.add(key, "editor")
    device.add(100, "agent", background=True)
    turns = SLICE_STEPS * BACKGROUND_EVERY * 6
    ran = sum(100 in device.turn().plan.run for _ in range(turns))
    expected = turns if rows_max > 1 else turns / BACKGROUND_EVERY
    assert ran == pytest.approx(expected, rel=0.2)


def test_interactive_fills_go_first_and_the_background_moves() -> None:
    device = Device(Schedule(4))
    keys = itertools.count(1)
    refill = keep_filling(device, {"editor": (2, 5_000)}, keys)
    device.add(1_000_000, "agent", 1_000_000, background=True)
    theirs = 0
    for _ in range(400):
        refill()
        theirs += any(key == 1_000_000 for key, _ in device.turn().fed)
    assert theirs == pytest.approx(400 / BACKGROUND_EVERY, rel=0.1)


# ---------------------------------------------------------------- prefills together


def taught(device: Device) -> Device:
    """Its pace knows the costs of passes."""
    draw = random.Random(1)
    for _ in range(40):
        tokens = draw.randint(16, 500)
        device.schedule.pace.cost.add(tokens, device.costs.of_pass(tokens))
    return device


def test_short_prompts_share_a_pass() -> None:
    device = taught(Device(Schedule(8), Costs(pass_=60.0, token=1.0)))
    for key, tokens in enumerate([30, 33, 37, 40], 1):
        device.add(key, f"app{key}", tokens)
    device.add(5, "long", 4_000)
    record = device.turn()
    assert sorted(record.fed) == [(1, 30), (2, 33), (3, 37), (4, 40)]


def test_prompts_that_fill_a_pass_go_alone() -> None:
    device = taught(Device(Schedule(8), Costs(pass_=2.0, token=1.0)))
    for key in range(1, 5):
        device.add(key, "app", 200)
    assert len(device.turn().fed) == 1


def test_rows_that_cannot_be_trimmed_share_level_passes_only() -> None:
    device = taught(Device(Schedule(8), Costs(pass_=60.0, token=1.0)))
    for key, tokens in enumerate([30, 31, 30, 30, 12], 1):
        job = Job(key, "app", "fill", tokens=tokens, joins=key != 4, pads=False)
        device.jobs[key], device.left[key] = job, tokens
        device.schedule.add(job)
    seen = [sorted(device.turn().fed) for _ in range(4)]
    assert [(1, 30), (3, 30)] in seen
    assert [(4, 30)] in seen  # it shares with nobody
    assert all(len({tokens for _, tokens in fed}) == 1 for fed in seen)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """Nor for all of its owner's long ones in turn."""
    device = taught(Device(Schedule(8)))
    for key in range(1, 6):
        device.add(key, "app", 100_000)
    device.turn()
    device.add(9, "app", 20)
    device.turn()
    device.turn()
    assert 9 in device.done


def test_what_was_not_fed_is_planned_again() -> None:
    schedule = Schedule(4)
    schedule.add(Job(1, "app", "fill", tokens=40))
    plan = schedule.plan()
    ((key, tokens),) = plan.quantum
    assert (key, tokens) == (1, QUANTUM_MIN)
    schedule.spent(plan, 5.0, fed=[(1, 7)])
    fed = 7
    while (plan := schedule.plan()).quantum:
        schedule.spent(plan, 5.0, fed=plan.quantum)
        fed += plan.quantum[0][1]
    assert fed == 40
    schedule.remove(1)
    assert schedule.filling == 0


# ---------------------------------------------------------------- comings and goings


@pytest.mark.parametrize("seed", range(20))
def test_jobs_come_and_go_at_any_time(seed: int) -> None:
    """Removed while they wait, run, or are on the device; nothing of them is left behind."""
    draw = random.Random(seed)
    device = Device(Schedule(draw.choice([1, 3])), Costs(noise=0.5), lag=True, seed=seed)
    keys = itertools.count(1)
    live: set[int] = set()
    for _ in range(600):
        live -= device.done
        for _ in range(draw.randint(0, 2)):
            key = next(keys)
            tokens = draw.choice([0, 0, 5, 60, 900])
            device.add(key, draw.choice("abc"), tokens, background=draw.random() < 0.4)
            live.add(key)
        for key in draw.sample(sorted(live), min(len(live), draw.randint(0, 2))):
            device.end(key)
        device.turn()
    for key in live - device.done:
        device.end(key)
    schedule = device.schedule
    for _ in range(2):
        assert device.turn().plan.run == ()
    assert schedule.filling == schedule.places.parked == 0
    assert not schedule.places.running
    for ledger in schedule.ledgers:
        assert ledger.waiting == 0
        assert ledger.booked_ms == pytest.approx(0.0, abs=1e-6)
