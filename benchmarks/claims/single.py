"""One session: prefill and decode through the daemon against `stream_generate` in a process of its own.

The daemon adds its protocol, the engine's loop and a client; it should cost next to nothing.
"""

from __future__ import annotations

import time

from benchmarks.measurement import Measurement, Tokens, compare, together
from benchmarks.peer import Run
from benchmarks.rig import DEMO, Rig, Sides

from stateroom.client import Session

PEER = "stream_generate"
ROUNDS = 3
TOKENS = 64
SHORT, LONG = 64, 1000  # tokens of the prompts
LEAST = 0.97


def run(rig: Rig) -> list[Measurement]:
    sides = rig.sides(DEMO)
    tokens = 16 if rig.quick else TOKENS
    short = _rounds(sides, sides.prompt(SHORT), tokens, rig.rounds(ROUNDS))
    long = _rounds(sides, sides.prompt(LONG), tokens, rig.rounds(ROUNDS))
    return [
        _decode(f"decode after {SHORT} tokens, {sides.model.name}", short),
        _decode(f"decode after {LONG} tokens, {sides.model.name}", long),
        Measurement(
            claim=f"first token after {LONG}, {sides.model.name}",
            unit="s",
            ours=tuple(run.first_s for run, _ in long[0]),
            peer=tuple(run.first_s for _, run in long[0]),
            peer_name=PEER,
            lower_is_better=True,
            least_ratio=LEAST,
            tokens=long[1],
        ),
    ]


Rounds = tuple[list[tuple[Run, Run]], Tokens]


def _decode(claim: str, rounds: Rounds) -> Measurement:
    return Measurement(
        claim=claim,
        unit="tokens/s",
        ours=tuple(run.tokens_per_s for run, _ in rounds[0]),
        peer=tuple(run.tokens_per_s for _, run in rounds[0]),
        peer_name=PEER,
        least_ratio=LEAST,
        tokens=rounds[1],
    )


def _rounds(sides: Sides, prompt: list[int], tokens: int, rounds: int) -> Rounds:
    through_daemon(sides, prompt[:SHORT], 4)  # both sides have run once before they are timed
    sides.peer.generate(prompt[:SHORT], 4)
    pairs = [
        (through_daemon(sides, prompt, tokens), sides.peer.generate(prompt, tokens)) for _ in range(rounds)
    ]
    return pairs, together([agreement(sides, prompt, ours, theirs) for ours, theirs in pairs])


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
