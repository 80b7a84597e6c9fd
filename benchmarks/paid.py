"""Streams of a daemon, and the CPU time that its two processes take for them."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
from benchmarks.rig import TEXT
from benchmarks.streams import Drawn, draw

from stateroom.client import Room


@dataclass(frozen=True)
class Paid:
    """What was drawn, and the CPU time of the broker and of the worker meanwhile."""

    drawn: Drawn
    broker_s: float
    worker_s: float


def draw_and_pay(room: Room, streams: int, tokens: int) -> Paid:
    """Decodes so many tokens in each of so many new sessions, whose texts differ."""
    worker = psutil.Process(room.stats().models[0]["pid"])
    broker = worker.parent()
    assert broker is not None
    text = TEXT.read_text(encoding="utf-8")
    sessions = [room.open(text=text[100 * i : 100 * i + 200]) for i in range(streams)]
    before = [_cpu_s(process) for process in (broker, worker)]
    drawn = draw(sessions, tokens)
    took = [_cpu_s(process) - s for process, s in zip((broker, worker), before, strict=True)]
    for session in sessions:
        session.close()
    return Paid(drawn, *took)


def _cpu_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])
