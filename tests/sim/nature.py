"""What a seed makes of a world: its clients and their habits, the device, the faults, the limits."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.sim.engine import BYTES_PER_TOKEN, Costs
from tests.sim.language import VOCAB

from stateroom.daemon.config import Patience

FAULTS = (
    "worker_dies", "worker_hangs", "worker_babbles", "worker_stalls", "client_vanishes", "client_returns",
    "client_stops_reading", "time_jumps",
)  # fmt: skip


@dataclass
class Nature:
    models: list[str]
    clients: list[tuple[str, str, float, int]]  # owner, habit, pause between requests, most at once
    rude: int
    run_s: float
    faults: list[str]
    fault_every_s: float
    bad_start: float  # probability that a worker doesn't come to serve
    costs: Costs
    patience: Patience
    queue_max: int  # messages on a connection before it is full
    outbox_max: int
    requests_max: int
    requests_per_client_max: int
    sessions_max: int
    longest: int  # tokens of a prompt
    longest_decode: int
    stops: bool  # the daemon is stopped in the midst
    poison: bool = False  # some clients have input that kills the worker; nothing else does
    hungry: list[tuple[str, int, int]] = field(default_factory=list)  # owner, sessions, tokens of a prompt
    preamble: list[int] = field(default_factory=list, repr=False)  # that many prompts begin with


def nature_of(seed: int) -> Nature:
    draw = random.Random(f"{seed}/nature")
    some = draw.choice
    crowd = draw.random() < 0.1
    owners = [f"owner {n}" for n in range(some([1, 2, 4]))]
    if crowd:
        clients = [(some(owners), "crowd", 3.0, 2) for _ in range(some([100, 200]))]
    else:
        habits = ["all", "all", "editor", "agent", "chat", "monitor"]
        clients = [
            (some(owners), some(habits), some([0.02, 0.1, 0.5]), some([1, 3, 12]))
            for _ in range(draw.randrange(2, 9))
        ]
    faults = [fault for fault in FAULTS if draw.random() < 0.5]
    step_ms, token_ms = some([(8.0, 0.1), (25.0, 0.5), (60.0, 3.0)])
    small = draw.random() < 0.3  # limits that are met
    own = random.Random(f"{seed}/poison")
    poison = own.random() < 0.1
    if poison:
        clients += [("poisoner", "poisoner", 0.5, 1) for _ in range(own.choice([1, 3]))]
        faults = [fault for fault in faults if fault.startswith("client")]
    budget = some([3_000, 20_000]) if draw.random() < 0.3 else 10**6
    return Nature(
        models=["toy", "other"] if draw.random() < 0.2 else ["toy"],
        clients=clients,
        rude=some([0, 0, 0, 1, 2]),
        run_s=4.0 if crowd else some([2.0, 5.0, 10.0]),
        faults=faults,
        fault_every_s=some([0.3, 1.0, 4.0]),
        bad_start=0.0 if poison else some([0.0, 0.0, 0.3]),
        costs=Costs(
            step_ms=step_ms,
            row_ms=step_ms / 40,
            pass_ms=step_ms / 2,
            token_ms=token_ms,
            noise=some([0.0, 0.3]),
            numeric=0.005 if draw.random() < 0.2 else 0.0,
            budget_bytes=budget * BYTES_PER_TOKEN,
            rows_max=some([1, 2, 4, 32]),
            weights={owner: some([0.5, 1.0, 1.0, 3.0]) for owner in owners},
        ),
        patience=Patience(
            load_s=20.0,
            silence_s=2.0,
            hang_s=1000.0 if poison else 5.0,  # a pass that takes long is no input that kills
            restart_most_s=0.5 if poison else 8.0,
            hold_s=some([0.4, 5.0]),
        ),
        queue_max=some([2, 8, 64]),
        outbox_max=some([2, 16, 1024]),
        requests_max=some([5, 20]) if small else 1024,
        requests_per_client_max=some([2, 8]) if small else 256,
        sessions_max=some([4, 15]) if small else 16_384,
        longest=some([80, 400, 1500]),
        longest_decode=some([60, 300]),
        stops=draw.random() < 0.25 and not poison,
        poison=poison,
        preamble=[draw.randrange(1, VOCAB) for _ in range(1500)],
    )
