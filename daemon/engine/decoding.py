"""The streams of an engine: which rows decode together, their steps, and their ends.

A step is launched with the last draws still on the device, where the rows can be trimmed by a step; then the
step before is read and told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stateroom.caches.session import SessionCache
from stateroom.client.errors import Numeric
from stateroom.daemon.engine.batch import Batch
from stateroom.daemon.engine.flight import Flight, Landed
from stateroom.daemon.engine.session import Session
from stateroom.daemon.engine.speculation.guesser import Guessers
from stateroom.daemon.engine.speculation.rounds import Rounds
from stateroom.daemon.engine.stream import Stream
from stateroom.daemon.scheduler.packing import Costs

if TYPE_CHECKING:
    from stateroom.daemon.engine.engine import Engine


class Decoding:
    """The batches of an engine, and what waits to join them. `rows_max`: rows of one batch."""

    def __init__(self, engine: Engine, rows_max: int) -> None:
        self._engine = engine
        self.rows_max = rows_max
        self.costs = Costs()  # of rows apart and together, until they are measured
        self.joining: list[Stream] = []
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
            try:
                act(batch)
            except Exception as error:
                self._batch_failed(batch, error)

    def drop_empty(self) -> None:
        self.batches = [batch for batch in self.batches if batch.members]

    def begin(self, stream: Stream) -> None:
        self._engine.requests[stream.rid] = stream
        self.joining.append(stream)

    def join(self) -> None:
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
                apart, room = self._engine.schemes.groupable, self._engine.memory.has_room
                batch = Batch(self._engine.loaded.model, self.rows_max, lookahead, apart, self.costs, room)
                self.batches.append(batch)
            groups.setdefault(id(batch), (batch, []))[1].append(stream)
        for batch, streams in groups.values():
            try:
                if batch.in_round:  # its rows can't move until it is known what stays of them
                    self._land(batch)
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
                self._engine.report(error)
        batch.launch(self.rounds, self._engine.clock_ms())

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
        self._measure(flight)
        self.steps += 1
        ended = []
        taken = []
        for stream, brought in zip(flight.members, landed, strict=True):
            if stream.has_ended():
                continue  # it ended a step ago; this draw was one too many
            taken.append(self._take(stream, brought))
            if stream.has_ended():
                ended.append((stream, False))
            elif not brought.finite and brought.draft.tokens:
                stream.doubts = True
            elif not brought.finite:
                stream.finish = "cancelled"
                ended.append((stream, True))
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
        if stream.request.stream and event.tokens:
            self._engine.answer(stream.rid, event, self._engine.journal(stream.session, before))
        return len(event.tokens)

    def _measure(self, flight: Flight) -> None:
        """Steps and quanta take turns on the device: what lies between two ends is the second one's."""
        now_ms, prefilled = self._engine.clock_ms(), self._engine.filling.tokens
        if prefilled == self._prefilled:
            began_ms = max(self._landed_ms, flight.launched_ms)
            self.rounds.costs.measured(len(flight.members), flight.width, now_ms - began_ms)
        self._landed_ms, self._prefilled = now_ms, prefilled

    def _finish_stream(self, stream: Stream) -> None:
        self._close_stream(stream)
        if stream.finish is None:
            stream.finish = "cancelled"
        keep = stream.session.length if stream.request.stream else stream.base
        self._engine.answer(
            stream.rid, stream.result(self._engine.clock_ms()), self._engine.journal(stream.session, keep)
        )

    def _close_stream(self, stream: Stream) -> None:
        self._engine.requests.pop(stream.rid, None)
        stream.session.origin = "session"
        if stream.session.cache is not None:
            stream.session.settle()

    def end_cancelled(self) -> None:
        """A stream that was cancelled before its first step is in no flight that would end it."""
        for stream in [r for r in self._engine.requests.values() if isinstance(r, Stream) and r.cancelled]:
            flying = any(b.flight is not None and stream in b.flight.members for b in self.batches)
            if stream not in self.joining and not flying and stream.finish is None:
                for batch in self.batches:
                    batch.leave([s for s in batch.members if s is stream])
                self._finish_stream(stream)

    def _batch_failed(self, batch: Batch, error: BaseException) -> None:
        """A step raised: its streams end by name, and their sessions go back to their tokens."""
        flights = [flight for flight in (batch.flight, batch.landing) if flight is not None]
        streams = set(batch.members).union(*(flight.members for flight in flights))
        batch.clear()
        for stream in streams:
            if stream.rid in self._engine.requests:
                self._stream_failed(stream, error)

    def _stream_failed(self, stream: Stream, error: BaseException) -> None:
        stream.finish = "cancelled"
        stream.session.lent = False
        stream.session.drop_kv()
        self._engine.requests.pop(stream.rid, None)
        self._engine.fail(stream.rid, error, self._engine.journal(stream.session, stream.base))


def without_numbers(session: Session) -> Numeric:
    """What to answer when its logits aren't finite. The KV goes, where what spoiled them may lie."""
    session.drop_kv()
    return Numeric(
        "The model gave NaN or infinite logits for this session; its KV was dropped and will "
        "be computed again from its tokens when it is next used.",
        length=session.length,
    )
