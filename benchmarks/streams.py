"""Streams that draw at once, and when each token came, whoever drew it; ours are read through the client."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from stateroom.client import Session, TokenStream
from stateroom.client.protocol import Speculate


@dataclass(frozen=True)
class Drawn:
    """Tokens of each stream, and the seconds after the first request at which each token came."""

    tokens: list[list[int]]
    times: list[list[float]]

    @property
    def all_s(self) -> float:
        """Until every stream has drawn."""
        return max(times[0] for times in self.times)

    @property
    def tokens_per_s(self) -> float:
        """Of all streams together, from when every one has drawn to the last token."""
        since, until = self.all_s, max(times[-1] for times in self.times)
        return sum(at > since for times in self.times for at in times) / (until - since)


def draw(
    sessions: Sequence[Session], tokens: int, begin: float | None = None, speculate: Speculate | None = None
) -> Drawn:
    """Decodes greedily in all sessions at once. `begin`: when the first request went out, if before these."""
    since = time.perf_counter() if begin is None else begin
    streams = [session.decode(tokens, ignore_eos=True, speculate=speculate) for session in sessions]
    with ThreadPoolExecutor(len(streams)) as readers:
        times = list(readers.map(lambda stream: _read(stream, since), streams))
    return Drawn([stream.tokens for stream in streams], times)


def _read(stream: TokenStream, since: float) -> list[float]:
    times: list[float] = []
    for event in stream:
        times += [time.perf_counter() - since] * len(event.tokens)
    return times
