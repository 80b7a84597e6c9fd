"""What the requests of an engine do, or wait for: told with each pulse; nothing when it is idle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stateroom.client.protocol import Waiting
from stateroom.daemon.engine.disk import Shelving
from stateroom.daemon.engine.fill import Fill
from stateroom.daemon.engine.filling import Work
from stateroom.daemon.engine.score import Score
from stateroom.daemon.engine.stream import Stream
from stateroom.daemon.link import WAITS_TOLD, Doing

if TYPE_CHECKING:
    from stateroom.daemon.engine.engine import Engine
    from stateroom.daemon.engine.snapshots import Snapshots


class Doings:
    """Of one engine. A prefill waits for its turn if it got no further since it was last asked for here."""

    def __init__(self, engine: Engine, snapshots: Snapshots) -> None:
        self._engine, self._snapshots = engine, snapshots
        self._fed: dict[int, int] = {}  # tokens of prefills, when they were last told

    def now(self) -> list[Doing]:
        """Of `WAITS_TOLD` requests at the most, those first that wait for memory."""
        made: list[Doing] = []
        fed, self._fed = self._fed, {}
        for doing in self._all(fed):
            made.append(doing)
            if len(made) == WAITS_TOLD:
                break
        return made

    def _all(self, fed: dict[int, int]) -> Iterator[Doing]:
        for rid in self._engine.ladder.rids:
            yield Doing(rid, "memory")
        for rid in self._snapshots.opening:
            yield Doing(rid, "disk")
        for rid, request in self._engine.requests.items():
            if isinstance(request, Shelving):
                yield Doing(rid, "disk")
            elif isinstance(request, Stream):
                yield Doing(rid, self._without_place(request), len(request.drawn), request.request.max_tokens)
            else:
                done, left = _fed(request)
                self._fed[rid] = done
                waiting = self._unfed(request, done, fed.get(rid, 0))
                # One that a decode begins with tells nothing of what that draws.
                decodes = isinstance(request, Fill) and request.most > 0
                yield Doing(rid, waiting, *((0, 0) if decodes else (done, done + left)))

    def _unfed(self, work: Work, done: int, before: int) -> Waiting | None:
        engine = self._engine
        if isinstance(work, Fill) and engine.disk is not None and engine.disk.fetching.waits(work):
            return "disk"
        quantum = engine.filling.quantum
        flying = quantum is not None and any(work is each for each, _ in quantum.pieces)
        # One that isn't queued is to share what another is computing.
        return None if flying or done > before else "turn"

    def _without_place(self, stream: Stream) -> Waiting | None:
        if stream.rid not in self._engine.decoding.parked:
            return None
        yields = stream.session.background and self._engine.schedule.places.hurried()
        return "yielded" if yields else "turn"


def _fed(work: Work) -> tuple[int, int]:
    """Tokens that were computed, and that are to be."""
    if isinstance(work, Fill):
        return work.computed, work.to_compute
    if isinstance(work, Score):
        return len(work.logprobs), work.remaining
    return work.fed, work.remaining
