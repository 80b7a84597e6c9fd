"""The engine: sessions, and the loop that steps the model for them. One thread owns it and all of mlx.

A turn of the loop launches the next decode step of every batch, publishes the tokens of the step
before while the device works, awaits the prefill quantum in flight and launches the next. Commands are
taken between turns; they only plan and queue. Every command ends in exactly one final answer.

Order on the device: decode step, prefill quantum, decode step, … A stream never waits for more than
one quantum, a prefill for no more than one step. With `BlasThreads` (CPU) a quantum runs by itself, since
the number of threads is switched around it and work in flight would be caught half-way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from stateroom.caches import attention
from stateroom.caches.errors import UnknownKind
from stateroom.caches.probe import pieces_agree
from stateroom.caches.session import SessionCache
from stateroom.caches.stored_rows import SHARED_MIN
from stateroom.client.errors import Internal, Numeric, StateroomError
from stateroom.client.limits import BATCH_MAX
from stateroom.client.protocol import Body, KindCaps, LengthResult, Receipt
from stateroom.daemon.engine.batch import Batch, Flight
from stateroom.daemon.engine.blas_threads import BlasThreads
from stateroom.daemon.engine.cpu_linear import use_pieces
from stateroom.daemon.engine.fill import Fill
from stateroom.daemon.engine.kv import Schemes
from stateroom.daemon.engine.memory import Memory
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.engine.problem import ModelError
from stateroom.daemon.engine.score import Score
from stateroom.daemon.engine.session import Session
from stateroom.daemon.engine.stream import Stream
from stateroom.daemon.link import Answer, Journal, Journals, bounded
from stateroom.daemon.scheduler import FillQueue, Pace

Work = Fill | Score


@dataclass(frozen=True, slots=True)
class Quantum:
    """The piece of a prefill that is on the device."""

    work: Work
    tokens: int
    arrays: list[mx.array]


class Engine:
    """Owns every session of one model.

    Args:
        loaded: the model with its tokenizer.
        clock_ms: monotonic milliseconds.
        emit: takes every answer, and what else the broker should know, in order; on the engine's thread.
        report: takes an exception that is a bug, and gives the incident's name for the log.
        kv_budget_bytes: the most KV held at once; None: no limit.
        pace: sizes the prefill quanta.
        blas: switches BLAS threads between decode and prefill, on a CPU.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        clock_ms: Callable[[], float],
        emit: Callable[[Answer | Journals], None],
        report: Callable[[BaseException], str],
        kv_budget_bytes: int | None = None,
        pace: Pace | None = None,
        blas: BlasThreads | None = None,
        rows_max: int = BATCH_MAX,
        shared_min: int = SHARED_MIN,
    ) -> None:
        self.loaded = loaded
        self.clock_ms = clock_ms
        self.emit = emit
        self.report = report
        self.memory = Memory(self, kv_budget_bytes, self._checkpoints_dropped)
        self.pace = pace or Pace()
        self.blas = blas
        self.rows_max = rows_max
        self.shared_min = shared_min  # tokens; a fork copies a shorter run
        self.sessions: dict[str, Session] = {}
        self.requests: dict[int, Work | Stream] = {}
        self.fills: FillQueue[Work] = FillQueue()
        self.quantum: Quantum | None = None
        self.joining: list[Stream] = []
        self.batches: list[Batch] = []
        self.tokens_decoded = 0
        self.tokens_prefilled = 0
        self.steps = 0
        self._turn_ms: float | None = None  # when the last turn came to its quantum; None after idling
        self._turn_rows = 0  # rows that decoded then
        self._turn_tokens = 0  # prefilled since
        self._cancelled_any = False
        self._learn()

    def _learn(self) -> None:
        """Before anybody asks: the attention seam, the geometry of the KV, whether rows can share a pass.

        Raises:
            ModelError: some layer keeps its state in a way that isn't understood; the message names it.
        """
        attention.install(self.loaded.model)
        if mx.default_device().type == mx.DeviceType.cpu:
            use_pieces(self.loaded.model)
        try:
            if not pieces_agree(self.loaded.model):
                raise ModelError(
                    f"The model {self.loaded.id} can't be served: a prompt fed in pieces doesn't give what "
                    "it gives whole.",
                    permanent=True,
                )
            self.schemes = Schemes(self.loaded.model)
        except UnknownKind as error:
            raise ModelError(
                f"The model {self.loaded.id} can't be served: {error}.", permanent=True
            ) from error
        self.bytes_per_token = self.schemes.dense.caps.bytes_per_token
        self.kinds = self.schemes.dense.caps.kv

    def trial_step(self) -> Callable[[], None]:
        """A decode step of one row that belongs to nobody, to be timed before there is work."""
        row = self.schemes.dense.empty()

        def step() -> None:
            mx.eval(row.forward(self.loaded.model, mx.array([[0]], dtype=mx.uint32)), row.arrays())

        return step

    # ------------------------------------------------------------ answers

    def answer(self, rid: int, body: Body, journal: Journal | None = None) -> None:
        self.emit(Answer(rid, body, journal))

    def fail(self, rid: int, error: BaseException, journal: Journal | None = None) -> None:
        """The final answer of a request that ended in an exception."""
        if not isinstance(error, StateroomError):
            incident = self.report(error)
            error = Internal(
                "The engine failed at this request; the log has the incident.", incident=incident
            )
        self.answer(rid, error.body(), journal)

    def journal(self, session: Session, keep: int) -> Journal:
        """The session's tokens from `keep` on, what it holds, and its chat where that is news."""
        chat = None
        if session.chat is not session.chat_told:
            chat = bounded(session.chat) if session.chat != session.chat_told else None
            session.chat_told = session.chat
        told = self.memory.told(session)
        kinds = None
        if session.cache is not None and session.cache.quantised != session.quantised_told:
            session.quantised_told = session.cache.quantised
            kinds = [KindCaps(kind=k.kind, scheme=k.scheme, layers=k.layers) for k in session.cache.kinds()]
        return Journal(
            session=session.id,
            keep=keep,
            tokens=session.tokens[keep:],
            private_bytes=told.private,
            shared_bytes=told.shared,
            live_bytes=told.live,
            capacity_bytes=told.capacity,
            kinds=kinds,
            resident=session.lent or session.stored > 0 or session.length <= 1,
            chat=chat,
            trim_floor=None if session.lent else session.trim_floor,
            checkpoints=None if session.lent else session.checkpoints,
        )

    # ------------------------------------------------------------ the loop

    @property
    def kv_bytes(self) -> int:
        """KV held on the device by all sessions and batches."""
        return self.memory.held_bytes

    def _checkpoints_dropped(self, sessions: list[Session]) -> None:
        self.emit(Journals([self.journal(session, session.length) for session in sessions]))

    def step(self) -> bool:
        """One turn of the loop; False when nothing is left to do."""
        self._join()
        alone = self.blas is not None and len(self.fills) > 0
        if alone:
            self._each_batch(self._land)
            self._fill_alone()
            self._each_batch(self._launch)
        else:
            self._each_batch(self._step_batch)
            self._fill()
        self.batches = [batch for batch in self.batches if batch.members]
        if self._cancelled_any:
            self._end_cancelled_streams()
        if not self.requests:
            self._turn_ms = None
        return bool(self.requests)

    def _each_batch(self, act: Callable[[Batch], None]) -> None:
        for batch in list(self.batches):
            try:
                act(batch)
            except Exception as error:
                self._batch_failed(batch, error)

    def cancel(self, rid: int) -> None:
        """Ends a request at its next token or quantum. Unknown or finished ids are passed over."""
        request = self.requests.get(rid)
        if request is not None:
            request.cancelled = True
            self._cancelled_any = True

    def cancel_all(self) -> None:
        for rid in list(self.requests):
            self.cancel(rid)

    # ------------------------------------------------------------ decode

    def begin_stream(self, stream: Stream) -> None:
        self.requests[stream.rid] = stream
        self.joining.append(stream)

    def _join(self) -> None:
        waiting, self.joining = self.joining, []
        groups: dict[int, tuple[Batch, list[Stream]]] = {}
        for stream in waiting:
            if stream.cancelled:
                self._finish_stream(stream)
                continue
            if stream.has_ended():
                continue  # while its row was out to be quantised
            cache = stream.session.cache
            if cache is None:
                cache = stream.session.cache = stream.session.served.empty()
            if not cache.tokens_left_dense:
                stream.session.settle()
                cache.quantise()
            batch = next((b for b in self.batches if self._has_place(b, groups, cache)), None)
            if batch is None:
                lookahead = cache.speculative  # its rows can be trimmed by a step
                batch = Batch(self.loaded.model, self.rows_max, lookahead)
                self.batches.append(batch)
            groups.setdefault(id(batch), (batch, []))[1].append(stream)
        for batch, streams in groups.values():
            try:
                batch.join(streams)
            except Exception as error:
                if any(stream in batch.members for stream in streams):
                    self._batch_failed(batch, error)
                else:  # merging failed before anything moved; those who decode go on
                    for stream in streams:
                        self._stream_failed(stream, error)

    def _has_place(
        self, batch: Batch, groups: dict[int, tuple[Batch, list[Stream]]], cache: SessionCache
    ) -> bool:
        coming = groups.get(id(batch), (batch, []))[1]
        if len(batch.members) + len(coming) >= self.rows_max or not self.schemes.batchable:
            return False
        other = batch.cache if batch.cache is not None else coming[0].session.cache if coming else None
        if other is None or other.signature != cache.signature:
            return other is None
        together = [*(batch.cache.columns if batch.cache is not None else ()), *cache.columns]
        together += [
            offset for stream in coming if stream.session.cache for offset in stream.session.cache.columns
        ]
        padding = len(together) * max(together) - sum(together)
        return self.memory.has_room(int(padding * cache.bytes_per_token))

    def _step_batch(self, batch: Batch) -> None:
        if batch.lookahead:
            flight = batch.flight
            self._launch(batch)
            self._publish(batch, flight)
        else:
            self._land(batch)
            self._launch(batch)

    def _launch(self, batch: Batch) -> None:
        self.joining.extend(batch.leave_due())
        batch.launch()

    def _land(self, batch: Batch) -> None:
        """Ends the step in flight before another is launched."""
        flight, batch.flight = batch.flight, None
        self._publish(batch, flight)

    def _publish(self, batch: Batch, flight: Flight | None) -> None:
        """Reads a step's draws and tells them; streams that ended leave with their rows."""
        if flight is None:
            return
        batch.landing = flight
        mx.eval(flight.drawn.arrays())
        tokens = cast("list[int]", flight.drawn.tokens.tolist())
        finite = flight.drawn.read_finite()
        logprobs = flight.drawn.read_logprobs()
        self.steps += 1
        ended = []
        for row, stream in enumerate(flight.members):
            if stream.has_ended():
                continue  # it ended a step ago; this draw was one too many
            if not finite[row]:
                stream.finish = "cancelled"
                ended.append((stream, True))
                continue
            keep = stream.session.length
            event = stream.take(tokens[row], logprobs.get(row))
            self.tokens_decoded += 1
            if stream.request.stream:
                self.answer(stream.rid, event, self.journal(stream.session, keep))
            if stream.has_ended():
                ended.append((stream, False))
        batch.leave([stream for stream, _ in ended if stream in batch.members])
        for stream, numeric in ended:
            if numeric:
                error = self.without_numbers(stream.session)
                self._close_stream(stream)
                self.fail(stream.rid, error, self.journal(stream.session, stream.base))
            else:
                self._finish_stream(stream)
        batch.landing = None
        if batch.cache is not None and batch.cache.checkpointed:
            for row, stream in enumerate(batch.members):
                self.memory.mark(stream.session, batch.cache, row)

    @staticmethod
    def without_numbers(session: Session) -> Numeric:
        """What to answer when its logits aren't finite. The KV goes, where what spoiled them may lie."""
        session.drop_kv()
        return Numeric(
            "The model gave NaN or infinite logits for this session; its KV was dropped and will "
            "be computed again from its tokens when it is next used.",
            length=session.length,
        )

    def _finish_stream(self, stream: Stream) -> None:
        self._close_stream(stream)
        if stream.finish is None:
            stream.finish = "cancelled"
        keep = stream.session.length if stream.request.stream else stream.base
        self.answer(stream.rid, stream.result(self.clock_ms()), self.journal(stream.session, keep))

    def _close_stream(self, stream: Stream) -> None:
        self.requests.pop(stream.rid, None)
        stream.session.origin = "session"
        if stream.session.cache is not None:
            stream.session.settle()

    def _end_cancelled_streams(self) -> None:
        """A stream that was cancelled before its first step is in no flight that would end it."""
        self._cancelled_any = False
        for stream in [r for r in self.requests.values() if isinstance(r, Stream) and r.cancelled]:
            flying = any(b.flight is not None and stream in b.flight.members for b in self.batches)
            if stream not in self.joining and not flying and stream.finish is None:
                for batch in self.batches:
                    batch.leave([s for s in batch.members if s is stream])
                self._finish_stream(stream)

    def _batch_failed(self, batch: Batch, error: BaseException) -> None:
        """A step raised: its streams end by name, and their sessions go back to their tokens."""
        flights = [flight for flight in (batch.flight, batch.landing) if flight is not None]
        streams = set(batch.members).union(*(flight.members for flight in flights))
        batch.members, batch.cache, batch.flight, batch.landing = [], None, None, None
        for stream in streams:
            if stream.rid in self.requests:
                self._stream_failed(stream, error)

    def _stream_failed(self, stream: Stream, error: BaseException) -> None:
        stream.finish = "cancelled"
        stream.session.lent = False
        stream.session.drop_kv()
        self.requests.pop(stream.rid, None)
        self.fail(stream.rid, error, self.journal(stream.session, stream.base))

    # ------------------------------------------------------------ prefill

    def begin_work(self, work: Work) -> None:
        """Queues a fill or a score; one with nothing to compute is done at once."""
        self.requests[work.rid] = work
        self.fills.add(work, background=work.session.background)
        if isinstance(work, Fill) and not self._computes(work):
            self._end_work(work)

    @staticmethod
    def _computes(fill: Fill) -> bool:
        return max(fill.change.length - 1, 0) > fill.change.kv_keep

    def _fill(self) -> None:
        """Awaits the quantum in flight and launches the next."""
        self._land_quantum()
        self._measure_turn()
        for cancelled in [work for work in self.fills if work.cancelled]:
            self._end_work(cancelled)
        if len(self.fills) and self.batches and self.pace.alone_due():
            return
        work = self.fills.turn()
        if work is None:
            return
        try:
            if work.started_ms is None:
                work.start(self.clock_ms())
            tokens = work.piece(self.pace.quantum(work.remaining, streams=bool(self.batches)))
            arrays = work.launch(self.loaded.model, tokens)
            mx.async_eval(arrays)
            self.quantum = Quantum(work, tokens, arrays)
        except Exception as error:
            self._work_failed(work, error)

    def _measure_turn(self) -> None:
        """What lies between two launches of quanta: a quantum, if there was one, and a step of the rows."""
        began, before, tokens = self._turn_ms, self._turn_rows, self._turn_tokens
        self._turn_ms, self._turn_tokens = self.clock_ms(), 0
        self._turn_rows = sum(len(batch.members) for batch in self.batches)
        if began is not None and self._turn_rows == before:  # else rows were copied too, in or out
            self.pace.measured_turn(self._turn_ms - began, tokens=tokens, streams=before > 0)

    def _fill_alone(self) -> None:
        """One quantum from launch to end, with nothing else on the device."""
        assert self.blas is not None
        self.blas.many()
        self._fill()
        self._land_quantum()
        self.blas.few()

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
        self.tokens_prefilled += quantum.tokens
        if isinstance(work, Fill) and work.progress:
            self.answer(work.rid, work.progressed())
        if work.done:
            self._end_work(work)

    def _tidy(self, fill: Fill) -> None:
        """Behind a quantum: checkpoints; behind the last, windows without what they needed for the others."""
        cache = fill.session.cache
        if cache is None or not cache.checkpointed:
            return
        if fill.done:
            cache.forget_unseen()
            self.memory.mark(fill.session, cache, 0, every=1)
        else:
            self.memory.mark(fill.session, cache, 0)

    def _end_work(self, work: Work) -> None:
        self.fills.remove(work)
        self.requests.pop(work.rid, None)
        try:
            if work.started_ms is None and not work.cancelled:
                work.start(self.clock_ms())
            work.end()
        except Exception as error:
            self._refuse_work(work, error)

    def _work_failed(self, work: Work, error: BaseException) -> None:
        self.fills.remove(work)
        self.requests.pop(work.rid, None)
        if isinstance(work, Fill):
            work.end_cancelled()
            work.session.drop_kv()
        self._refuse_work(work, error)

    def _refuse_work(self, work: Work, error: BaseException) -> None:
        if isinstance(work, Fill) and work.opens:
            self.sessions.pop(work.session.id, None)
        self.fail(work.rid, error, self.journal(work.session, 0))

    def finish_fill(self, fill: Fill) -> None:
        """The common end of prefill, sync and trim: a length and a receipt."""
        cancelled = fill.cancelled and not fill.done
        if cancelled:
            fill.end_cancelled()
        result = LengthResult(
            length=fill.session.length,
            receipt=fill.receipt(self.clock_ms()),
            finish="cancelled" if cancelled else "done",
        )
        fill.session.origin = "session"
        keep = min(fill.change.keep, fill.session.length)
        self.answer(fill.rid, result, self.journal(fill.session, keep))

    def unchanged(self, rid: int, session: Session) -> None:
        """Answers an operation that had nothing to do."""
        receipt = Receipt(reused=session.length, source=session.origin if session.length else "none")
        self.answer(
            rid, LengthResult(length=session.length, receipt=receipt), self.journal(session, session.length)
        )

    def gauges(self) -> dict[str, float]:
        """What the pulse tells: figures by name, bytes and milliseconds where the name says so."""
        return {
            "sessions": len(self.sessions),
            "rows": sum(len(batch.members) for batch in self.batches),
            "filling": len(self.fills),
            "kv_bytes": self.kv_bytes,
            "kv_budget_bytes": self.memory.budget_bytes or 0,
            "tokens_decoded": self.tokens_decoded,
            "tokens_prefilled": self.tokens_prefilled,
            "steps": self.steps,
            "step_ms": round(self.pace.step_ms or 0.0, 3),
            "prefill_ms_per_token": round(self.pace.ms_per_token or 0.0, 4),
        }
