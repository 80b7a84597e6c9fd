"""Which prefill runs next. Pure.

Waiting prefills take turns, quantum by quantum; `interactive` goes before `background`, but every
`BACKGROUND_EVERY`-th quantum is the background's when any waits there, so that nothing starves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

BACKGROUND_EVERY = 8  # quanta

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

    def __iter__(self) -> Iterator[T]:
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
