"""Forks of a session in the engine, without daemon and socket. Runs in a process of its own.

python -m benchmarks.forking MODEL TOKENS FORKS CALLS
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import mlx.core as mx

from stateroom.client.protocol import Close, ErrorBody, Fork, ForkResult, Open, Request
from stateroom.daemon.engine.commands import Commands
from stateroom.daemon.engine.engine import Engine
from stateroom.daemon.engine.model import load
from stateroom.daemon.link import Answer, Command, Journals

PARENT = "parent"


class Direct:
    """An engine that is handed its commands here."""

    def __init__(self, engine_of: Any) -> None:
        self.answers: list[Answer] = []
        self.engine: Engine = engine_of(self._emit)
        self.commands = Commands(self.engine)

    def _emit(self, answer: Answer | Journals) -> None:
        if isinstance(answer, Answer):
            self.answers.append(answer)

    def ask(self, request: Request, session: str, children: list[str] | None = None) -> Any:
        """Hands over a request and steps until nothing is left to do; gives the last answer's body."""
        self.commands.take(Command(len(self.answers) + 1, request, session, children or []))
        while self.engine.step():
            pass
        body = self.answers[-1].body
        if isinstance(body, ErrorBody):
            raise RuntimeError(body.message)
        return body


def measure(path: str, tokens: int, forks: int, calls: int) -> dict[str, list[float]]:
    """Of each call its milliseconds, the bytes it says it copied, and those that the device holds more."""
    loaded = load(path)

    def engine(emit: Any) -> Engine:
        return Engine(loaded, clock_ms=lambda: time.monotonic() * 1000.0, emit=emit, report=lambda *_: "")

    direct = Direct(engine)
    direct.ask(Open(tokens=[i % loaded.vocab for i in range(tokens)]), PARENT)
    found: dict[str, list[float]] = {"ms": [], "copied": [], "allocated": []}
    for call in range(calls):
        children = [f"child-{call}-{i}" for i in range(forks)]
        command = Command(-1, Fork(session=PARENT, n=forks), PARENT, children)
        held = mx.get_active_memory()
        begin = time.perf_counter()
        direct.commands.take(command)
        found["ms"].append((time.perf_counter() - begin) * 1000)
        mx.synchronize()
        found["allocated"].append(mx.get_active_memory() - held)
        result = direct.answers[-1].body
        assert isinstance(result, ForkResult), result
        found["copied"].append(result.copied_bytes)
        for child in children:
            direct.ask(Close(session=child), child)
    return found


def main() -> None:
    path, *numbers = sys.argv[1:]
    print(json.dumps(measure(path, *map(int, numbers))))


if __name__ == "__main__":
    main()
