"""A stream that runs while another app's prompt is computed, against `mlx_lm.server` on the same weights.

The gap is the longest time between two pieces of the running stream from the other's request to its first
token; the prefill's speed is the prompt's tokens over that time. Both sides get the same texts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from benchmarks.measurement import TIE_MARGIN, Agreement, Measurement, Tokens, together
from benchmarks.rig import DEMO, TEXT, Rig, Sides
from benchmarks.server import serving

from stateroom.client import Room, connect

ROUNDS = 2
PROMPT = 4000  # tokens of the other app's prompt, about
RUNNING = 64  # tokens of the running stream's prompt, about
RUNNING_MAX = 3000  # tokens it may draw: more than it can while the other waits
BEFORE, AFTER = 8, 8  # pieces of the running stream before the other asks, and after its first token
ASKED = 8  # tokens the other draws
LOOK_S = 0.1  # how often it is seen to that the running stream has not failed
LEAST_GAP, LEAST_SPEED = 10.0, 0.9

Piece = tuple[float, str]  # when it came, and its text


class Answering(Protocol):
    """Ours and theirs: greedy text after a prompt."""

    def stream(self, prompt: str, max_tokens: int) -> Generator[str, None, None]: ...


@dataclass
class Ours:
    room: Room

    def stream(self, prompt: str, max_tokens: int) -> Generator[str, None, None]:
        with self.room.open(text=prompt) as session, session.decode(max_tokens, ignore_eos=True) as stream:
            for event in stream:
                if event.text:
                    yield event.text


@dataclass(frozen=True)
class Scene:
    """What came: both texts; and when, in seconds after the other app's request."""

    running: str
    times: list[float]
    asked: str
    first_s: float

    @property
    def gap_s(self) -> float:
        """The longest time without a piece of the running stream, from the last one before the request."""
        begin = max(at for at in self.times if at <= 0)
        end = min(at for at in self.times if at > self.first_s)
        within = [at for at in self.times if begin <= at <= end]
        return max(b - a for a, b in pairwise(within))


def run(rig: Rig) -> list[Measurement]:
    sides = rig.sides(DEMO)
    length = 200 if rig.quick else PROMPT
    ours: list[Scene] = []
    theirs: list[Scene] = []
    parts: list[Tokens] = []
    sizes: list[int] = []
    folder = rig.folder(DEMO)
    with (
        serving(folder, rig.scratch / "server.log") as server,
        connect(sides.room.endpoint, app="another") as other,
    ):
        for i in range(rig.rounds(ROUNDS)):
            # Another text each time: the server keeps the cache of what it has seen.
            texts = _text(sides, RUNNING, 2 * i), _text(sides, length, 2 * i + 1)
            sizes.append(len(sides.peer.encode(texts[1])))
            ours.append(_play(Ours(sides.room), Ours(other), texts))
            theirs.append(_play(server, server, texts))
            parts += [
                _agreement(sides, texts[0], ours[-1].running, theirs[-1].running),
                _agreement(sides, texts[1], ours[-1].asked, theirs[-1].asked),
            ]
    tokens = together(parts)
    return [
        Measurement(
            claim=f"longest gap of a stream while {length:,} tokens are prefilled",
            unit="s",
            ours=tuple(scene.gap_s for scene in ours),
            peer=tuple(scene.gap_s for scene in theirs),
            peer_name="mlx_lm.server",
            lower_is_better=True,
            least_ratio=LEAST_GAP,
            tokens=tokens,
            series={"ours_s": ours[-1].times, "peer_s": theirs[-1].times, "length": (length,)},
        ),
        Measurement(
            claim=f"prefill of {length:,} tokens beside a stream",
            unit="tokens/s",
            ours=tuple(size / scene.first_s for size, scene in zip(sizes, ours, strict=True)),
            peer=tuple(size / scene.first_s for size, scene in zip(sizes, theirs, strict=True)),
            peer_name="mlx_lm.server",
            least_ratio=LEAST_SPEED,
            tokens=tokens,
        ),
    ]


def _text(sides: Sides, tokens: int, start: int) -> str:
    """About so many tokens of text that begins like no other."""
    text = TEXT.read_text(encoding="utf-8")
    paragraphs = text.split("\n\n")
    text = "\n\n".join(paragraphs[start + 1 :] + paragraphs[: start + 1])
    size = max(1, round(len(text) * tokens / len(sides.peer.encode(text))))
    return (text * (size // len(text) + 1))[:size].rstrip()


def _play(running: Answering, other: Answering, texts: tuple[str, str]) -> Scene:
    """One app's stream runs; then another app asks."""
    going = threading.Event()
    pieces: list[Piece] = []
    asked: list[Piece] = []

    def read() -> None:
        with closing(running.stream(texts[0], RUNNING_MAX)) as stream:
            for text in stream:
                pieces.append((time.perf_counter(), text))
                if len(pieces) == BEFORE:
                    going.set()
                if asked and sum(at > asked[0][0] for at, _ in pieces) >= AFTER:
                    return

    with ThreadPoolExecutor(1) as readers:
        reading = readers.submit(read)
        while not going.wait(LOOK_S) and not reading.done():
            pass
        begin = time.perf_counter()
        for text in other.stream(texts[1], ASKED):
            asked.append((time.perf_counter(), text))
        reading.result()
    if pieces[-1][0] < asked[0][0]:
        raise RuntimeError("the running stream ended before the other app had its first token")
    return Scene(
        running="".join(text for _, text in pieces),
        times=[at - begin for at, _ in pieces],
        asked="".join(text for _, text in asked),
        first_s=asked[0][0] - begin,
    )


def _agreement(sides: Sides, prompt: str, ours: str, theirs: str) -> Tokens:
    """Whether the shorter text begins the longer; else how far ours is from the likeliest where they part.

    mlx-lm leaves out a space that the first token begins with.
    """
    mine, other = ours.lstrip(" "), theirs.lstrip(" ")
    size = min(len(mine), len(other))
    if size and mine[:size] == other[:size]:
        return Tokens(Agreement.EQUAL)
    place = next((i for i in range(size) if mine[i] != other[i]), 0)
    whole = sides.peer.encode(prompt + ours)
    same = sides.peer.encode(prompt + ours[: len(ours) - len(mine) + place])
    at = next((i for i, pair in enumerate(zip(whole, same, strict=False)) if pair[0] != pair[1]), len(same))
    by = sides.peer.short_of_best(whole[:at], whole[at]) if size and at < len(whole) else float("inf")
    note = f"texts part at character {place}: {by:.2g} from the likeliest"
    return Tokens(Agreement.TIES if by <= TIE_MARGIN else Agreement.DIFFER, (note,))
