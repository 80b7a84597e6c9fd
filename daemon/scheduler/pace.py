"""How much of a prefill runs beside streams: quanta sized from what the last ones cost. Pure.

Quanta are sized from the measured milliseconds per token, so that a running stream waits no longer than its
inter-token budget, with a floor so that a prefill always moves.
"""

from __future__ import annotations

from dataclasses import dataclass

QUANTUM_MIN = 16  # tokens; below this a pass costs nearly the same
QUANTUM_MAX = 512  # tokens; more gains nothing and delays cancellation
ALONE_EVERY = 8  # quanta beside streams; then a turn without one shows what a step costs
SMOOTHING = 0.3  # weight of the newest measurement


@dataclass
class Pace:
    """Sizes quanta from what the last ones cost.

    Attributes:
        gap_ms: how long running streams may wait for one quantum; None: `gap_steps` decode steps.
        gap_steps: the same in decode steps, for devices too slow for a fixed budget.
        idle_ms: how long a quantum may take when nothing decodes; bounds how late a cancel is seen.
    """

    gap_ms: float | None = None
    gap_steps: float = 3.0
    idle_ms: float = 900.0
    ms_per_token: float | None = None
    step_ms: float | None = None
    since_alone: int = ALONE_EVERY

    def measured_turn(self, ms: float, *, tokens: int, streams: bool) -> None:
        """One turn of the loop: a step of the streams, if there are any, and a quantum of `tokens`, if not 0.

        Turns are measured whole, since the host can't see what either took: launching the one may block
        until the device is nearly done with the other.
        """
        if tokens:
            step_ms = self.step_ms or 0.0 if streams else 0.0
            # A step measured long ago may be too dear; at the most, it had three quarters of the turn.
            self.ms_per_token = _smoothed(self.ms_per_token, max(ms - step_ms, ms / 4) / tokens)
        elif streams:
            self.step_ms = _smoothed(self.step_ms, ms)

    def alone_due(self) -> bool:
        """Whether the next turn beside streams should go without a quantum; to be asked once for each."""
        self.since_alone += 1
        if self.since_alone <= ALONE_EVERY:
            return False
        self.since_alone = 0
        return True

    def quantum(self, remaining: int, *, streams: bool) -> int:
        """Tokens of the next quantum, at most `remaining` (> 0)."""
        budget_ms = self.idle_ms
        if streams:
            budget_ms = self.gap_ms if self.gap_ms is not None else self.gap_steps * (self.step_ms or 0.0)
        fitting = QUANTUM_MIN if self.ms_per_token is None else int(budget_ms / self.ms_per_token)
        # Whole multiples of the floor: a matrix product of 48 rows is no dearer than one of 41.
        fitting = fitting // QUANTUM_MIN * QUANTUM_MIN
        return min(remaining, QUANTUM_MAX, max(QUANTUM_MIN, fitting))


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
