"""The prefills of an engine: the pass on the device, and their ends. The schedule says which are next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx

from stateroom.caches.layout import capacity_for
from stateroom.daemon.engine.blas_threads import BlasThreads
from stateroom.daemon.engine.fill import Fill, launch_together
from stateroom.daemon.engine.score import Score
from stateroom.daemon.engine.verify import Verify
from stateroom.daemon.scheduler.plan import Job, Plan
from stateroom.daemon.timings import EngineTimings

if TYPE_CHECKING:
    from stateroom.daemon.engine.engine import Engine

Work = Fill | Score | Verify
NAMES: dict[type[Work], str] = {Fill: "prefill", Score: "score", Verify: "verify"}  # as `trace` calls a pass


@dataclass(frozen=True, slots=True)
class Quantum:
    """The pass that is on the device: a row each piece, so many tokens of it."""

    pieces: Sequence[tuple[Work, int]]
    arrays: list[mx.array]
    launched_ms: float


@dataclass(slots=True)
class Turn:
    """What ran since a quantum was launched, to be settled when the next one is."""

    plan: Plan
    began_ms: float
    rows_then: int
    rows: Collection[int] = ()  # rids that took a step
    fed: list[tuple[int, int]] = field(default_factory=list)  # rid, tokens


class Filling:
    """Prefills that are not done, and the quantum in flight."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.works: dict[int, Work] = {}  # by rid
        self.quantum: Quantum | None = None
        self.tokens = 0  # computed since the start
        self.timings = EngineTimings()
        self._turn: Turn | None = None  # None after idling

    def begin(self, work: Work) -> None:
        """Queues a fill or a score; one with nothing to compute is done at once."""
        self._engine.requests[work.rid] = self.works[work.rid] = work
        if work.cancelled or not work.to_compute:
            self._end_work(work)
        else:
            self._engine.recorder.wait(work.rid, "turn", self._engine.clock_ms())
            self._engine.schedule.add(self._job(work))

    def _job(self, work: Work) -> Job:
        session = work.session
        # Where a session is to be quantised a pass is cut, and those who share it would wait for that.
        joins = isinstance(work, Fill) and self._engine.schemes.groupable
        joins = joins and not session.served.blueprint.scheme.quantise_after
        return Job(
            work.rid,
            session.owner,
            "fill",
            session.background,
            work.to_compute,
            joins=joins,
            pads=joins and session.served.caps.trim == "any",
        )

    # ------------------------------------------------------------ a turn

    def turn(self, plan: Plan, cancelled: Collection[int]) -> None:
        """Awaits the quantum in flight, ends what was cancelled, and launches the next."""
        self._land()
        self._settle()
        for rid in cancelled:
            if rid in self.works:
                self._end_work(self.works[rid])
        self._turn = Turn(plan, self._engine.clock_ms(), self._engine.decoding.rows)
        self._launch(plan)

    def turn_alone(self, plan: Plan, cancelled: Collection[int], blas: BlasThreads) -> None:
        """One quantum from launch to end, with nothing else on the device."""
        blas.many()
        self.turn(plan, cancelled)
        self._land()
        blas.few()

    def stepped(self, rows: Collection[int]) -> None:
        """These rows took a step beside the quantum."""
        if self._turn is not None:
            self._turn.rows = rows

    def idle(self) -> None:
        """Nothing is left to do: what comes next is no part of a turn."""
        self._settle()

    def _settle(self) -> None:
        """What lies between two launches of quanta is paid for: a quantum, if there was one, and a step."""
        turn, self._turn = self._turn, None
        if turn is not None:
            steady = turn.rows_then == self._engine.decoding.rows  # else rows were moved, too
            ms = self._engine.clock_ms() - turn.began_ms
            step_ms, quantum_ms = self._engine.schedule.spent(
                turn.plan, ms, rows=turn.rows, fed=turn.fed, steady=steady
            )
            if turn.rows:
                self.timings.step.add(step_ms / 1000.0)
            if turn.fed:
                self.timings.quantum.add(quantum_ms / 1000.0)

    def _launch(self, plan: Plan) -> None:
        pieces, began_ms = [], self._engine.clock_ms()
        for rid, tokens in plan.quantum:
            if not self._engine.schedule.planned(plan, rid):
                continue  # it ended since
            work = self.works[rid]
            try:
                if work.started_ms is None:
                    self._engine.recorder.go(rid, began_ms)
                    work.start(began_ms)
                    assert work.remaining == plan.jobs[rid].tokens
                pieces.append((work, tokens))
            except Exception as error:
                self._work_failed(work, error)
        if not pieces:
            return
        model = self._engine.loaded.model
        together = self._together(pieces)
        try:
            if len(together) > 1:
                pieces = list(together)
                arrays = launch_together(model, together)
            else:
                work, tokens = pieces[0]
                pieces = [(work, work.piece(tokens))]
                arrays = work.launch(model, pieces[0][1])
            mx.async_eval(arrays)
            self.quantum = Quantum(pieces, arrays, began_ms)
        except Exception as error:
            self._pass_failed(pieces, error)

    def _together(self, pieces: Sequence[tuple[Work, int]]) -> list[tuple[Fill, int]]:
        """Those that share the pass; others come in a later one.

        Not those that leave a checkpoint on their way, and nobody where padding takes what isn't there.
        """
        together = [(work, n) for work, n in pieces if isinstance(work, Fill) and work.piece(n) == n]
        width = max((tokens for _, tokens in together), default=0)
        padding = sum(_padding_bytes(fill, tokens, width) for fill, tokens in together)
        shared = pieces[0] in together and self._engine.memory.has_room(padding)
        return together if shared else []

    def _land(self) -> None:
        quantum, self.quantum = self.quantum, None
        if quantum is None:
            return
        try:
            mx.eval(quantum.arrays)
        except Exception as error:
            self._pass_failed(quantum.pieces, error)
            return
        self._record(quantum)
        for work, tokens in quantum.pieces:
            try:
                work.landed(tokens, quantum.arrays)
                if isinstance(work, Fill):
                    self._tidy(work)
            except Exception as error:
                self._work_failed(work, error)
                continue
            if self._turn is not None:
                self._turn.fed.append((work.rid, tokens))
            self.tokens += tokens
            if isinstance(work, Fill) and work.progress:
                self._engine.answer(work.rid, work.progressed())
            if work.done:
                self._end_work(work)

    def _record(self, quantum: Quantum) -> None:
        rids = tuple(work.rid for work, _ in quantum.pieces)
        tokens = [tokens for _, tokens in quantum.pieces]
        name = NAMES[type(quantum.pieces[0][0])]
        self._engine.recorder.quantum(name, rids, tokens, quantum.launched_ms, self._engine.clock_ms())

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
        self._forget(work)
        try:
            if work.started_ms is None and not work.cancelled:
                work.start(self._engine.clock_ms())
            work.end()
        except Exception as error:
            self._refuse_work(work, error)
        else:
            self._engine.sharing.restock(work.session)

    def _forget(self, work: Work) -> None:
        self.works.pop(work.rid, None)
        self._engine.requests.pop(work.rid, None)
        self._engine.schedule.remove(work.rid)

    def _pass_failed(self, pieces: Sequence[tuple[Work, int]], error: BaseException) -> None:
        for work, _ in pieces:
            self._work_failed(work, error)

    def _work_failed(self, work: Work, error: BaseException) -> None:
        self._forget(work)
        if isinstance(work, Fill):
            work.end_cancelled()
            work.session.drop_kv("failed")
        self._refuse_work(work, error)

    def _refuse_work(self, work: Work, error: BaseException) -> None:
        if isinstance(work, Fill) and work.opens:
            self._engine.sharing.leave(work.session)
        known = not isinstance(work, Verify)
        self._engine.fail(work.rid, error, self._engine.journal(work.session, 0) if known else None)


def _padding_bytes(fill: Fill, tokens: int, width: int) -> int:
    """What a row takes besides when it is fed so many more than its tokens; its planes keep it."""
    cache, caps = fill.session.cache, fill.session.served.caps
    columns = cache.columns[0] if cache is not None else 0
    more = capacity_for(columns + width) - capacity_for(columns + tokens)
    return int(more * caps.bytes_per_token)
