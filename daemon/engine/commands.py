"""What each command means to the engine: check, plan, then queue or answer. Nothing is half done.

A handler raises a `StateroomError` before it changes anything, or changes and answers. The broker has
validated types and ranges, and lets one request at a time have a session; what only the engine can
know (vocabulary, context, cache kinds, budget) is checked here.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx

from stateroom.client import protocol as p
from stateroom.client.errors import Busy, Exists, Invalid, NotFound, TooLong, Unsupported
from stateroom.daemon.engine import inputs
from stateroom.daemon.engine.decoding import without_numbers
from stateroom.daemon.engine.doing import Doings
from stateroom.daemon.engine.engine import Engine
from stateroom.daemon.engine.fill import Fill
from stateroom.daemon.engine.filling import Work
from stateroom.daemon.engine.ladder import Waiter
from stateroom.daemon.engine.memory import STEP, NoRoom
from stateroom.daemon.engine.sampling import check as check_sampling
from stateroom.daemon.engine.score import Score
from stateroom.daemon.engine.session import Change, Session, apply, common_prefix, plan
from stateroom.daemon.engine.snapshots import Snapshots
from stateroom.daemon.engine.stream import Stream
from stateroom.daemon.engine.verify import CANCELLED, begin_verify
from stateroom.daemon.link import Adopt, Budget, CancelCommand, ChatTurn, Command, Discard


class Commands:
    """Takes the broker's messages to an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.loaded = engine.loaded
        self.snapshots = Snapshots(engine)
        self.doings = Doings(engine, self.snapshots)
        self._given_up: int | None = None  # the command that is being ended without having begun
        self._handlers: dict[type[p.Request], Callable[[Command, Any], None]] = {
            p.Open: self._open,
            p.Prefill: self._prefill,
            p.Decode: self._decode,
            p.Trim: self._trim,
            p.Fork: self._fork,
            p.Publish: self._publish,
            p.Sync: self._sync,
            p.ReadTokens: self._tokens,
            p.Close: self._close,
            p.Unpublish: self._close,
            p.Score: self._score,
            p.Verify: self._verify,
            p.Park: self._park,
            p.Save: self._save,
            p.Restore: self.snapshots.restore,
            p.Import: self.snapshots.take_in,
        }

    def take(self, message: Command | Adopt | CancelCommand | Budget | Discard) -> None:
        """Carries out one message; every error becomes the command's final answer.

        One that is refused for want of memory may be held, and taken again from its start.
        """
        if isinstance(message, CancelCommand):
            self.engine.cancel(message.rid)
            self.snapshots.cancel(message.rid)
        elif isinstance(message, Budget):
            self.engine.ladder.limit(message.nbytes, message.most)
        elif isinstance(message, Discard):
            self.snapshots.discard(message)
        else:
            self._take(message)

    def _take(self, command: Command | Adopt) -> None:
        rid, session = command.rid, self.engine.sessions.get(command.session or "")
        op = "adopt" if isinstance(command, Adopt) else command.request.op
        self.engine.recorder.taken(rid, op, self.engine.clock_ms())
        if not _picked(command):
            self.engine.touch(session)
        again, give_up = partial(self._carry_out, command), partial(self._give_up, command)
        try:
            again()
        except NoRoom as refusal:
            self.engine.ladder.hold(
                Waiter(rid, session, again, give_up, partial(self.engine.fail, rid)), refusal
            )
        except Exception as error:
            self.engine.fail(rid, error)

    def _carry_out(self, command: Command | Adopt) -> None:
        if isinstance(command, Adopt):
            self._adopt(command)
        else:
            self._handlers[type(command.request)](command, command.request)

    def _give_up(self, command: Command | Adopt) -> None:
        """Ends a command that was cancelled before it could begin, as any other; that needs no room."""
        self._given_up = command.rid
        try:
            self._carry_out(command)
        except Exception as error:
            self.engine.fail(command.rid, error)
        finally:
            self._given_up = None
        self.engine.cancel(command.rid)

    # ------------------------------------------------------------ checks

    def _session(self, command: Command) -> Session:
        session = self.engine.sessions.get(command.session or "")
        if session is None:
            raise NotFound("There is no such session.", field="session")
        return session

    def _idle_session(self, command: Command) -> Session:
        session = self._session(command)
        if self.engine.disk is not None:
            self.engine.disk.let_go(session)
        for request in self.engine.requests.values():
            if request.session is session:
                raise Busy("The session has another request running.", request=request.rid)
        if self.engine.ladder.holds(session):
            raise Busy("The session has a request that waits for memory.")
        return session

    def _begin(self, fill: Fill) -> None:
        fill.cancelled = fill.rid == self._given_up
        self.engine.sharing.begin(fill)

    # ------------------------------------------------------------ opening, content

    def _open(self, command: Command, request: p.Open) -> None:
        assert command.session is not None
        if command.session in self.engine.sessions:
            raise Exists("A session of this id exists.", field="session")
        served = self.engine.schemes.of(request.kv)
        tokens = inputs.whole(self.loaded, request)
        inputs.check_length(len(tokens), self.loaded.context)
        session = Session(
            command.session, served, command.owner, background=request.session_class == "background"
        )
        self.engine.sharing.enter(session)
        fill = Fill(
            command.rid,
            session,
            plan(session, 0, tokens),
            self._opened(request),
            self.engine.clock_ms(),
            opens=True,
        )
        try:
            self._begin(fill)
        except Exception:
            self.engine.sharing.leave(session)
            raise

    def _opened(self, request: p.Open) -> Callable[[Fill], None]:
        def then(fill: Fill) -> None:
            session, engine = fill.session, self.engine
            cancelled = fill.cancelled and not fill.done
            if cancelled:
                fill.end_cancelled()
            elif request.messages:
                session.chat = [ChatTurn(request.messages, session.length)]
            result = p.OpenResult(
                session=session.id,
                length=session.length,
                caps=replace(session.served.caps, trim_floor=session.trim_floor),
                receipt=fill.receipt(engine.clock_ms()) if inputs.has_input(request) else None,
                finish="cancelled" if cancelled else "done",
            )
            engine.answer(fill.rid, result, engine.journal(session, 0))

        return then

    def _prefill(self, command: Command, request: p.Prefill) -> None:
        session = self._idle_session(command)
        tokens, added = inputs.appended(self.loaded, session, request)
        inputs.check_length(session.length + len(tokens), self.loaded.context)
        if not tokens and not session.missing:  # else what is missing is computed, as by any operation
            self.engine.unchanged(command.rid, session)
            return
        self._change(
            command, session, plan(session, session.length, tokens), added, progress=request.progress
        )

    def _sync(self, command: Command, request: p.Sync) -> None:
        session = self._idle_session(command)
        tokens = inputs.whole(self.loaded, request)
        inputs.check_length(len(tokens), self.loaded.context)
        keep = common_prefix(session.tokens, tokens)
        change = plan(session, keep, tokens[keep:])
        self._change(command, session, change, request.messages or [], whole_chat=True)

    def _change(
        self,
        command: Command,
        session: Session,
        change: Change,
        messages: list[p.Message],
        *,
        progress: bool = False,
        whole_chat: bool = False,
    ) -> None:
        def then(fill: Fill) -> None:
            if messages and not (fill.cancelled and not fill.done):
                told = [] if whole_chat else session.chat
                start = 0 if whole_chat else change.keep
                session.chat = [*told, ChatTurn(messages, session.length, start)]
            self.engine.finish_fill(fill)

        now_ms = self.engine.clock_ms()
        fill = Fill(command.rid, session, change, then, now_ms, progress=progress, chat=bool(messages))
        self._begin(fill)

    def _trim(self, command: Command, request: p.Trim) -> None:
        session = self._idle_session(command)
        if request.to is not None:
            to, field = request.to, "to"
        else:
            to, field = session.length - (request.count or 0), "count"
        if not 0 <= to <= session.length:
            raise Invalid(
                f"The session has {session.length} tokens; it can't be trimmed to {to}.", field=field
            )
        change = plan(session, to, [])
        must_replay = change.kv_keep < min(session.stored, max(to - 1, 0))
        if must_replay and not request.replay:
            replayed = to - change.kv_keep
            raise Unsupported(
                f"This session's layers can't be trimmed to {to} tokens; replay: true computes the last "
                f"{replayed} of them again.",
                nearest=session.nearest(to),
                replayed=replayed,
            )
        if request.replay:
            self._change(command, session, change, [])
            return
        fill = Fill(command.rid, session, change, self.engine.finish_fill, self.engine.clock_ms())
        fill.start(self.engine.clock_ms())
        self.engine.finish_fill(fill)

    def _adopt(self, command: Adopt) -> None:
        inputs.check_tokens(command.tokens, self.loaded.vocab)
        session = self.engine.sessions.get(command.session)
        if session is None:
            served = self.engine.schemes.of(command.kv)
            session = Session(command.session, served, command.owner)
            session.trunk, session.trunk_length = command.trunk, command.trunk_length
            self.engine.sharing.enter(session)
        session.background = command.background
        apply(session, Change(0, 0, command.tokens, None))
        session.chat = session.chat_told = list(command.chat)
        if self.engine.disk is not None:
            self.engine.disk.adopted(session, command.snapshot)
        self.engine.unchanged(command.rid, session)

    # ------------------------------------------------------------ decode, fork, score

    def _decode(self, command: Command, request: p.Decode) -> None:
        session = self._idle_session(command)
        if request.speculate is not None and not session.served.caps.speculative:
            raise Unsupported(
                "This model has layers that can't take back single tokens, so guesses can't be verified.",
                field="speculate",
            )
        if request.grammar is not None:
            raise Unsupported("Grammars are not served yet.", field="grammar")
        if not session.tokens:
            raise Invalid("An empty session can't be decoded; prefill something first.", field="session")
        base = session.length if command.base is None else command.base
        if base >= self.loaded.context:
            raise TooLong(
                f"The session fills the model's context of {self.loaded.context} tokens.",
                limit=self.loaded.context,
                length=session.length,
            )
        check_sampling(request.sampling or p.Sampling(), self.loaded.vocab, request.stop_tokens)
        drafter = None
        if request.speculate is not None and request.speculate.model is not None:
            drafter = self.engine.drafter(request.speculate.model)
        received = self.engine.clock_ms()
        stream = Stream.begin(
            rid=command.rid,
            session=session,
            request=request,
            seed=secrets.randbits(64),
            tokenizer=self.loaded.tokenizer,
            eos=self.loaded.eos,
            context=self.loaded.context,
            received_ms=received,
            drafter=drafter,
            base=base,
        )
        if stream.has_ended():  # a worker that is gone drew its last token, and nobody heard that it was
            self._answer_stream(stream)
            return
        most, beside = stream.most, 0
        if drafter is not None:
            drafts = session.guesser.drafts if session.guesser is not None else None
            beside = max(drafter.projected_bytes(most) - (drafts.nbytes if drafts is not None else 0), 0)
        if not session.missing and command.rid != self._given_up:
            self.engine.memory.admit(session.served, (session, most), at_once=STEP, beside=beside)

        def begin(started_ms: float, computed: int) -> None:
            stream.started_ms, stream.prefilled = started_ms, computed + 1
            if request.speculate is not None:
                stream.guesser = self.engine.decoding.guessers.of(session)
            self.engine.decoding.begin(stream)

        def then(fill: Fill) -> None:
            if fill.cancelled:
                self._answer_stream(stream)
            else:
                begin(fill.started_ms if fill.started_ms is not None else received, fill.computed)

        if not session.missing:
            begin(received, 0)
        else:
            # The content is as it was; only KV that was dropped is computed again.
            change = plan(session, session.length, [])
            fill = Fill(command.rid, session, change, then, received, most=most, beside=beside)
            self._begin(fill)

    def _answer_stream(self, stream: Stream) -> None:
        """The result of one that computed nothing here."""
        session, result = stream.session, stream.result(self.engine.clock_ms())
        self.engine.answer(stream.rid, result, self.engine.journal(session, session.length))

    def _fork(self, command: Command, request: p.Fork) -> None:
        session = self._idle_session(command)
        children = self._children(command, session)
        result = p.ForkResult(
            sessions=[child.id for child in children],
            length=session.length,
            shared_bytes=self.engine.memory.told(session).shared,
            copied_bytes=sum(child.kv_bytes for child in children),
        )
        self.engine.answer(command.rid, result, self.engine.journal(session, session.length), children)

    def _publish(self, command: Command, request: p.Publish) -> None:
        """A session that nobody decodes, so that what it shares stays as it is."""
        session = self._idle_session(command)
        if not session.tokens:
            raise Invalid(
                "An empty session has nothing to publish; prefill something first.", field="session"
            )
        (trunk,) = self._children(command, session)
        result = p.PublishResult(
            trunk=trunk.id,
            name=request.name,
            length=session.length,
            shared_bytes=self.engine.memory.told(session).shared,
            copied_bytes=trunk.kv_bytes,
        )
        self.engine.answer(command.rid, result, self.engine.journal(session, session.length), [trunk])

    def _children(self, command: Command, session: Session) -> list[Session]:
        """The sessions of a command's `children`, which hold what a session does."""
        cache, n = session.cache, len(command.children)
        shares = session.served.caps.fork == "shared"
        if cache is not None and shares:
            self.engine.memory.admit_bytes(n * cache.branch_bytes(self.engine.shared_min))
        else:
            self.engine.memory.admit(session.served, *((None, session.length) for _ in command.children))
        children = []
        for child_id in command.children:
            child = Session(child_id, session.served, command.owner, session.background, list(session.tokens))
            child.trunk, child.trunk_length = session.trunk, session.trunk_length
            if isinstance(command.request, p.Publish):
                child.trunk, child.trunk_length = child_id, session.length
            elif session.trunk == session.id:
                child.background = False  # whatever the one was that was published
            if cache is not None:
                child.cache = self.engine.sharing.branched(session.served, cache)
                child.stored, child.trail = session.stored, session.trail.copy()
                mx.async_eval(child.cache.arrays())
            child.chat = child.chat_told = list(session.chat)
            child.origin = "fork"
            child.replaced = session.replaced
            child.quantised_told = session.quantised_told
            children.append(child)
        for child in children:
            self.engine.sharing.enter(child, session)
        self.engine.memory.changed(session)
        return children

    def _score(self, command: Command, request: p.Score) -> None:
        session = self._idle_session(command)
        if not session.tokens:
            raise Invalid("An empty session has nothing that predicts the continuation.", field="session")
        tokens = request.tokens
        if tokens is None:
            tokens = self.loaded.tokenizer.encode(request.text or "", first=False)
        inputs.check_tokens(tokens, self.loaded.vocab)
        inputs.check_length(session.length + len(tokens), self.loaded.context)
        if command.rid != self._given_up:
            self.engine.memory.admit(session.served, (None, session.length + len(tokens)))
        if not tokens:
            self.engine.answer(command.rid, p.ScoreResult(tokens=[], logprobs=[], total=0.0))
            return
        score = Score(command.rid, session, tokens, self._scored, self.engine.clock_ms())

        def then(fill: Fill) -> None:
            score.cancelled = fill.cancelled
            self.engine.filling.begin(score)

        fill = Fill(command.rid, session, plan(session, session.length, []), then, self.engine.clock_ms())
        self._begin(fill)

    def _scored(self, work: Work) -> None:
        assert isinstance(work, Score)
        engine, session = self.engine, work.session
        if not all(map(math.isfinite, work.logprobs)):
            raise without_numbers(session)
        # A cancelled score tells what it had; the list is then shorter than the continuation.
        engine.answer(work.rid, work.result(), engine.journal(session, session.length))

    def _verify(self, command: Command, request: p.Verify) -> None:
        picked = _picked(command)
        session = self._session(command) if picked else self._idle_session(command)
        if command.rid == self._given_up:
            self.engine.answer(command.rid, CANCELLED)
        else:
            begin_verify(self.engine, command.rid, session, command.owner, picked=picked)

    # ------------------------------------------------------------ disk

    def _park(self, command: Command, request: p.Park) -> None:
        self.snapshots.park(command.rid, self._idle_session(command))

    def _save(self, command: Command, request: p.Save) -> None:
        self.snapshots.save(command, request, self._idle_session(command), self._begin)

    # ------------------------------------------------------------ reading, closing

    def _tokens(self, command: Command, request: p.ReadTokens) -> None:
        session = self._session(command)
        start = request.start or 0
        to = session.length if request.to is None else request.to
        if to > session.length:
            raise Invalid(f"The session has {session.length} tokens.", field="to")
        if start > to:
            raise Invalid(f"from ({start}) must not be greater than to ({to}).", field="from")
        piece = session.tokens[start:to]
        result = p.TokensResult(tokens=piece, text=self.loaded.tokenizer.decode(piece, first=start == 0))
        self.engine.answer(command.rid, result)

    def _close(self, command: Command, request: p.Close) -> None:
        session = self._idle_session(command)
        freed = self.engine.memory.told(session).private
        self.engine.decoding.guessers.forget(session)
        self.engine.sharing.leave(session)
        self.engine.answer(command.rid, p.CloseResult(freed_bytes=freed))


def _picked(command: Command | Adopt) -> bool:
    """The broker only looks at the session, by itself: that is no use of it."""
    return (
        isinstance(command, Command) and isinstance(command.request, p.Verify) and not command.request.session
    )
