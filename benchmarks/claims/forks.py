"""Forks of one resident session that decode at once, against `BatchGenerator` over copies of its cache.

The peer has its prompt's cache at hand and copies it into a row for each fork. Both sides draw greedily, so
all forks draw the same. Speed is measured while all draw; what comes before is a figure of its own, from
the first request, ours with the fork itself. Bytes are what is allocated: of ours with what the forks share
with their parent, of the peer without the cache that it keeps for the next time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from benchmarks.measurement import Measurement, Tokens, compare, together
from benchmarks.rig import DEMO, Rig, Sides
from benchmarks.streams import Drawn, draw

from stateroom.client import Session

SHORT, MIDDLE, LONG = 2048, 4096, 6144  # tokens of the session
FORKS = 8
ROUNDS = 2
TOKENS = 64  # drawn by each fork
SERIES = (1, 2, 4, 16)  # numbers of forks for the plot, besides FORKS
SERIES_TOKENS = 24  # drawn there, and by the forks of the long session
CALLS = 5  # of fork over the socket, of which the median counts
LEAST_SHORT, LEAST_LONG, LEAST_SOONER, LEAST_SMALLER = 3.0, 5.0, 5.0, 6.0
PEER = "BatchGenerator, copies"
MIB = 2**20


def run(rig: Rig) -> list[Measurement]:
    sides = rig.sides(DEMO)
    scale = 32 if rig.quick else 1
    short, middle, long = (length // scale for length in (SHORT, MIDDLE, LONG))
    tokens, few = (8, 8) if rig.quick else (TOKENS, SERIES_TOKENS)
    prompt = sides.prompt(long)
    with sides.room.open(tokens=prompt[:short]) as session:
        main = Rounds(sides, session, prompt[:short], FORKS)
        for _ in range(rig.rounds(ROUNDS)):
            main.add(tokens)
        made = [main.speed(LEAST_SHORT), main.sooner(), main.smaller(tokens)]
        for count in SERIES:
            rounds = Rounds(sides, session, prompt[:short], count)
            rounds.add(few)
            made.append(rounds.speed())
        session.prefill(tokens=prompt[short:middle])
        made.append(_over_the_socket(session))
        session.prefill(tokens=prompt[middle:])
        rounds = Rounds(sides, session, prompt, FORKS)
        rounds.add(few)
        made.append(rounds.speed(LEAST_LONG))
    return made


@dataclass
class Rounds:
    """Rounds of so many forks: ours, then the peer."""

    sides: Sides
    session: Session
    prompt: list[int]
    count: int
    ours: list[Drawn] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    peer: list[Drawn] = field(default_factory=list)
    peer_bytes: list[int] = field(default_factory=list)

    def add(self, tokens: int) -> None:
        begin = time.perf_counter()
        children = self.session.fork(self.count)
        self.ours.append(draw(children, tokens, begin))
        infos = [child.info() for child in children]
        self.bytes.append(sum(i.private_bytes for i in infos) + max(i.shared_bytes for i in infos))
        for child in children:
            child.close()
        theirs, nbytes = self.sides.peer.forks(self.prompt, self.count, tokens)
        self.peer.append(theirs)
        self.peer_bytes.append(nbytes)

    def speed(self, least: float | None = None) -> Measurement:
        """While all draw."""
        return Measurement(
            claim=f"{self._forks} of {len(self.prompt):,} tokens, {self.sides.model.name}",
            unit="tokens/s",
            ours=tuple(drawn.tokens_per_s for drawn in self.ours),
            peer=tuple(drawn.tokens_per_s for drawn in self.peer),
            peer_name=PEER,
            least_ratio=least,
            tokens=self._agreement(),
            series={"forks": (self.count,), "length": (len(self.prompt),)},
        )

    def sooner(self) -> Measurement:
        return Measurement(
            claim=f"until all {self._forks} decode, of {len(self.prompt):,} tokens",
            unit="s",
            ours=tuple(drawn.all_s for drawn in self.ours),
            peer=tuple(drawn.all_s for drawn in self.peer),
            peer_name=PEER,
            lower_is_better=True,
            least_ratio=LEAST_SOONER,
            tokens=self._agreement(),
        )

    def smaller(self, tokens: int) -> Measurement:
        return Measurement(
            claim=f"KV of {self._forks} of {len(self.prompt):,}, after {tokens} tokens each",
            unit="MiB",
            ours=tuple(nbytes / MIB for nbytes in self.bytes),
            peer=tuple(nbytes / MIB for nbytes in self.peer_bytes),
            peer_name=PEER,
            lower_is_better=True,
            least_ratio=LEAST_SMALLER,
        )

    @property
    def _forks(self) -> str:
        return "1 fork" if self.count == 1 else f"{self.count} forks"

    def _agreement(self) -> Tokens:
        return together(list(map(self._compare, self.ours, self.peer)))

    def _compare(self, ours: Drawn, theirs: Drawn) -> Tokens:
        def gap(sequence: int, place: int) -> float:
            before, mine = theirs.tokens[sequence], ours.tokens[sequence]
            return self.sides.peer.gap(self.prompt + before[:place], before[place], mine[place])

        return compare(ours.tokens, theirs.tokens, gap)


def _over_the_socket(session: Session) -> Measurement:
    taken = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        children = session.fork(FORKS)
        taken.append((time.perf_counter() - begin) * 1000)
        for child in children:
            child.close()
    return Measurement(
        claim=f"fork({FORKS}) of {session.length:,} tokens, over the socket", unit="ms", ours=tuple(taken)
    )
