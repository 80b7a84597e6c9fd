"""The engine: sessions, and the loop that steps the model for them. One thread owns it and all of mlx.

A turn of the loop asks the schedule who runs and moves rows accordingly, launches the next decode step of
every batch, publishes the tokens of the step before while the device works, awaits the prefill quantum in
flight and launches the next. Commands are taken between turns; they only plan and queue. Every command ends
in exactly one final answer.

Order on the device: decode step, prefill quantum, decode step, … A stream never waits for more than
one quantum, a prefill for no more than one step. With `BlasThreads` (CPU) a quantum runs by itself, since
the number of threads is switched around it and work in flight would be caught half-way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from stateroom.caches import attention
from stateroom.caches.errors import UnknownKind
from stateroom.caches.probe import pieces_agree
from stateroom.caches.stored_rows import SHARED_MIN
from stateroom.caches.trunk import Trunk
from stateroom.client.errors import Internal, StateroomError, Unsupported
from stateroom.client.limits import BATCH_MAX
from stateroom.client.protocol import Body, ErrorBody, KindCaps, LengthResult, Receipt, Result
from stateroom.daemon.engine.blas_threads import BlasThreads
from stateroom.daemon.engine.conservation import Conservation
from stateroom.daemon.engine.cpu_forms import use_forms
from stateroom.daemon.engine.decoding import Decoding
from stateroom.daemon.engine.disk import Disk, Shelving
from stateroom.daemon.engine.fill import Fill
from stateroom.daemon.engine.filling import Filling, Work
from stateroom.daemon.engine.kv import Schemes
from stateroom.daemon.engine.ladder import Ladder
from stateroom.daemon.engine.memory import Memory
from stateroom.daemon.engine.model import LoadedModel, load
from stateroom.daemon.engine.problem import ModelError
from stateroom.daemon.engine.recorder import Recorder
from stateroom.daemon.engine.session import Session
from stateroom.daemon.engine.sharing import Sharing
from stateroom.daemon.engine.speculation.drafter import FIELD, Drafter
from stateroom.daemon.engine.stream import Stream
from stateroom.daemon.link import Answer, FromWorker, Journal, Journals, Part, bounded
from stateroom.daemon.scheduler.pace import Pace
from stateroom.daemon.scheduler.schedule import Schedule

OWNERS_TOLD = 16  # with each pulse: those that had the most of the device


class Engine:
    """Owns every session of one model.

    Args:
        loaded: the model with its tokenizer.
        clock_ms: monotonic milliseconds.
        emit: takes every answer, and what else the broker should know, in order; on the engine's thread.
        report: takes an exception that is a bug, and the rids that it befell; gives the incident's name.
        kv_budget_bytes: the most KV held at once; None: no limit.
        pace: sizes the prefill quanta.
        weights: of owners whose part of the device isn't 1.
        blas: switches BLAS threads between decode and prefill, on a CPU.
        load_drafter: loads a model that drafts, by what the broker calls it.
        record: what happens to each request is remembered.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        clock_ms: Callable[[], float],
        emit: Callable[[FromWorker], None],
        report: Callable[[BaseException, Sequence[int]], str],
        kv_budget_bytes: int | None = None,
        pace: Pace | None = None,
        weights: Mapping[str, float] | None = None,
        blas: BlasThreads | None = None,
        rows_max: int = BATCH_MAX,
        shared_min: int = SHARED_MIN,
        load_drafter: Callable[[str], LoadedModel] = load,
        record: bool = True,
    ) -> None:
        self.loaded = loaded
        self.clock_ms = clock_ms
        self.emit = emit
        self._report = report
        self.recorder = Recorder(on=record)
        self.memory = Memory(self, kv_budget_bytes, self._checkpoints_dropped)
        self.blas = blas
        self.shared_min = shared_min  # tokens; a fork copies a shorter run
        self.sessions: dict[str, Session] = {}
        self.requests: dict[int, Work | Stream | Shelving] = {}
        self.disk: Disk | None = None  # set by whoever has a place for it; None: nothing is kept
        self.schedule = Schedule(rows_max, pace=pace, weights=weights)
        self.decoding = Decoding(self)
        self.filling = Filling(self)
        self.sharing = Sharing(self)
        self.ladder = Ladder(self)
        self.conservation = Conservation(self)
        self._load_drafter = load_drafter
        self._drafter: tuple[str, Drafter] | None = None  # one at the most: its weights stay
        self._cancelled: list[int] = []  # since the last turn
        self._learn()

    def _learn(self) -> None:
        """Before anybody asks: the attention seam, the geometry of the KV, whether rows can share a pass.

        Raises:
            ModelError: some layer keeps its state in a way that isn't understood; the message names it.
        """
        attention.install(self.loaded.model)
        if mx.default_device().type == mx.DeviceType.cpu:
            use_forms(self.loaded.model)
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

    def drafter(self, spec: str) -> Drafter:
        """The model that drafts, loaded when it is first asked for: seconds in which nothing else runs.

        Raises `Unsupported` for a model that can't, and for a second one.
        """
        if self._drafter is None:
            try:
                loaded = self._load_drafter(spec)
            except ModelError as error:
                raise Unsupported(f"The model that drafts can't be loaded: {error}", field=FIELD) from error
            self._drafter = spec, Drafter(loaded, self.loaded)
        if self._drafter[0] != spec:
            raise Unsupported("Another model drafts here already, and one can.", field=FIELD)
        return self._drafter[1]

    def trial_step(self) -> Callable[[], None]:
        """A decode step of one row that belongs to nobody, to be timed before there is work."""
        row = self.schemes.dense.empty()

        def step() -> None:
            mx.eval(row.forward(self.loaded.model, mx.array([[0]], dtype=mx.uint32)), row.arrays())

        return step

    # ------------------------------------------------------------ answers

    def answer(
        self, rid: int, body: Body, journal: Journal | None = None, born: Sequence[Session] = ()
    ) -> None:
        """`born`: sessions that the request made besides its own."""
        told = [self.sessions.get(journal.session)] if journal is not None else []
        self.touch(*told, *born)
        if isinstance(body, Result | ErrorBody):
            code = body.code if isinstance(body, ErrorBody) else "ok"
            self.recorder.answered(rid, code, self.clock_ms())
        journals = [self.journal(session, session.length) for session in born]
        self.emit(Answer(rid, body, journal, journals))

    def fail(self, rid: int, error: BaseException, journal: Journal | None = None) -> None:
        """The final answer of a request that ended in an exception."""
        if not isinstance(error, StateroomError):
            incident = self.report(error, rid)
            error = Internal(
                "The engine failed at this request; the log has the incident.", incident=incident, rid=rid
            )
        self.answer(rid, error.body(), journal)

    def report(self, error: BaseException, *rids: int) -> str:
        """Logs a bug, with the requests that it befell; gives the incident's name."""
        return self._report(error, rids)

    def journal(self, session: Session, keep: int) -> Journal:
        """The session's tokens from `keep` on, what it holds, and its chat where that is news."""
        chat = None
        if session.chat is not session.chat_told:
            chat = bounded(session.chat) if session.chat != session.chat_told else None
            session.chat_told = session.chat
        holding, live_bytes = self.memory.holding(session)
        parts, numbers = None, tuple(part.number for part in holding.parts)
        if numbers != session.parts_told:
            session.parts_told = numbers
            parts = [Part(each.number, each.nbytes, isinstance(each, Trunk)) for each in holding.parts]
        kinds = None
        if session.cache is not None and session.cache.quantised != session.quantised_told:
            session.quantised_told = session.cache.quantised
            kinds = [KindCaps(kind=k.kind, scheme=k.scheme, layers=k.layers) for k in session.cache.kinds()]
        resident = session.lent or session.stored > 0 or session.length <= 1
        return Journal(
            session=session.id,
            keep=keep,
            tokens=session.tokens[keep:],
            private_bytes=holding.own,
            live_bytes=live_bytes,
            parts=parts,
            kinds=kinds,
            resident=resident,
            chat=chat,
            trim_floor=None if session.lent else session.trim_floor,
            checkpoints=None if session.lent else session.checkpoints,
            snapshot=session.snapshot_news(),
            left=None if resident else session.left,
        )

    # ------------------------------------------------------------ the loop

    @property
    def busy(self) -> set[Session]:
        """Sessions that have a request."""
        return {request.session for request in self.requests.values()}

    def touch(self, *sessions: Session | None) -> None:
        """They are in use now; who was not for the longest time gives way first when memory is short."""
        now_ms = self.clock_ms()
        for session in sessions:
            if session is not None:
                session.used_ms = now_ms

    @property
    def kv_bytes(self) -> int:
        """KV held on the device by all sessions and batches."""
        return self.memory.held_bytes

    def _checkpoints_dropped(self, sessions: list[Session]) -> None:
        self.emit(Journals([self.journal(session, session.length) for session in sessions]))

    def step(self) -> bool:
        """One turn of the loop; False when nothing is left to do but for the disk, which wakes the loop."""
        decoding, filling = self.decoding, self.filling
        if self.disk is not None:
            self.disk.turn()
        self.sharing.turn()
        plan, cancelled = self.schedule.plan(), self._cancelled
        self._cancelled = []
        decoding.move(plan)
        if self.blas is not None and plan.quantum:
            decoding.land_all()
            filling.turn_alone(plan, cancelled, self.blas)
            decoding.launch_all()
        else:
            decoding.step_all()
            filling.turn(plan, cancelled)
        filling.stepped(decoding.launched)
        decoding.drop_empty()
        for rid in cancelled:
            decoding.end_cancelled(rid)
        if not self.requests:
            filling.idle()
        self.ladder.turn()
        if self.disk is None:
            return bool(self.requests)
        waiting = self.disk.waiting + self.sharing.waiting_for_disk()
        return self.disk.pressing or len(self.requests) > waiting

    def cancel(self, rid: int) -> None:
        """Ends a request at its next token or quantum. Unknown or finished ids are passed over."""
        request = self.requests.get(rid)
        if request is not None:
            request.cancelled = True
            self._cancelled.append(rid)
        else:
            self.ladder.cancel(rid)

    def cancel_all(self) -> None:
        for rid in [*self.ladder.rids, *self.requests]:
            self.cancel(rid)

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
        most = sorted(self.schedule.spent_ms.by_owner.items(), key=lambda item: -item[1])[:OWNERS_TOLD]
        return {
            "sessions": len(self.sessions),
            "rows": self.decoding.rows,
            "parked": len(self.decoding.parked),
            "waiting_fills": len(self.filling.works),
            "kv_bytes": self.kv_bytes,
            "kv_busy_bytes": self.memory.busy_bytes,
            "kv_budget_bytes": self.memory.budget_bytes or 0,
            "waiting_for_memory": len(self.ladder.rids),
            "demoted": self.ladder.demoted,
            "unconserved": self.conservation.violated,
            "tokens_decoded": self.decoding.tokens,
            "tokens_prefilled": self.filling.tokens,
            "steps": self.decoding.steps,
            "step_ms": round(self.schedule.pace.step_ms or 0.0, 3),
            "prefill_ms_per_token": round(self.schedule.pace.cost.per_token, 4),
            "prefill_ms_per_pass": round(self.schedule.pace.cost.of_pass, 3),
            **{f"device_ms.{owner}": round(ms, 3) for owner, ms in most},
        }
