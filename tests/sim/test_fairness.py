"""Owners that always have more work than they get share the device by their weights, whatever their load."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from tests.sim.must import must
from tests.sim.nature import Nature, nature_of
from tests.sim.world import World

from stateroom.daemon.scheduler.fairness import Ledger
from stateroom.daemon.scheduler.places import SLICE_STEPS, Places

SEEDS = 12
LEARNING_S = 5.0  # until costs are known and everybody has come
WINDOW_SLICES = 15  # of all places together; what one owner may be ahead is of the order of one
UNFAIR_MAX = 0.1  # of a window


def hungry_nature(seed: int) -> Nature:
    """Two to four owners, each with more sessions than there are places, or with prompts, or with both.

    docs/architecture.md lets gaps go before shares: there is a step in every turn, and one quantum at most.
    So that shares can hold, a quantum takes as long as it may here, five steps.
    """
    draw = random.Random(f"{seed}/hungry")
    nature = nature_of(seed)
    rows_max = draw.choice([1, 2, 4])
    owners = [f"owner {n}" for n in range(draw.randint(2, 4))]
    hungry = []
    for owner in owners:
        streams, prompts = draw.choice([(True, False), (True, False), (False, True), (True, True)])
        for _ in range(draw.randint(1, 3)):
            if streams:
                hungry.append((owner, rows_max + draw.randint(2, 5), 0))
            if prompts:
                hungry.append((owner, draw.randint(3, 6), draw.choice([1500, 3000])))
    costs = replace(
        nature.costs,
        step_ms=10.0,
        row_ms=0.5,
        pass_ms=5.0,
        token_ms=0.3,
        numeric=0.0,
        budget_bytes=10**9,
        rows_max=rows_max,
        weights={owner: draw.choice([1.0, 1.0, 2.0]) for owner in owners},
    )
    return replace(
        nature,
        models=["toy"],
        clients=[],
        hungry=hungry,
        rude=0,
        faults=[],
        poison=False,
        bad_start=0.0,
        costs=costs,
        queue_max=64,
        outbox_max=1024,
        requests_max=1024,
        requests_per_client_max=256,
        sessions_max=16_384,
        stops=False,
        run_s=LEARNING_S + 2 * WINDOW_SLICES * SLICE_STEPS * costs.of(rows_max, []) / 1000,
    )


def check_shares(seed: int) -> None:
    nature = hungry_nature(seed)
    world = World(seed, nature)
    looks: list[tuple[float, Counter[str]]] = []

    def look() -> None:
        engine = world.processes[-1].engine
        assert engine is not None
        looks.append((engine.watch.now_ms, engine.watch.ms_of.copy()))

    for share in (0.0, 0.5, 1.0):
        world.loop.after(LEARNING_S + share * (nature.run_s - LEARNING_S - 0.1), look)
    world.run()
    weights = nature.costs.weights
    for (began_ms, before), (ended_ms, after) in itertools.pairwise(looks):
        window_ms = ended_ms - began_ms
        for owner, weight in weights.items():
            share = weight / sum(weights.values())
            had = (after[owner] - before[owner]) / window_ms
            must(
                abs(had - share) <= UNFAIR_MAX,
                f"seed {seed}: {owner} had {had:.0%}, and {share:.0%} are its due",
            )


@pytest.mark.parametrize("seed", range(SEEDS))
def test_owners_that_always_wait_share_by_weight(seed: int) -> None:
    """B19: in each window, within a tenth of it."""
    check_shares(seed)


def one_owner_has_everything() -> Any:
    had = Ledger.had
    return patch.object(
        Ledger, "had", lambda self, owner: 0.0 if owner == "owner 0" else 1.0 + had(self, owner)
    )


def weights_are_ignored() -> Any:
    return patch.object(Ledger, "weight", lambda self, owner: 1.0)


def nobody_pays() -> Any:
    return patch.object(Ledger, "charge", lambda *_: None)


def places_are_kept() -> Any:
    return patch.object(Places, "_slices_over", lambda _: [])


@pytest.mark.parametrize(
    "sabotage",
    [one_owner_has_everything, weights_are_ignored, nobody_pays, places_are_kept],
    ids=lambda sabotage: sabotage.__name__,
)
def test_unfairness_is_noticed(sabotage: Callable[[], Any]) -> None:
    with sabotage():
        for seed in range(SEEDS):
            try:
                check_shares(seed)
            except AssertionError:
                return
    raise AssertionError(f"{SEEDS} runs, and nobody noticed")
