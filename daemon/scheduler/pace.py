"""How much of a prefill runs beside streams: quanta sized from what the last ones cost. Pure.

A pass costs something by itself (the weights are read) and something for each token. Both are learnt from the
passes there were, and quanta sized so that a running interactive stream waits no longer than its inter-token
budget. The floor is a pass that spends half of its time on tokens: less would make prefills several times
dearer, for everybody who waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

QUANTUM_MIN = 16  # tokens; below this a pass costs nearly the same
FLOOR_MAX = 128  # tokens; passes of more are efficient anywhere
QUANTUM_MAX = 512  # tokens; more gains nothing and delays cancellation
ALONE_EVERY = 8  # quanta beside streams; then a turn without one shows what a step costs
SMOOTHING = 0.3  # weight of the newest measurement
DOUBT = (
    0.05  # sizes that differ by less than the square root of this, in tokens, don't tell the two costs apart
)


@dataclass
class PassCost:
    """Milliseconds of a pass over so many tokens: a line through what passes of some sizes took.

    Sizes are kept apart so that many equal passes don't make it forget what larger and smaller ones cost:
    with one size only, all of a pass seems to be its tokens', and the size would never change again.
    """

    sizes: dict[int, tuple[float, float]] = field(default_factory=dict)  # by bits: tokens, ms; smoothed
    per_token: float = 0.0  # milliseconds of one more token
    of_pass: float = 0.0  # of a pass by itself

    @property
    def known(self) -> bool:
        return bool(self.sizes)

    def add(self, tokens: int, ms: float) -> None:
        size = tokens.bit_length()
        at, took = self.sizes.get(size, (float(tokens), ms))
        at, took = at + SMOOTHING * (tokens - at), took + SMOOTHING * (ms - took)
        self.sizes[size] = at, took
        # The slope comes of all sizes; the line goes through the newest, whatever the others were long ago.
        mean = sum(x for x, _ in self.sizes.values()) / len(self.sizes)
        spread = sum((x - mean) ** 2 for x, _ in self.sizes.values())
        joint = sum((x - mean) * y for x, y in self.sizes.values())
        flat = took / at
        doubt = DOUBT * mean * mean
        self.per_token = min(max((joint + doubt * flat) / (spread + doubt), flat / 8), flat)
        self.of_pass = max(took - self.per_token * at, 0.0)

    def of(self, tokens: int) -> float:
        return self.of_pass + self.per_token * tokens


@dataclass
class Pace:
    """Sizes quanta from what the last ones cost.

    Attributes:
        gap_ms: how long running interactive streams may wait for one quantum; None: `gap_steps` decode steps.
        gap_steps: the same in decode steps, for devices too slow for a fixed budget.
        idle_ms: how long a quantum may take when none of those run; bounds how late a cancel is seen.
        floor_max: tokens; the most that what a pass costs by itself asks for, beside such streams.
    """

    gap_ms: float | None = None
    gap_steps: float = 3.0
    idle_ms: float = 900.0
    floor_max: int = FLOOR_MAX
    step_ms: float | None = None  # of all rows that run
    cost: PassCost = field(default_factory=PassCost)
    since_alone: int = ALONE_EVERY

    def split(self, ms: float, *, tokens: int, streams: bool) -> tuple[float, float]:
        """What of a turn was the step of the streams, and what the quantum of `tokens`, if not 0.

        Turns are measured whole, since the host can't see what either took: launching the one may block
        until the device is nearly done with the other.
        """
        if not tokens:
            return (ms, 0.0) if streams else (0.0, 0.0)
        step_ms = self.step_ms or 0.0 if streams else 0.0
        # A step measured long ago may be too dear; at the most, it had three quarters of the turn.
        quantum_ms = max(ms - step_ms, ms / 4)
        return ms - quantum_ms, quantum_ms

    def measured_turn(self, ms: float, *, tokens: int, streams: bool) -> None:
        """Learns from one turn of the loop, whose rows were neither moved nor copied."""
        step_ms, quantum_ms = self.split(ms, tokens=tokens, streams=streams)
        if tokens:
            self.cost.add(tokens, quantum_ms)
        elif streams:
            self.step_ms = (
                step_ms if self.step_ms is None else self.step_ms + SMOOTHING * (step_ms - self.step_ms)
            )

    def alone_due(self) -> bool:
        """Whether the next turn beside streams should go without a quantum; to be asked once for each."""
        self.since_alone += 1
        if self.since_alone <= ALONE_EVERY:
            return False
        self.since_alone = 0
        return True

    def room(self, *, hurried: bool) -> int:
        """Tokens of the next pass, all its rows together. `hurried`: interactive streams wait for it."""
        budget_ms = self.idle_ms
        if hurried:
            budget_ms = self.gap_ms if self.gap_ms is not None else self.gap_steps * (self.step_ms or 0.0)
        if not self.cost.known:
            return QUANTUM_MIN
        per_token = max(self.cost.per_token, 1e-9)
        fitting = (budget_ms - self.cost.of_pass) / per_token
        # Whole multiples of the least: a matrix product of 48 rows is no dearer than one of 41.
        whole = int(min(max(fitting, 0.0), QUANTUM_MAX)) // QUANTUM_MIN * QUANTUM_MIN
        if not hurried:
            return max(whole, QUANTUM_MIN)
        floor = self.cost.of_pass / per_token
        if len(self.cost.sizes) == 1:  # a second one is tried, else this stays for good
            floor = 2 * max(at for at, _ in self.cost.sizes.values())
        floor = math.ceil(min(floor, self.floor_max) / QUANTUM_MIN) * QUANTUM_MIN
        return max(whole, floor, QUANTUM_MIN)
