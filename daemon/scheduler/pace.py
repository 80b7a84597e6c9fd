"""How much of a prefill runs beside streams: quanta sized from what the last ones cost. Pure.

A pass costs something by itself (the weights are read) and something for each token. Both are learnt from the
passes there were, and quanta sized so that a running interactive stream waits no longer than its inter-token
budget, with a floor so that a prefill always moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

QUANTUM_MIN = 16  # tokens; below this a pass costs nearly the same
QUANTUM_MAX = 512  # tokens; more gains nothing and delays cancellation
ALONE_EVERY = 8  # quanta beside streams; then a turn without one shows what a step costs
SMOOTHING = 0.3  # weight of the newest measurement of a step
MEMORY = 0.9  # weight of the passes before, at each new one
DOUBT = (
    0.05  # passes that differ by less than the square root of this, in tokens, don't tell the two costs apart
)


@dataclass
class PassCost:
    """Milliseconds of a pass over so many tokens: a line through the last ones, at worst through zero."""

    weight: float = 0.0
    tokens: float = 0.0  # weighted means
    ms: float = 0.0
    spread: float = 0.0  # weighted mean square of tokens around their mean, and of tokens with ms
    joint: float = 0.0

    def add(self, tokens: int, ms: float) -> None:
        self.weight = self.weight * MEMORY + 1.0
        share = 1.0 / self.weight
        dx, dy = tokens - self.tokens, ms - self.ms
        self.tokens += share * dx
        self.ms += share * dy
        self.spread = (1.0 - share) * (self.spread + share * dx * dx)
        self.joint = (1.0 - share) * (self.joint + share * dx * dy)

    @property
    def known(self) -> bool:
        return self.weight > 0.0

    @property
    def per_token(self) -> float:
        """Milliseconds of one more token."""
        if not self.known:
            return 0.0
        flat = self.ms / self.tokens
        doubt = DOUBT * self.tokens * self.tokens
        return min(max((self.joint + doubt * flat) / (self.spread + doubt), flat / 8), flat)

    @property
    def of_pass(self) -> float:
        """Milliseconds of a pass by itself."""
        return max(self.ms - self.per_token * self.tokens, 0.0) if self.known else 0.0

    def of(self, tokens: int) -> float:
        return self.of_pass + self.per_token * tokens


@dataclass
class Pace:
    """Sizes quanta from what the last ones cost.

    Attributes:
        gap_ms: how long running interactive streams may wait for one quantum; None: `gap_steps` decode steps.
        gap_steps: the same in decode steps, for devices too slow for a fixed budget.
        idle_ms: how long a quantum may take when none of those run; bounds how late a cancel is seen.
    """

    gap_ms: float | None = None
    gap_steps: float = 3.0
    idle_ms: float = 900.0
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
        fitting = (budget_ms - self.cost.of_pass) / max(self.cost.per_token, 1e-9)
        # Whole multiples of the floor: a matrix product of 48 rows is no dearer than one of 41.
        whole = int(min(max(fitting, 0.0), QUANTUM_MAX)) // QUANTUM_MIN * QUANTUM_MIN
        return max(whole, QUANTUM_MIN)
