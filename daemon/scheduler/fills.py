"""Which prefills run next, and which of them together. Pure.

The owner that has had the least goes first. Of one owner's prefills the shortest and the one that has waited
longest since its last quantum take turns: short prompts don't wait behind long ones, and long ones move.

Short prompts share a pass, as rows of it, where that pays: the weights are then read once for all. Only
prompts that end with the pass do; cutting longer ones would read the weights as often as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stateroom.daemon.scheduler.fairness import Ledger
from stateroom.daemon.scheduler.pace import PassCost
from stateroom.daemon.scheduler.plan import Job

WASTE_MAX = 0.25  # of a shared pass may be padding
GAIN_MIN = 0.1  # of what a row's own pass would cost; for less nobody is made to wait for another


@dataclass(slots=True, eq=False)
class Pending:
    """A prefill and its tokens that no pass has taken yet."""

    job: Job
    left: int


class Fills:
    """The waiting prefills of one class."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pending: dict[int, Pending] = {}
        # Those that wait, by owner and of all owners; whoever was served last is at the end.
        self._owners: dict[str, dict[int, Pending]] = {}
        self._waiting: dict[int, Pending] = {}
        self._shortest_next: dict[str, bool] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, job: Job) -> None:
        self._pending[job.key] = Pending(job, 0)
        self.give_back(job.key, job.tokens)

    def remove(self, key: int) -> None:
        pending = self._pending.pop(key)
        self._out(pending)

    def _out(self, pending: Pending) -> None:
        owner = pending.job.owner
        queue = self._owners.get(owner, {})
        if queue.pop(pending.job.key, None) is not None:
            del self._waiting[pending.job.key]
            self._ledger.waits_no_more(owner)
            if not queue:
                del self._owners[owner]
                self._shortest_next.pop(owner, None)

    def give_back(self, key: int, tokens: int) -> None:
        """Tokens that were taken but not fed; a fill that has gone meanwhile is passed over."""
        pending = self._pending.get(key)
        if pending is None or not tokens:
            return
        pending.left += tokens
        queue = self._owners.setdefault(pending.job.owner, {})
        if key not in queue:
            queue[key] = self._waiting[key] = pending
            self._ledger.wait(pending.job.owner)

    def least_had(self) -> float | None:
        """The least that an owner of waiting prefills was charged; None: nobody waits."""
        return min(map(self._ledger.had, self._owners), default=None)

    def take(
        self, room: int, cost: PassCost, rows_max: int, *, oldest: bool = False
    ) -> list[tuple[Job, int]]:
        """The next pass, of at most `room` tokens and `rows_max` rows; somebody must wait.

        `oldest`: it is for whoever has waited longest since its last quantum, whatever its owner has had.
        """
        head = next(iter(self._waiting.values())) if oldest else self._head()
        pieces = [(head, min(head.left, room))]
        if head.job.joins and head.left <= room:
            pieces += self._mates(head, room, cost, rows_max)
        for pending, tokens in pieces:
            self._served(pending, tokens)
        return [(pending.job, tokens) for pending, tokens in pieces]

    def _head(self) -> Pending:
        owner = min(self._owners, key=self._ledger.had)
        queue = self._owners[owner]
        shortest = self._shortest_next.get(owner, True)
        self._shortest_next[owner] = not shortest
        if shortest:
            return min(queue.values(), key=lambda pending: pending.left)
        return next(iter(queue.values()))

    def _mates(self, head: Pending, room: int, cost: PassCost, rows_max: int) -> list[tuple[Pending, int]]:
        """Others that end with the head's pass, for as long as each makes all of it cheaper."""
        mates: list[tuple[Pending, int]] = []
        width = total = head.left
        pads = head.job.pads
        for other in self._by_turn():
            rows, longer = len(mates) + 2, max(width, other.left)
            level = other.left == width
            if other is head or not other.job.joins or not (level or (pads and other.job.pads)):
                continue
            if rows > rows_max or rows * longer > room:
                continue
            padding = rows * longer - total - other.left
            more = padding - ((rows - 1) * width - total)
            gain = cost.of_pass - more * cost.per_token
            if padding > WASTE_MAX * rows * longer or gain < GAIN_MIN * cost.of(other.left):
                continue
            mates.append((other, other.left))
            width, total, pads = longer, total + other.left, pads and other.job.pads
        return mates

    def _by_turn(self) -> Iterator[Pending]:
        for owner in sorted(self._owners, key=self._ledger.had):
            yield from self._owners[owner].values()

    def _served(self, pending: Pending, tokens: int) -> None:
        owner = pending.job.owner
        queue = self._owners[owner]
        pending.left -= tokens
        if not pending.left:
            self._out(pending)
        else:
            for order in (queue, self._waiting):
                order[pending.job.key] = order.pop(pending.job.key)
        if owner in self._owners:  # of two owners that have had the same, the other is next
            self._owners[owner] = self._owners.pop(owner)
