"""The simulated engine: commands become prefills and streams, and turns of the real scheduler serve them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.sim.jobs import Fill, Session, Stream
from tests.sim.kv import BYTES_PER_TOKEN, Pool, View, projected_bytes
from tests.sim.language import CONTEXT, POISON, VOCAB, encode
from tests.sim.watch import Watch

from stateroom.client import protocol as p
from stateroom.client.errors import Capacity, Invalid, Numeric, StateroomError, TooLong
from stateroom.daemon.link import (
    Adopt,
    Answer,
    Budget,
    CancelCommand,
    Command,
    Discard,
    Journals,
    Within,
)
from stateroom.daemon.scheduler.pace import Pace
from stateroom.daemon.scheduler.plan import Job, Kind, Plan
from stateroom.daemon.scheduler.schedule import Schedule

RETRY_AFTER_S = 5.0
TOLD_EVERY = 16  # tokens of a decode that isn't streamed, until the broker hears of them
GAP_MS = 50.0
KINDS = [p.KindCaps(kind="full", scheme="dense", layers=2)]
CAPS = p.Caps(
    trim="any",
    trim_floor=0,
    fork="shared",
    batch=True,
    speculative=False,
    kv=KINDS,
    bytes_per_token=BYTES_PER_TOKEN,
)


@dataclass(frozen=True)
class Costs:
    """A device: milliseconds of a step, of each of its rows, of a pass of prefills and each of its tokens."""

    step_ms: float
    row_ms: float
    pass_ms: float
    token_ms: float
    noise: float  # each turn takes up to so much more, as a share
    numeric: float  # probability that a step spoils a row
    budget_bytes: int  # of KV
    rows_max: int  # that take a step together
    weights: dict[str, float]  # of owners

    def of(self, rows: int, tokens: list[int]) -> float:
        ms = self.step_ms + rows * self.row_ms if rows else 0.0
        return ms + (self.pass_ms + len(tokens) * max(tokens) * self.token_ms if tokens else 0.0)


@dataclass(eq=False)
class Turn:
    """What the device does at once: a step of these rows, then a pass of these (fill, tokens)."""

    plan: Plan
    rows: list[int]
    pieces: list[tuple[int, int]]
    ms: float


class Engine:
    """One worker's sessions and requests. `emit` takes every answer, in order."""

    def __init__(
        self, emit: Callable[[Answer | Journals | Within], None], draw: random.Random, costs: Costs
    ) -> None:
        self.emit, self.draw, self.costs = emit, draw, costs
        self.pool = Pool(costs.budget_bytes)
        self.sessions: dict[str, Session] = {}
        self.requests: dict[int, Fill | Stream] = {}
        self.facts: dict[int, Job] = {}  # of the requests, as the schedule knows them
        self.schedule = Schedule(costs.rows_max, pace=Pace(gap_ms=GAP_MS), weights=costs.weights)
        self.watch = Watch(costs)
        self._takers: dict[type[p.Request], Callable[[Command, Any], None]] = {
            p.Open: self._open,
            p.Prefill: self._prefill,
            p.Sync: self._sync,
            p.Trim: self._trim,
            p.Decode: self._decode,
            p.Fork: self._fork,
            p.Publish: self._publish,
            p.Unpublish: self._close,
            p.Score: self._score,
            p.ReadTokens: self._tokens,
            p.Close: self._close,
        }

    def views(self) -> list[View]:
        return [session.kv for session in self.sessions.values()]

    # ------------------------------------------------------------ turns

    def begin(self) -> Turn | None:
        """What the device does next; None when nothing is left to do."""
        for job in [job for job in self.requests.values() if job.cancelled]:
            self._end_fill(job) if isinstance(job, Fill) else self._end_stream(job)
        if not self.requests:
            return None
        plan = self.schedule.plan()
        rows = [key for key in plan.run if self._planned(plan, key)]
        pieces = [piece for piece in plan.quantum if self._planned(plan, piece[0])]
        for key, _ in pieces:
            self.fill(key).begin()
        assert rows or pieces, f"{len(self.requests)} requests wait, and nobody runs"
        turn = Turn(plan, rows, pieces, self.costs.of(len(rows), [tokens for _, tokens in pieces]))
        turn.ms *= 1 + self.costs.noise * self.draw.random()
        return turn

    def poisoned(self, turn: Turn) -> bool:
        """Whether a turn feeds a session that holds the poison."""
        keys = [*turn.rows, *(key for key, _ in turn.pieces)]
        return any(POISON in self.requests[key].session.tokens for key in keys)

    def land(self, turn: Turn) -> None:
        """The turn is over: tells its tokens, and ends what is done."""
        self.watch.turn(turn.plan, turn.rows, turn.pieces, turn.ms)
        rows, pieces = turn.rows, turn.pieces
        for key in rows:
            stream = self.requests[key]
            assert isinstance(stream, Stream)
            self._drawn(stream)
        for key, tokens in pieces:
            self._fed(self.fill(key), tokens)
        self.schedule.spent(turn.plan, turn.ms, rows=rows, fed=pieces)

    def fill(self, key: int) -> Fill:
        fill = self.requests[key]
        assert isinstance(fill, Fill)
        return fill

    def _planned(self, plan: Plan, key: int) -> bool:
        return self.facts.get(key) is plan.jobs[key]

    def _fed(self, fill: Fill, tokens: int) -> None:
        fill.session.kv.append(tokens)
        if fill.progress:
            done = fill.total - fill.session.missing
            self.emit(Answer(fill.rid, p.Progress(done=done, total=fill.total)))
        if fill.done:
            self._end_fill(fill)

    def _drawn(self, stream: Stream) -> None:
        session, keep = stream.session, stream.session.length
        if self.costs.numeric and self.draw.random() < self.costs.numeric:
            self._leave(stream)
            session.kv.trim(0)
            error = Numeric("The logits were not finite.", length=session.length)
            self.emit(Answer(stream.rid, error.body(), session.journal(min(stream.base, keep))))
            return
        event = stream.step()
        if stream.request.stream:
            self.emit(Answer(stream.rid, event, session.journal(keep)))
        elif stream.finish is None and len(stream.drawn) % TOLD_EVERY == 0:
            self.emit(Journals([session.journal(max(session.length - TOLD_EVERY, stream.base))]))
        if stream.finish is not None:
            self._end_stream(stream)

    def _end_stream(self, stream: Stream) -> None:
        self._leave(stream)
        keep = stream.session.length if stream.request.stream else stream.base
        self.emit(Answer(stream.rid, stream.result(), stream.session.journal(keep)))

    def _end_fill(self, fill: Fill) -> None:
        self._leave(fill)
        fill.then(fill)

    def _enter(self, job: Fill | Stream) -> None:
        kind: Kind = "stream" if isinstance(job, Stream) else "fill"
        tokens = job.to_compute if isinstance(job, Fill) else 0
        session = job.session
        facts = Job(job.rid, session.owner, kind, session.background, tokens, joins=True, pads=True)
        self.requests[job.rid], self.facts[job.rid] = job, facts
        self.schedule.add(facts)
        self.watch.added(facts)

    def _leave(self, job: Fill | Stream) -> None:
        del self.requests[job.rid]
        del self.facts[job.rid]
        self.schedule.remove(job.rid)
        self.watch.removed(job.rid)

    # ------------------------------------------------------------ commands

    def take(self, message: Command | Adopt | CancelCommand | Discard | Budget) -> None:
        if isinstance(message, CancelCommand):
            if message.rid in self.requests:
                self.requests[message.rid].cancelled = True
            return
        if isinstance(message, Discard):
            return  # it keeps no snapshots
        if isinstance(message, Budget):
            self.emit(Within(message.nbytes))  # more than its own, which the seed chose
            return
        try:
            if isinstance(message, Adopt):
                self._adopt(message)
            else:
                self._takers[type(message.request)](message, message.request)
        except StateroomError as error:
            self.emit(Answer(message.rid, error.body()))

    def cancel_all(self) -> None:
        for job in self.requests.values():
            job.cancelled = True

    def _session(self, command: Command) -> Session:
        assert command.session in self.sessions, f"the broker never told of {command.session}"
        return self.sessions[command.session]

    def _idle(self, command: Command) -> Session:
        session = self._session(command)
        busy = [job.rid for job in self.requests.values() if job.session is session]
        assert not busy, f"the broker sent request {command.rid} to a session that {busy} has"
        return session

    def _admit(self, *growths: tuple[View | None, int]) -> None:
        promised = 0
        for job in self.requests.values():
            most = job.most if isinstance(job, Stream) else max(job.most, job.keep + len(job.tokens))
            promised += projected_bytes(job.session.kv, most)
        needed = sum(projected_bytes(view, length) for view, length in growths)
        free = max(self.pool.budget_bytes - self.pool.used_bytes - promised, 0)
        if needed > free:
            raise Capacity(
                f"This needs {needed} bytes of KV and {free} are free.",
                needed_bytes=needed,
                free_bytes=free,
                retry_after_s=RETRY_AFTER_S,
            )

    def _fill(self, fill: Fill) -> None:
        length = fill.keep + len(fill.tokens)
        if length > CONTEXT:
            raise TooLong(f"The context holds {CONTEXT} tokens.", limit=CONTEXT, length=length)
        if fill.tokens and max(fill.tokens) >= VOCAB:
            raise Invalid("A token id is outside the vocabulary.", field="tokens")
        self._admit((fill.session.kv, max(length, fill.most)))
        if fill.opens:
            self.sessions[fill.session.id] = fill.session
        if fill.to_compute:
            self._enter(fill)
        else:
            fill.begin()
            fill.then(fill)

    def _open(self, command: Command, request: p.Open) -> None:
        assert command.session is not None
        background = request.session_class == "background"
        session = Session(command.session, command.owner, background, View(self.pool))

        def then(fill: Fill) -> None:
            result = fill.result()
            receipt = result.receipt if request.tokens or request.text else None
            opened = p.OpenResult(
                session=session.id, length=session.length, caps=CAPS, receipt=receipt, finish=result.finish
            )
            self.emit(Answer(fill.rid, opened, session.journal(0)))

        self._fill(Fill(command.rid, session, 0, given(request), then, opens=True))

    def _then(self, fill: Fill) -> None:
        result = fill.result()
        self.emit(Answer(fill.rid, result, fill.session.journal(min(fill.keep, fill.session.length))))

    def _prefill(self, command: Command, request: p.Prefill) -> None:
        session = self._idle(command)
        tokens = given(request)
        self._fill(Fill(command.rid, session, session.length, tokens, self._then, request.progress))

    def _sync(self, command: Command, request: p.Sync) -> None:
        session = self._idle(command)
        tokens = given(request)
        keep = 0
        for old, new in zip(session.tokens, tokens, strict=False):
            if old != new:
                break
            keep += 1
        self._fill(Fill(command.rid, session, keep, tokens[keep:], self._then))

    def _trim(self, command: Command, request: p.Trim) -> None:
        session = self._idle(command)
        to = request.to if request.to is not None else session.length - (request.count or 0)
        if not 0 <= to <= session.length:
            raise Invalid(f"The session has {session.length} tokens.", field="to" if request.to else "count")
        fill = Fill(command.rid, session, to, [], self._then)
        fill.begin()
        self._then(fill)

    def _decode(self, command: Command, request: p.Decode) -> None:
        session = self._idle(command)
        if not session.length:
            raise Invalid("An empty session can't be decoded.", field="session")
        base = session.length if command.base is None else command.base
        if base >= CONTEXT:
            raise TooLong("The context is full.", limit=CONTEXT, length=session.length)
        stream = Stream(command.rid, session, request, base)
        for token in session.tokens[base:]:  # another worker drew them
            assert stream.finish is None, "a stream was sent on beyond its end"
            stream.took(token)

        def then(fill: Fill) -> None:
            if fill.cancelled or stream.finish is not None:
                self.emit(Answer(command.rid, stream.result(), session.journal(session.length)))
            else:
                self._enter(stream)

        self._fill(Fill(command.rid, session, session.length, [], then, most=stream.most))

    def _fork(self, command: Command, request: p.Fork) -> None:
        session = self._idle(command)
        copied_bytes = self._branch(command, session)
        result = p.ForkResult(
            sessions=command.children,
            length=session.length,
            shared_bytes=session.kv.shared_bytes,
            copied_bytes=copied_bytes,
        )
        self._made(command, session, result)

    def _publish(self, command: Command, request: p.Publish) -> None:
        session = self._idle(command)
        if not session.length:
            raise Invalid("An empty session has nothing to publish.", field="session")
        copied_bytes = self._branch(command, session)
        result = p.PublishResult(
            trunk=command.children[0],
            name=request.name,
            length=session.length,
            shared_bytes=session.kv.shared_bytes,
            copied_bytes=copied_bytes,
        )
        self._made(command, session, result)

    def _branch(self, command: Command, session: Session) -> int:
        """The children of a command, which hold what a session does; gives the bytes that were copied."""
        self._admit(*((None, 0) for _ in command.children))
        before = self.pool.used_bytes
        for child_id in command.children:
            child = Session(child_id, command.owner, session.background, session.kv.branch())
            child.tokens = session.tokens[:]
            self.sessions[child_id] = child
        return max(self.pool.used_bytes - before, 0)

    def _made(self, command: Command, session: Session, result: p.Result) -> None:
        born = [self.sessions[child].journal(session.length) for child in command.children]
        self.emit(Answer(command.rid, result, session.journal(session.length), born))

    def _score(self, command: Command, request: p.Score) -> None:
        session = self._idle(command)
        if not session.length:
            raise Invalid("An empty session predicts nothing.", field="session")
        tokens = given(request)

        def then(fill: Fill) -> None:
            result = p.ScoreResult(tokens=tokens, logprobs=[-1.0] * len(tokens), total=-1.0 * len(tokens))
            self.emit(Answer(fill.rid, result, session.journal(session.length)))

        self._fill(Fill(command.rid, session, session.length, [], then))

    def _adopt(self, command: Adopt) -> None:
        assert command.session not in self.sessions, "a session is adopted twice"
        session = Session(command.session, command.owner, command.background, View(self.pool))
        session.tokens.extend(command.tokens)
        self.sessions[session.id] = session
        receipt = p.Receipt(reused=0, why="adopted")
        result = p.LengthResult(length=session.length, receipt=receipt)
        self.emit(Answer(command.rid, result, session.journal(session.length)))

    def _tokens(self, command: Command, request: p.ReadTokens) -> None:
        session = self._session(command)
        piece = session.tokens[request.start or 0 : request.to].tolist()
        self.emit(Answer(command.rid, p.TokensResult(tokens=piece, text="")))

    def _close(self, command: Command, request: p.Close | p.Unpublish) -> None:
        session = self._idle(command)
        freed = session.kv.private_bytes
        session.kv.trim(0)
        del self.sessions[session.id]
        self.emit(Answer(command.rid, p.CloseResult(freed_bytes=freed)))


def given(request: Any) -> list[int]:
    """The tokens of a request's input."""
    if request.tokens is not None:
        return list(request.tokens)
    return encode(request.text) if request.text else []
