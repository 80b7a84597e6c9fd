"""One running decode on the host's side: what it drew, the text so far, and when it ends.

A stream may have been begun by another worker, which is gone: what that one drew is in the session behind
`base`, and is read here once more, so that text, stop strings and counts stand as if it had never been.

The device's side, rows and draws, is `batch.py`. A stream learns of a drawn token only after the next
step may have been launched; `Batch` takes care that KV and tokens agree again when it leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from stateroom.client.protocol import Decode, DecodeResult, Finish, Sampling, TokenEvent, TokenLogprob, Usage
from stateroom.daemon.engine.sampling import Row, has_penalty
from stateroom.daemon.engine.session import Session
from stateroom.daemon.engine.speculation.depth import GUESSES_DEFAULT
from stateroom.daemon.engine.speculation.drafter import Drafter, Drafts
from stateroom.daemon.engine.speculation.guesser import Guesser
from stateroom.daemon.engine.speculation.lookup import NOTHING, Draft
from stateroom.daemon.engine.text import Detokenizer, StopStrings, Tokenizer

TOLD_EVERY = 16  # tokens of a decode that isn't streamed, until the broker hears of them
DETOKENIZER_CONTEXT = 8  # tokens before the first drawn one; enough for spacing and a split character


@dataclass(slots=True, eq=False)
class Stream:
    """A decode request from its first draw to its last."""

    rid: int
    session: Session
    request: Decode
    sampling: Sampling
    seed: int
    context: int
    detokenizer: Detokenizer
    stops: StopStrings
    stop_tokens: frozenset[int]
    base: int  # length of the session when it began
    received_ms: float
    started_ms: float
    prefilled: int = 0
    launched: int = 0  # draws launched, at most one more than taken
    told: int = 0  # of what it drew, how much the broker knows
    drawn: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    cancelled: bool = False
    penalised: bool = False
    guesser: Guesser | None = None  # it speculates
    drafter: Drafter | None = None  # a model guesses for it
    guesses_most: int = 0  # of one round
    doubts: bool = False  # a round had no numbers, maybe for a guess that was wrong: a plain step tells
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def begin(
        cls,
        *,
        rid: int,
        session: Session,
        request: Decode,
        seed: int,
        tokenizer: Tokenizer,
        eos: frozenset[int],
        context: int,
        received_ms: float,
        drafter: Drafter | None = None,
        base: int | None = None,
    ) -> Stream:
        """`base`: the session's length when it began, where another worker drew what comes behind it."""
        base = session.length if base is None else base
        sampling = request.sampling or Sampling()
        stop_tokens = frozenset(request.stop_tokens or ())
        made = cls(
            rid=rid,
            session=session,
            request=request,
            sampling=sampling,
            seed=seed if sampling.seed is None else sampling.seed,
            context=context,
            detokenizer=Detokenizer(tokenizer, session.tokens[max(base - DETOKENIZER_CONTEXT, 0) : base]),
            stops=StopStrings(request.stop or []),
            stop_tokens=stop_tokens if request.ignore_eos else stop_tokens | eos,
            base=base,
            received_ms=received_ms,
            started_ms=received_ms,
            penalised=has_penalty(sampling),
            drafter=drafter,
            guesses_most=(request.speculate and request.speculate.max_draft) or GUESSES_DEFAULT,
        )
        made.text.append("".join(map(made._read, session.tokens[base:])))
        made.launched = made.told = len(made.drawn)
        return made

    @property
    def computed(self) -> int:
        """Tokens that had to be computed before it could begin."""
        return self.prefilled - 1

    @property
    def most(self) -> int:
        """The length that the session may come to."""
        return min(self.base + self.request.max_tokens, self.context)

    def has_ended(self) -> bool:
        return self.finish is not None

    @property
    def may_draw(self) -> bool:
        """Whether one more draw can be launched, as far as is known before the last one is read."""
        position = self.base + self.launched
        return (
            self.finish is None
            and not self.cancelled
            and self.launched < self.request.max_tokens
            and position < self.context
        )

    def row(self, last: mx.array | None) -> Row:
        """What the sampler needs for the next draw; `last`: the lazy token not yet taken, shape [1]."""
        history: list[int] = []
        if self.penalised:
            history = self.session.tokens[-self.sampling.repetition_window :]
        return Row(
            sampling=self.sampling,
            seed=self.seed,
            position=self.base + self.launched,
            history=history,
            last=last if self.penalised else None,
            logprobs=self.request.logprobs,
        )

    def room(self, most: int) -> int:
        """How many guesses it can take, so that all of them and one more token can still be drawn."""
        room = min(most, self.guesses_most, self.most - self.session.length - 1)
        if self.drafter is not None:
            room = min(room, self.drafter.context - self.session.length)
        return max(room, 0)

    @property
    def drafts(self) -> Drafts:
        """The drafting model's KV of its session."""
        assert self.guesser is not None
        assert self.drafter is not None
        if self.guesser.drafts is None:
            self.guesser.drafts = self.drafter.begin()
        return self.guesser.drafts

    def take(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None, draft: Draft = NOTHING
    ) -> TokenEvent:
        """Takes drawn tokens into the session, up to the one that is its last: then `finish` is set.

        Of `draft`, which the pass verified, all of them but the last one were right.
        """
        first = len(self.drawn)
        text = ""
        for token in tokens:
            text += self._taken(token)
            if self.finish is not None:
                break
        taken = self.drawn[first:]
        self.text.append(text)
        if self.guesser is not None:
            right = max(len(tokens) - 1, 0)
            self.drafted += len(draft.tokens)
            self.accepted += min(right, len(taken))
            self.guesser.learn(draft, right, taken, self.session.length - len(taken))
            if self.guesser.drafts is not None:
                self.guesser.drafts.cut(self.session.length - 1)
        told = None
        if logprobs is not None:
            told = list(logprobs[: len(taken)])
            self.logprobs += told
        return TokenEvent(tokens=taken, text=text, logprobs=told)

    def untold(self) -> int | None:
        """The length of the session up to which the broker knows it, when it should hear of the rest.

        Of a stream it hears with each event, and at the end in any case. Log-probabilities can't be told
        a second time: where the answer is to have them, another worker has to draw everything again.
        """
        if self.request.stream or self.request.logprobs is not None or self.has_ended():
            return None
        told = self.told
        if len(self.drawn) - told < TOLD_EVERY:
            return None
        self.told = len(self.drawn)
        return self.base + told

    def _taken(self, token: int) -> str:
        """The text that can be told behind one more token."""
        self.session.tokens.append(token)
        return self._read(token)

    def _read(self, token: int) -> str:
        self.drawn.append(token)
        if token in self.stop_tokens:
            self.finish = "stop_token"
            emitted, stopped = self.stops.feed(self.detokenizer.finish())
        else:
            emitted, stopped = self.stops.feed(self.detokenizer.add(token))
            self.finish = self._ended(stopped)
            if self.finish is not None and not stopped:
                rest, stopped = self.stops.feed(self.detokenizer.finish())
                emitted += rest
        if stopped:
            self.finish = "stop"
        elif self.finish is not None:
            emitted += self.stops.finish()
        return emitted

    def _ended(self, stopped: bool) -> Finish | None:
        if stopped:
            return "stop"
        if len(self.drawn) >= self.request.max_tokens:
            return "length"
        if self.base + len(self.drawn) >= self.context:
            return "context"
        if self.cancelled:
            return "cancelled"
        return None

    def result(self, now_ms: float) -> DecodeResult:
        return DecodeResult(
            finish=self.finish or "cancelled",
            tokens=self.drawn,
            text="".join(self.text),
            length=self.session.length,
            usage=Usage(
                decoded=len(self.drawn),
                prefilled=self.prefilled,
                drafted=self.drafted,
                accepted=self.accepted,
                ms=round(now_ms - self.started_ms, 3),
                queue_ms=round(self.started_ms - self.received_ms, 3),
            ),
            logprobs=None if self.request.stream or self.request.logprobs is None else self.logprobs,
        )
