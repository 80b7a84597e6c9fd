"""A launched step of a batch, and what it brought each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from stateroom.client.protocol import TokenLogprob
from stateroom.daemon.engine.sampling import Drawn
from stateroom.daemon.engine.speculation.lookup import NOTHING, Draft
from stateroom.daemon.engine.speculation.verify import taken
from stateroom.daemon.engine.stream import Stream


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step: whose draws it holds, in the order of its rows.

    `guesses`: what each row guessed, in a round; then KV of all of that is in the batch until the round ends.
    """

    members: tuple[Stream, ...]
    drawn: Drawn
    launched_ms: float
    guesses: tuple[Draft, ...] = ()

    @property
    def width(self) -> int:
        """Tokens that were fed to each row."""
        return 1 + max((len(draft.tokens) for draft in self.guesses), default=0)

    def read(self) -> list[Landed]:
        """What was drawn for each row. Waits for the device."""
        mx.eval(self.drawn.arrays())
        tokens = cast("list[int]", self.drawn.tokens.tolist())
        finite = self.drawn.read_finite()
        logprobs = self.drawn.read_logprobs()
        landed = []
        start = 0
        for draft in self.guesses or (NOTHING,) * len(self.members):
            draws = slice(start, start + 1 + len(draft.tokens))
            start = draws.stop
            drawn = taken(tokens[draws], draft.tokens)
            good = next((i for i, sound in enumerate(finite[draws][: len(drawn)]) if not sound), len(drawn))
            told = [logprobs[i] for i in range(draws.start, draws.start + good) if i in logprobs]
            landed.append(Landed(drawn[:good], good == len(drawn), told or None, draft))
        return landed


@dataclass(frozen=True, slots=True)
class Landed:
    """What a step brought a row: the tokens drawn, up to where logits weren't `finite`."""

    tokens: list[int]
    finite: bool
    logprobs: list[TokenLogprob] | None
    draft: Draft
