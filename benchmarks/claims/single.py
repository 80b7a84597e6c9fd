"""One session: prefill and decode through the daemon against `stream_generate` in a process of its own.

The daemon adds its protocol, the engine's loop and a client; it should cost next to nothing. On a CPU the
engine also switches BLAS threads between prefill and decode. What that alone is worth shows where the peer
is measured a second time, with the same switching.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.measurement import Measurement, Tokens, compare, together
from benchmarks.peer import Run
from benchmarks.rig import DEMO, Rig, Sides

from stateroom.client import Session

PEER = "stream_generate"
ROUNDS = 3
TOKENS = 48
SHORT, LONG = 64, 1000  # tokens of the prompts
LEAST = 1.0


def run(rig: Rig) -> list[Measurement]:
    sides = rig.sides(DEMO)
    tokens = 16 if rig.quick else TOKENS
    through_daemon(sides, sides.prompt(SHORT), 4)  # both sides have run once before they are timed
    sides.peer.generate(sides.prompt(SHORT), 4)
    made = []
    for length in (SHORT, LONG):
        rounds = Rounds(sides, sides.prompt(length), tokens, rig.rounds(ROUNDS))
        made += rounds.measurements(f"decode after {length} tokens, {sides.model.name}", _speed)
        if length == LONG:
            claim = f"first token after {length}, {sides.model.name}"
            made += rounds.measurements(claim, _first, lower_is_better=True)[:1]
    return made


def _speed(run: Run) -> tuple[float, str]:
    return run.tokens_per_s, "tokens/s"


def _first(run: Run) -> tuple[float, str]:
    return run.first_s, "s"


class Rounds:
    """Rounds of one prompt: ours, then the peer in each of its ways."""

    def __init__(self, sides: Sides, prompt: list[int], tokens: int, rounds: int) -> None:
        self.ways = sides.peer.ways()
        self.ours: list[Run] = []
        self.peer: dict[bool, list[Run]] = {switched: [] for switched in self.ways}
        for i in range(rounds):
            self.ours.append(through_daemon(sides, prompt, tokens))
            for switched in self.ways[: 1 if i else None]:  # switched only once: it has no goal
                self.peer[switched].append(sides.peer.generate(prompt, tokens, switched))
        self.tokens = {
            switched: together(
                [agreement(sides, prompt, *pair) for pair in zip(self.ours, runs, strict=False)]
            )
            for switched, runs in self.peer.items()
        }

    def measurements(
        self, claim: str, figure: Callable[[Run], tuple[float, str]], lower_is_better: bool = False
    ) -> list[Measurement]:
        """Against each way of the peer."""
        return [
            Measurement(
                claim=claim,
                unit=figure(self.ours[0])[1],
                ours=tuple(figure(run)[0] for run in self.ours[: len(self.peer[switched])]),
                peer=tuple(figure(run)[0] for run in self.peer[switched]),
                peer_name=f"{PEER}{', threads switched' if switched else ''}",
                lower_is_better=lower_is_better,
                least_ratio=LEAST if switched is self.ways[0] else None,
                tokens=self.tokens[switched],
            )
            for switched in self.ways
        ]


def through_daemon(sides: Sides, prompt: list[int], tokens: int) -> Run:
    """A new session, prefilled and decoded, as a client sees it.

    The prompt's last token is fed by the decode, so all the passes that draw are between its request and the
    last event. That is the time taken: the first event can be late where the next ones are not.
    """
    begin = time.perf_counter()
    with sides.room.open(tokens=prompt) as session:
        return drawn(session, tokens, begin)


def drawn(session: Session, tokens: int, begin: float) -> Run:
    """Decodes; `begin` is when the first token began to be waited for."""
    asked, first = time.perf_counter(), 0.0
    made: list[int] = []
    for event in session.decode(tokens, ignore_eos=True):
        first = first or time.perf_counter()
        made.extend(event.tokens)
    return Run(made, first - begin, time.perf_counter() - asked, len(made))


def agreement(sides: Sides, prompt: list[int], ours: Run, theirs: Run) -> Tokens:
    def gap(_: int, place: int) -> float:
        before = prompt + theirs.tokens[:place]
        return sides.peer.gap(before, theirs.tokens[place], ours.tokens[place])

    return compare([ours.tokens], [theirs.tokens], gap)
