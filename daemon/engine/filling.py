"""The prefills of an engine: which runs next, the quantum on the device, and their ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from stateroom.daemon.engine.blas_threads import BlasThreads
from stateroom.daemon.engine.fill import Fill
from stateroom.daemon.engine.score import Score
from stateroom.daemon.scheduler.fills import FillQueue
from stateroom.daemon.scheduler.pace import Pace

if TYPE_CHECKING:
    from stateroom.daemon.engine.engine import Engine

Work = Fill | Score


@dataclass(frozen=True, slots=True)
class Quantum:
    """The piece of a prefill that is on the device."""

    work: Work
    tokens: int
    arrays: list[mx.array]


class Filling:
    """Waiting prefills and the quantum in flight. `pace` sizes the quanta."""

    def __init__(self, engine: Engine, pace: Pace) -> None:
        self._engine = engine
        self.pace = pace
        self.queue: FillQueue[Work] = FillQueue()
        self.quantum: Quantum | None = None
        self.tokens = 0  # computed since the start
        self._turn_ms: float | None = None  # when the last turn came to its quantum; None after idling
        self._turn_rows = 0  # rows that decoded then
        self._turn_tokens = 0  # prefilled since

    @property
    def _streams(self) -> bool:
        return bool(self._engine.decoding.batches)

    def idle(self) -> None:
        """Nothing is left to do: what comes next is no part of a turn."""
        self._turn_ms = None

    def begin(self, work: Work) -> None:
        """Queues a fill or a score; one with nothing to compute is done at once."""
        self._engine.requests[work.rid] = work
        self.queue.add(work, background=work.session.background)
        if isinstance(work, Fill) and not self._computes(work):
            self._end_work(work)

    @staticmethod
    def _computes(fill: Fill) -> bool:
        return max(fill.change.length - 1, 0) > fill.change.kv_keep

    def fill(self) -> None:
        """Awaits the quantum in flight and launches the next."""
        self._land_quantum()
        self._measure_turn()
        for cancelled in [work for work in self.queue if work.cancelled]:
            self._end_work(cancelled)
        if len(self.queue) and self._streams and self.pace.alone_due():
            return
        work = self.queue.turn()
        if work is None:
            return
        try:
            if work.started_ms is None:
                work.start(self._engine.clock_ms())
            tokens = work.piece(self.pace.quantum(work.remaining, streams=self._streams))
            arrays = work.launch(self._engine.loaded.model, tokens)
            mx.async_eval(arrays)
            self.quantum = Quantum(work, tokens, arrays)
        except Exception as error:
            self._work_failed(work, error)

    def _measure_turn(self) -> None:
        """What lies between two launches of quanta: a quantum, if there was one, and a step of the rows."""
        began, before, tokens = self._turn_ms, self._turn_rows, self._turn_tokens
        self._turn_ms, self._turn_tokens = self._engine.clock_ms(), 0
        self._turn_rows = self._engine.decoding.rows
        if began is not None and self._turn_rows == before:  # else rows were copied too, in or out
            self.pace.measured_turn(self._turn_ms - began, tokens=tokens, streams=before > 0)

    def fill_alone(self, blas: BlasThreads) -> None:
        """One quantum from launch to end, with nothing else on the device."""
        blas.many()
        self.fill()
        self._land_quantum()
        blas.few()

    def _land_quantum(self) -> None:
        quantum, self.quantum = self.quantum, None
        if quantum is None:
            return
        work = quantum.work
        try:
            mx.eval(quantum.arrays)
            work.landed(quantum.tokens, quantum.arrays)
            if isinstance(work, Fill):
                self._tidy(work)
        except Exception as error:
            self._work_failed(work, error)
            return
        self._turn_tokens += quantum.tokens
        self.tokens += quantum.tokens
        if isinstance(work, Fill) and work.progress:
            self._engine.answer(work.rid, work.progressed())
        if work.done:
            self._end_work(work)

    def _tidy(self, fill: Fill) -> None:
        """Behind a quantum: checkpoints; behind the last, windows without what they needed for the others."""
        cache = fill.session.cache
        if cache is None or not cache.checkpointed:
            return
        if fill.done:
            cache.forget_unseen()
            self._engine.memory.mark(fill.session, cache, 0, every=1)
        else:
            self._engine.memory.mark(fill.session, cache, 0)

    def _end_work(self, work: Work) -> None:
        self.queue.remove(work)
        self._engine.requests.pop(work.rid, None)
        try:
            if work.started_ms is None and not work.cancelled:
                work.start(self._engine.clock_ms())
            work.end()
        except Exception as error:
            self._refuse_work(work, error)

    def _work_failed(self, work: Work, error: BaseException) -> None:
        self.queue.remove(work)
        self._engine.requests.pop(work.rid, None)
        if isinstance(work, Fill):
            work.end_cancelled()
            work.session.drop_kv()
        self._refuse_work(work, error)

    def _refuse_work(self, work: Work, error: BaseException) -> None:
        if isinstance(work, Fill) and work.opens:
            self._engine.sharing.leave(work.session)
        self._engine.fail(work.rid, error, self._engine.journal(work.session, 0))
