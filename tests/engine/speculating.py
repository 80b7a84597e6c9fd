"""What tests of speculation share: guesses that are told beforehand, and rounds whenever there are any."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tests.engine.harness import Bench

from stateroom.client import protocol as p
from stateroom.daemon.engine.speculation.depth import Costs
from stateroom.daemon.engine.speculation.guesser import Guesser
from stateroom.daemon.engine.speculation.lookup import Draft, Lookup

LOOKUP = p.Speculate(kind="lookup")


class Free(Costs):
    """Wider passes cost nothing, so that guesses are always worth a round."""

    def of(self, rows: int, width: int) -> float:
        return 1.0


class Told(Lookup):
    """Guesses what it was told will follow; each is wrong with some probability."""

    def __init__(self, start: int, tokens: Sequence[int], wrong: float, seed: int, vocab: int) -> None:
        super().__init__()
        self._start, self._tokens, self._wrong, self._vocab = start, tokens, wrong, vocab
        self._random = np.random.default_rng(seed)

    def draft(self, tokens: Sequence[int], most: int) -> Draft:
        at = len(tokens) - self._start
        guesses = [
            int(self._random.integers(self._vocab)) if self._random.random() < self._wrong else token
            for token in self._tokens[at : at + most]
        ]
        return Draft(guesses[: int(self._random.integers(len(guesses) + 1))], 3)


def always(bench: Bench) -> Bench:
    bench.engine.decoding.rounds.costs = bench.engine.decoding.rounds.drafting = Free()
    return bench


def tell(bench: Bench, session: str, tokens: Sequence[int], wrong: float = 0.0, seed: int = 0) -> None:
    """The session's next speculation guesses these."""
    held = bench.session(session)
    lookup = Told(held.length, tokens, wrong, seed, 200)
    held.guesser = Guesser(lookup=lookup)


def events(bench: Bench, rid: int) -> list[p.TokenEvent]:
    return [body for body in bench.bodies[rid] if isinstance(body, p.TokenEvent)]
