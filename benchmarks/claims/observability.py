"""What it costs to be looked at: a daemon while all who may look do, and the same daemon while nobody does.

The page for Prometheus is scraped each second; two `watch` hear figures each second; sessions, requests and
figures are asked for each second, as `top` does. One daemon, by turns: two of a kind differ by more than what
is measured here. What the worker records of its steps can't be switched in a daemon that runs: it is measured
in an engine by itself, a few steps with, a few without.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from statistics import median

from benchmarks.measurement import Measurement, compare
from benchmarks.observers import observers, turned
from benchmarks.paid import draw_and_pay
from benchmarks.rig import DEMO, TOY, Model, Rig

from stateroom.client import Room
from stateroom.daemon.blas import find_blas, preloaded

STREAMS = 4
ROUNDS = 12  # each of some seconds: several looks fall into it
TOKENS = {DEMO: 48, TOY: 1200}  # drawn by each stream
RECORDED = {DEMO: 400, TOY: 2000}  # the same, in the engine by itself
LEAST = 0.99  # of the speed
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Round:
    """`cpu_ms`: CPU time of broker and worker for each token; `broker_ms`: the broker's part of it."""

    tokens: list[list[int]]
    tokens_per_s: float
    cpu_ms: float
    broker_ms: float


def run(rig: Rig) -> list[Measurement]:
    models = [TOY] if rig.quick else [DEMO, TOY]
    return [made for model in models for made in (*_looked_at(rig, model), _recorded(rig, model))]


def _looked_at(rig: Rig, model: Model) -> list[Measurement]:
    tokens, port = 100 if rig.quick else TOKENS[model], _free_port()
    on: list[Round] = []
    off: list[Round] = []
    with (
        rig.daemon(rig.path(model), "--metrics-port", str(port)) as room,
        observers(room.endpoint, port) as process,
    ):
        _round(room, tokens)  # warms up
        for number in range(rig.rounds(ROUNDS)):
            for looked_at in (number % 2 == 0, number % 2 == 1):
                if looked_at:
                    on.append(_observed(room, process, tokens))
                else:
                    off.append(_round(room, tokens))
    same = compare(
        [drawn for each in on for drawn in each.tokens],
        [drawn for each in off for drawn in each.tokens],
        lambda *_: float("inf"),
    )
    # Of a toy, whose tokens cost next to nothing, it is the worst case.
    goal = LEAST if model == DEMO else None
    claim, nobody = f"{STREAMS} streams, looked at in every way, {model.name}", "nobody looks"
    return [
        Measurement(
            claim=claim,
            unit="tokens/s",
            ours=tuple(each.tokens_per_s for each in on),
            peer=tuple(each.tokens_per_s for each in off),
            peer_name=nobody,
            least_ratio=goal,
            tokens=same,
        ),
        Measurement(
            claim=f"CPU time of broker and worker for a token of it, {model.name}",
            unit="ms",
            ours=tuple(each.cpu_ms for each in on),
            peer=tuple(each.cpu_ms for each in off),
            peer_name=nobody,
            lower_is_better=True,
            least_ratio=goal,
            tokens=same,
        ),
        Measurement(
            claim=f"CPU time that it takes of the broker, of all that a token takes, {model.name}",
            unit="%",
            ours=tuple(100 * (a.broker_ms - b.broker_ms) / b.cpu_ms for a, b in zip(on, off, strict=True)),
            most=None if goal is None else 100 * (1 - LEAST),
            tokens=same,
        ),
    ]


def _recorded(rig: Rig, model: Model) -> Measurement:
    tokens = 100 if rig.quick else RECORDED[model]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.recording", str(rig.path(model)), str(STREAMS), str(tokens)],
        env=preloaded(os.environ, find_blas().library),
        stdout=subprocess.PIPE,
        timeout=TIMEOUT_S,
        check=True,
    )
    runs = json.loads(done.stdout)
    # Of each run, what is typical: single blocks are as long as whatever else ran beside them.
    return Measurement(
        claim=f"a step of {STREAMS} streams that is recorded, {model.name}",
        unit="ms",
        ours=tuple(median(run["on"]) for run in runs),
        peer=tuple(median(run["off"]) for run in runs),
        peer_name="not recorded",
        lower_is_better=True,
        least_ratio=LEAST if model == DEMO else None,
        tokens=compare(runs[0]["tokens"], runs[1]["tokens"], lambda *_: float("inf")),
    )


def _observed(room: Room, process: subprocess.Popen[str], tokens: int) -> Round:
    """Raises RuntimeError: the observers saw nothing."""
    turned(process)
    made = _round(room, tokens)
    seen = turned(process)
    if not (seen.scrapes and seen.looks and seen.events):
        raise RuntimeError(f"the observers saw nothing: {seen}")
    return made


def _round(room: Room, tokens: int) -> Round:
    paid = draw_and_pay(room, STREAMS, tokens)
    cpu_s = (paid.broker_s + paid.worker_s, paid.broker_s)
    cpu_ms, broker_ms = (1000 * seconds / (STREAMS * tokens) for seconds in cpu_s)
    return Round(paid.drawn.tokens, paid.drawn.tokens_per_s, cpu_ms, broker_ms)


def _free_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
