"""Eight sessions of different lengths that come one after the other, against mlx-lm's continuous batching."""

from __future__ import annotations

import threading
import time
from functools import partial

from benchmarks.measurement import Measurement, Tokens, compare, together
from benchmarks.rig import DEMO, Rig, Sides

ROUNDS = 2
LENGTHS = (500, 100, 1000, 250, 800, 150, 900, 350)  # tokens of the prompts
TOKENS = 48  # drawn by each
STAGGER = 4  # session i comes when the first has drawn i times so many
JOIN_S = 300.0
LEAST = 1.3


def run(rig: Rig) -> list[Measurement]:
    sides = rig.sides(DEMO)
    tokens = 36 if rig.quick else TOKENS
    lengths = [n // 10 for n in LENGTHS] if rig.quick else list(LENGTHS)
    prompts = [sides.prompt(n, 97 * i) for i, n in enumerate(lengths)]
    ways = sides.peer.ways()
    ours: list[float] = []
    peer: dict[bool, list[float]] = {switched: [] for switched in ways}
    parts: dict[bool, list[Tokens]] = {switched: [] for switched in ways}
    for i in range(rig.rounds(ROUNDS)):
        mine, seconds = through_daemon(sides, prompts, tokens)
        ours.append(sum(map(len, mine)) / seconds)
        for switched in ways[: 1 if i else None]:  # switched only once: it takes long, and has no goal
            theirs, seconds = sides.peer.batch(prompts, tokens, STAGGER, switched)
            peer[switched].append(sum(map(len, theirs)) / seconds)
            parts[switched].append(compare(mine, theirs, partial(_gap, sides, prompts, mine, theirs)))
    return [
        Measurement(
            claim=f"8 sessions of {min(lengths)}–{max(lengths)} tokens, staggered, {sides.model.name}",
            unit="tokens/s",
            ours=tuple(ours[: len(peer[switched])]),
            peer=tuple(peer[switched]),
            peer_name=f"BatchGenerator{', threads switched' if switched else ''}",
            least_ratio=LEAST if switched is ways[0] else None,
            tokens=together(parts[switched]),
        )
        for switched in ways
    ]


def through_daemon(sides: Sides, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float]:
    """The tokens of each session, and the seconds from the first request to the last token."""
    drawn: list[list[int]] = [[] for _ in prompts]
    ended: list[float] = [0.0] * len(prompts)

    def client(i: int) -> None:
        with sides.room.open(tokens=prompts[i]) as session:
            for event in session.decode(tokens, ignore_eos=True):
                drawn[i].extend(event.tokens)
                if i == 0 and len(drawn[0]) % STAGGER == 0 and len(drawn[0]) // STAGGER < len(prompts):
                    threads[len(drawn[0]) // STAGGER].start()
            ended[i] = time.perf_counter()

    threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(len(prompts))]
    begin = time.perf_counter()
    threads[0].start()
    for thread in threads:
        while thread.ident is None:  # not started by the first yet
            threads[0].join(0.05)
            if not threads[0].is_alive() and thread.ident is None:
                raise RuntimeError("the first session failed before all others had come")
        thread.join(JOIN_S)
    return drawn, max(ended) - begin


def _gap(
    sides: Sides,
    prompts: list[list[int]],
    ours: list[list[int]],
    theirs: list[list[int]],
    sequence: int,
    place: int,
) -> float:
    before = prompts[sequence] + theirs[sequence][:place]
    return sides.peer.gap(before, theirs[sequence][place], ours[sequence][place])
