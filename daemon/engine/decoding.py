"""The streams of an engine: which rows decode together, their steps, and their ends.

A step is launched with the last draws still on the device, where the rows can be trimmed by a step; then the
step before is read and told.

The schedule says who has a place. A stream without one is parked: its session has its row back, with all its
KV, and its request stays open. When a row is parked its last draw may still be on its way; it is told as any
other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from stateroom.caches.session import SessionCache
from stateroom.client.errors import Numeric
from stateroom.daemon.engine.batch import Batch
from stateroom.daemon.engine.flight import Flight, Landed
from stateroom.daemon.engine.session import Session
from stateroom.daemon.engine.speculation.guesser import Guessers
from stateroom.daemon.engine.speculation.rounds import Rounds
from stateroom.daemon.engine.stream import Stream
from stateroom.daemon.link import Journals
from stateroom.daemon.scheduler.packing import Costs
from stateroom.daemon.scheduler.plan import Job, Plan

if TYPE_CHECKING:
    from stateroom.daemon.engine.engine import Engine


class Decoding:
    """The batches of an engine, and the streams that wait."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.rows_max = engine.schedule.places.rows_max  # of all batches together
        self.costs = Costs()  # of rows apart and together, until they are measured
        self.parked: dict[int, Stream] = {}  # by rid: they wait for a place
        self.joining: list[Stream] = []  # they have one, and join a batch at the next turn
        self.launched: list[int] = []  # rids of the rows that took a step in this turn
        self.batches: list[Batch] = []
        self.tokens = 0  # drawn since the start
        self.steps = 0
        self.rounds = Rounds()
        self.guessers = Guessers()
        self._landed_ms = 0.0  # when the last step was read
        self._prefilled = 0  # tokens until then

    @property
    def rows(self) -> int:
        return sum(len(batch.members) for batch in self.batches)

    def step_all(self) -> None:
        """Every batch: its next step is launched, the one before is told."""
        self._each(self._step)

    def land_all(self) -> None:
        """Every batch's step in flight ends."""
        self._each(self._land)

    def launch_all(self) -> None:
        self._each(self._launch)

    def _each(self, act: Callable[[Batch], None]) -> None:
        for batch in list(self.batches):
            self._attempt(act, batch)

    def _attempt(self, act: Callable[[Batch], None], batch: Batch) -> None:
        try:
            act(batch)
        except Exception as error:
            self._batch_failed(batch, error)

    def drop_empty(self) -> None:
        self.batches = [batch for batch in self.batches if batch.members]

    def begin(self, stream: Stream) -> None:
        self._engine.requests[stream.rid] = self.parked[stream.rid] = stream
        self._engine.recorder.wait(stream.rid, "turn", self._engine.clock_ms())
        session = stream.session
        self._engine.schedule.add(Job(stream.rid, session.owner, "stream", session.background))

    def move(self, plan: Plan) -> None:
        """Rows leave and join as planned."""
        self.launched = []
        for rid in plan.park:
            stream = self._engine.requests.get(rid)
            if not isinstance(stream, Stream):
                continue  # it ended in the round that was read for one before it
            self._take_out(stream)
            if rid in self._engine.requests:
                self.parked[rid] = stream
                why = "yielded" if stream.session.background else "turn"
                self._engine.recorder.wait(rid, why, self._engine.clock_ms())
        for rid in plan.admit:
            stream = self.parked.pop(rid)
            self._engine.recorder.go(rid, self._engine.clock_ms())
            if not stream.launched and not stream.computed:
                stream.started_ms = self._engine.clock_ms()  # until now it was in the queue
            self.joining.append(stream)
        self.join()

    def _take_out(self, stream: Stream) -> None:
        """Gives a stream its row back, wherever it is."""
        self.parked.pop(stream.rid, None)
        if stream in self.joining:
            self.joining.remove(stream)
        for batch in self.batches:
            if stream in batch.members:
                try:
                    if batch.in_round:
                        self._land(batch)
                    batch.leave([member for member in batch.members if member is stream])
                except Exception as error:
                    self._batch_failed(batch, error)

    def join(self) -> None:
        waiting, self.joining = self.joining, []
        groups: dict[int, tuple[Batch, list[Stream]]] = {}
        for stream in waiting:
            if stream.cancelled:
                self._finish_stream(stream)
                continue
            if stream.has_ended():
                continue  # while its row was out to be quantised
            try:
                cache = self._ready(stream.session)
            except Exception as error:
                self._stream_failed(stream, error)
                continue
            batch = next((b for b in self.batches if self._has_place(b, groups, cache)), None)
            if batch is None:
                lookahead = cache.speculative  # its rows can be trimmed by a step
                apart, room = self._engine.schemes.groupable, self._engine.memory.has_room
                batch = Batch(self._engine.loaded.model, self.rows_max, lookahead, apart, self.costs, room)
                self.batches.append(batch)
            groups.setdefault(id(batch), (batch, []))[1].append(stream)
        for batch, streams in groups.values():
            if batch.in_round:  # its rows can't move until it is known what stays of them
                self._attempt(self._land, batch)
            try:
                batch.join(streams)
            except Exception as error:
                if any(stream in batch.members for stream in streams):
                    self._batch_failed(batch, error)
                else:  # merging failed before anything moved; those who decode go on
                    for stream in streams:
                        self._stream_failed(stream, error)

    @staticmethod
    def _ready(session: Session) -> SessionCache:
        """The session's row, as it joins a batch."""
        if session.cache is not None:
            session.settle()
        if session.cache is None:
            session.cache = session.served.empty()
        if not session.cache.tokens_left_dense:
            session.cache.quantise()
        return session.cache

    def _has_place(
        self, batch: Batch, groups: dict[int, tuple[Batch, list[Stream]]], cache: SessionCache
    ) -> bool:
        coming = groups.get(id(batch), (batch, []))[1]
        if len(batch.members) + len(coming) >= self.rows_max:
            return False
        others = [*batch.cache.parts, *(s.session.cache for s in coming if s.session.cache is not None)]
        if batch.cache.apart or not others:
            return True  # nothing is copied, whatever the scheme, and nobody pads anybody
        if not self._engine.schemes.batchable or others[0].signature != cache.signature:
            return False
        together = [columns for other in (*others, cache) for columns in other.columns]
        padding = len(together) * max(together) - sum(together)
        return self._engine.memory.has_room(int(padding * cache.bytes_per_token))

    def _step(self, batch: Batch) -> None:
        if batch.flight is None:
            self._launch(batch)
        elif batch.lookahead and not batch.wants_round(self.rounds):
            flight = batch.flight
            self._launch(batch)
            self._publish(batch, flight)
        else:
            self._land(batch)
            self._launch(batch)

    def _launch(self, batch: Batch) -> None:
        self.joining.extend(batch.leave_due())
        if batch.unarranged:
            try:
                batch.arrange()
            except Exception as error:  # they go on as they stand
                self._engine.report(error, *(stream.rid for stream in batch.members))
        batch.launch(self.rounds, self._engine.clock_ms())
        self.launched += [stream.rid for stream in batch.members]

    def _land(self, batch: Batch) -> None:
        """Ends the step in flight before another is launched."""
        flight, batch.flight = batch.flight, None
        self._publish(batch, flight)

    def _publish(self, batch: Batch, flight: Flight | None) -> None:
        """Reads a step's draws and tells them; streams that ended leave with their rows."""
        if flight is None:
            return
        batch.landing = flight
        landed = flight.read()
        now_ms = self._measure(flight)
        self.steps += 1
        ended = []
        rids, taken = [], []
        for stream, brought in zip(flight.members, landed, strict=True):
            if stream.has_ended():
                continue  # it ended a step ago; this draw was one too many
            rids.append(stream.rid)
            taken.append(self._take(stream, brought))
            if stream.has_ended():
                ended.append((stream, False))
            elif not brought.finite and brought.draft.tokens:
                stream.doubts = True
            elif not brought.finite:
                stream.finish = "cancelled"
                ended.append((stream, True))
        self._record(batch, flight, tuple(rids), taken, now_ms)
        if flight.guesses:
            batch.end_round(taken)
        batch.leave([stream for stream, _ in ended if stream in batch.members])
        for stream, numeric in ended:
            if numeric:
                error = without_numbers(stream.session)
                self._close_stream(stream)
                self._engine.fail(stream.rid, error, self._engine.journal(stream.session, stream.base))
            else:
                self._finish_stream(stream)
        batch.landing = None
        if batch.cache.checkpointed:
            for stream, place in zip(batch.members, batch.cache.places(), strict=True):
                self._engine.memory.mark(stream.session, *place)

    def _take(self, stream: Stream, brought: Landed) -> int:
        """Tells what was drawn for a row; how many tokens its session took."""
        before = stream.session.length
        event = stream.take(brought.tokens, brought.logprobs, brought.draft)
        self.tokens += len(event.tokens)
        if not stream.session.lent and not stream.has_ended():
            stream.session.settle()  # it was parked while this draw was on its way
        if stream.request.stream and event.tokens:
            self._engine.answer(stream.rid, event, self._engine.journal(stream.session, before))
        elif (untold := stream.untold()) is not None:
            self._engine.emit(Journals([self._engine.journal(stream.session, untold)]))
        return len(event.tokens)

    def _record(
        self, batch: Batch, flight: Flight, rids: tuple[int, ...], taken: Sequence[int], now_ms: float
    ) -> None:
        """`rids`: of the rows that took what was drawn, and so many tokens of it each."""
        engine, guesses = self._engine, list[int]()
        most_ms = None if engine.filling.quantum is None else engine.schedule.pace.step_ms
        if flight.guesses:
            told = {s.rid: len(g.tokens) for s, g in zip(flight.members, flight.guesses, strict=True)}
            guesses = [told[rid] for rid in rids]
        tokens = () if sum(taken) == len(taken) and not guesses else taken
        engine.recorder.stepped(id(batch), rids, flight.launched_ms, now_ms, tokens, guesses, most_ms)

    def _measure(self, flight: Flight) -> float:
        """Steps and quanta take turns on the device: what lies between two ends is the second one's.

        When this one ended, which is now.
        """
        now_ms, prefilled = self._engine.clock_ms(), self._engine.filling.tokens
        if prefilled == self._prefilled:
            began_ms = max(self._landed_ms, flight.launched_ms)
            self.rounds.measured(flight.members, flight.width, now_ms - began_ms)
        self._landed_ms, self._prefilled = now_ms, prefilled
        return now_ms

    def _finish_stream(self, stream: Stream) -> None:
        self._close_stream(stream)
        if stream.finish is None:
            stream.finish = "cancelled"
        keep = stream.session.length if stream.request.stream else stream.base
        self._engine.answer(
            stream.rid, stream.result(self._engine.clock_ms()), self._engine.journal(stream.session, keep)
        )

    def _close_stream(self, stream: Stream) -> None:
        self._forget(stream)
        stream.session.origin = "session"
        if stream.session.cache is not None:
            stream.session.settle()

    def end_cancelled(self, rid: int) -> None:
        """A stream that was cancelled while it was parked, or before its first step, is in no flight."""
        stream = self._engine.requests.get(rid)
        if not isinstance(stream, Stream) or stream.finish is not None:
            return
        if not any(b.flight is not None and stream in b.flight.members for b in self.batches):
            self._take_out(stream)
            if rid in self._engine.requests:
                self._finish_stream(stream)

    def _batch_failed(self, batch: Batch, error: BaseException) -> None:
        """A step raised: its streams end by name, and their sessions go back to their tokens."""
        flights = [flight for flight in (batch.flight, batch.landing) if flight is not None]
        streams = set(batch.members).union(*(flight.members for flight in flights))
        batch.clear()
        for stream in streams:
            if stream.rid in self._engine.requests:
                self._stream_failed(stream, error)

    def _forget(self, stream: Stream) -> None:
        self._engine.requests.pop(stream.rid, None)
        self._engine.schedule.remove(stream.rid)
        self.parked.pop(stream.rid, None)

    def _stream_failed(self, stream: Stream, error: BaseException) -> None:
        stream.finish = "cancelled"
        stream.session.lent = False
        stream.session.drop_kv("failed")
        self._forget(stream)
        self._engine.fail(stream.rid, error, self._engine.journal(stream.session, stream.base))


def without_numbers(session: Session) -> Numeric:
    """What to answer when its logits aren't finite. The KV goes, where what spoiled them may lie."""
    session.drop_kv("failed")
    return Numeric(
        "The model gave NaN or infinite logits for this session; its KV was dropped and will "
        "be computed again from its tokens when it is next used.",
        length=session.length,
    )
