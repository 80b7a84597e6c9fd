"""Which prefill runs next, and how much of it. Pure: costs and queue go in, a choice comes out.

The rule, as docs/architecture.md publishes it: decode first; then one quantum of one prefill. Quanta
are sized from the measured milliseconds per token, so that a running stream waits no longer than its
inter-token budget, with a floor so that a prefill always moves. Waiting prefills take turns, quantum by
quantum; `interactive` goes before `background`, but every `BACKGROUND_EVERY`-th quantum is the
background's when any waits there, so that nothing starves.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

QUANTUM_MIN = 16  # tokens; below this a pass costs nearly the same
QUANTUM_MAX = 512  # tokens; more gains nothing and delays cancellation
BACKGROUND_EVERY = 8  # quanta
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
    idle_ms: float = 500.0
    ms_per_token: float | None = None
    step_ms: float | None = None

    def measured_quantum(self, tokens: int, ms: float) -> None:
        per_token = ms / tokens
        old = self.ms_per_token
        self.ms_per_token = per_token if old is None else old + SMOOTHING * (per_token - old)

    def measured_step(self, ms: float) -> None:
        self.step_ms = ms if self.step_ms is None else self.step_ms + SMOOTHING * (ms - self.step_ms)

    def quantum(self, remaining: int, *, streams: bool) -> int:
        """Tokens of the next quantum, at most `remaining` (> 0)."""
        budget_ms = self.idle_ms
        if streams:
            budget_ms = self.gap_ms if self.gap_ms is not None else self.gap_steps * (self.step_ms or 0.0)
        fitting = QUANTUM_MIN if self.ms_per_token is None else int(budget_ms / self.ms_per_token)
        # Whole multiples of the floor: a matrix product of 48 rows is no dearer than one of 41.
        fitting = fitting // QUANTUM_MIN * QUANTUM_MIN
        return min(remaining, QUANTUM_MAX, max(QUANTUM_MIN, fitting))


T = TypeVar("T")


@dataclass
class FillQueue(Generic[T]):
    """Waiting prefills, each getting one quantum in turn within its class."""

    interactive: deque[T] = field(default_factory=deque)
    background: deque[T] = field(default_factory=deque)
    since_background: int = 0

    def add(self, item: T, *, background: bool) -> None:
        (self.background if background else self.interactive).append(item)

    def remove(self, item: T) -> None:
        for queue in (self.interactive, self.background):
            if item in queue:
                queue.remove(item)

    def __len__(self) -> int:
        return len(self.interactive) + len(self.background)

    def __iter__(self):  # type: ignore[no-untyped-def]
        yield from self.interactive
        yield from self.background

    def turn(self) -> T | None:
        """The one whose quantum is next; it moves to the end of its queue."""
        due = self.background and (not self.interactive or self.since_background + 1 >= BACKGROUND_EVERY)
        queue = self.background if due else self.interactive
        if not queue:
            return None
        self.since_background = 0 if due else self.since_background + 1
        item = queue.popleft()
        queue.append(item)
        return item
