"""Many seeds, each a world of its own: whatever happens, what must hold does.

`STATEROOM_SIM_SEED=n` runs that one alone; `STATEROOM_SIM_SEEDS=n` says how many there are (CONTRIBUTING.md).
"""

from __future__ import annotations

import os

import pytest
from tests.sim.world import World

SEEDS = int(os.environ.get("STATEROOM_SIM_SEEDS", "1000"))
ONE = os.environ.get("STATEROOM_SIM_SEED")
CHUNK = 50
CHUNKS = [[int(ONE)]] if ONE else [list(range(at, min(at + CHUNK, SEEDS))) for at in range(0, SEEDS, CHUNK)]

outcomes: set[str] = set()  # of all runs
happened: set[str] = set()


def run(seed: int) -> World:
    world = World(seed)
    try:
        world.run()
    except BaseException as error:
        error.add_note(f"seed {seed}; to run it alone: STATEROOM_SIM_SEED={seed} make test ARGS=tests/sim")
        raise
    return world


@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_whatever_happens_what_must_hold_does(seeds: list[int]) -> None:
    for seed in seeds:
        world = run(seed)
        outcomes.update(world.outcomes)
        counters = world.broker.metrics.counters()
        happened.update(name for name, count in counters.items() if count)
        happened.update(world.faults.happened)


def test_the_same_seed_is_the_same_run() -> None:
    for seed in (3, 14, 159):
        assert World(seed).run() == World(seed).run()
    assert World(1).run() != World(2).run()


FEARED = """
    open done, open cancelled, open exists, open capacity, open engine_lost, open unsupported,
    prefill done, prefill cancelled, prefill too_long, prefill engine_lost, prefill busy,
    prefill slow_consumer,
    decode length, decode stop_token, decode cancelled, decode slow_consumer, decode engine_lost,
    decode numeric, decode invalid, decode not_found, decode busy, decode shutting_down, decode capacity,
    sync done, sync cancelled, sync engine_lost, sync capacity, sync shutting_down,
    trim done, trim invalid, fork ok, fork exists, fork busy, fork engine_lost, fork capacity, score ok,
    publish ok, publish exists, publish invalid, unpublish ok, unpublish not_found,
    tokens ok, tokens engine_lost, tokens not_found, close ok, close busy, close shutting_down,
    watch ok, watch slow_consumer, load ok, load engine_lost, unload ok, unload busy, cancel not_found
"""
HAPPENED = """
    sessions_expired, clients_vanished, streams_cut, frames_refused, engine_deaths, requests.decode.gone,
    requests.open.gone, own.adopt.ok, own.adopt.engine_lost, own.close.ok, requests_dropped,
    worker_dies, worker_hangs, worker_babbles, worker_stalls, client_vanishes, client_returns,
    client_stops_reading, time_jumps, requests_resumed, sessions_quarantined
"""


@pytest.mark.skipif(SEEDS < 200 or ONE is not None, reason="too few seeds to reach everything")
def test_the_runs_reached_what_they_are_for() -> None:
    """Else they would prove little. It looks at the runs before it, and needs them."""
    if not outcomes:
        pytest.skip("no runs before it")
    assert {name.strip() for name in FEARED.split(",")} <= outcomes
    assert {name.strip() for name in HAPPENED.split(",")} <= happened
