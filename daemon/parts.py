"""KV that several sessions may hold: trunks and checkpoints, by what the workers tell of each session. Pure.

A worker tells of a session which parts it has; how many sessions have a part is counted here, so that
`info` tells of one session what is shared now, though it was another one that was closed, trimmed or forked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stateroom.daemon.link import Part


@dataclass(slots=True)
class _Held:
    part: Part
    sessions: int = 0


class Parts:
    """Counts the holders of parts. `generation`: the worker that numbered them."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], _Held] = {}
        self.trunks = 0
        self.trunk_bytes = 0
        self.private_bytes = 0  # of parts that one session has
        self.shared_bytes = 0  # of those that several have, each once

    def replace(self, generation: int, before: Sequence[Part], after: Sequence[Part]) -> None:
        """A session has these parts now, and had those."""
        for part in after:
            held = self._held.get((generation, part.number))
            if held is None:
                held = self._held[generation, part.number] = _Held(part)
                self.trunks += part.trunk
                self.trunk_bytes += part.bytes if part.trunk else 0
            self._count(held, 1)
        for part in before:
            held = self._held[generation, part.number]
            self._count(held, -1)
            if not held.sessions:
                del self._held[generation, part.number]
                self.trunks -= part.trunk
                self.trunk_bytes -= part.bytes if part.trunk else 0

    def _count(self, held: _Held, change: int) -> None:
        for sessions, sign in ((held.sessions, -1), (held.sessions + change, 1)):
            if sessions == 1:
                self.private_bytes += sign * held.part.bytes
            elif sessions > 1:
                self.shared_bytes += sign * held.part.bytes
        held.sessions += change

    def split(self, generation: int, parts: Sequence[Part]) -> tuple[int, int]:
        """Bytes of a session's parts: those that it alone has, and those that others have too."""
        private = shared = 0
        for part in parts:
            if self._held[generation, part.number].sessions == 1:
                private += part.bytes
            else:
                shared += part.bytes
        return private, shared

    def __len__(self) -> int:
        return len(self._held)
