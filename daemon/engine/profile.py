"""Where a decode step's time goes: the real worker with timers around its parts, for `stateroom bench`.

`python -m stateroom.daemon.engine.profile MODEL`, started with the environment of a worker, prints one JSON
object. The worker's turns are made as its loop makes them, over a real socket; the other end, here in place
of the broker, sends the commands and reads nothing, so that nobody else runs in this process.

A timer measures its part without the parts inside it, so they add up to the whole. On a CPU mlx computes
while a step is dispatched; on a GPU it does so while it is waited for. Our reads of keys and values are
computed there with the model's own operations, and can't be told from them.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import mlx.core as mx
import typer
import zmq

from stateroom.caches import attention
from stateroom.caches.session import SessionCache
from stateroom.client.protocol import Decode, ErrorBody, Open, Request
from stateroom.daemon.engine import batch, sampling, stream, worker
from stateroom.daemon.engine.commands import Commands
from stateroom.daemon.engine.engine import Engine
from stateroom.daemon.engine.model import LoadedModel, load
from stateroom.daemon.engine.problem import ModelError
from stateroom.daemon.link import Answer, Command, FromWorker, encode_to_worker

WARM_UP = 4  # tokens of each stream before those that count: rows join there, shapes are seen the first time
MARGIN = 4  # tokens that each stream could still draw: no end is timed
Function = TypeVar("Function", bound=Callable[..., Any])

# The parts of a step, in its order.
GRAPH = "building the model's graph"
READS = "building the reads of keys and values"
ROWS = "positions, masks, commits"
SAMPLE = "building the draws"
DISPATCH = "dispatch"
WAIT = "waiting"
READ = "reading draws"
TEXT = "text"
JOURNAL = "journal"
ENCODE = "encoding"
SEND = "sending"
TAKE = "looking for commands"
PULSE = "pulse"
REST = "the loop"
PARTS = (GRAPH, READS, ROWS, SAMPLE, DISPATCH, WAIT, READ, TEXT, JOURNAL, ENCODE, SEND, TAKE, PULSE, REST)


class BenchError(Exception):
    """It could not be measured; the message says why."""


class Timers:
    """Seconds by part, each without what is timed inside it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._clock = clock
        self._inner = [0.0]  # of each part that is running, what the parts inside it took

    def around(self, part: str, function: Function) -> Function:
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = self._clock()
            self._inner.append(0.0)
            try:
                return function(*arguments, **options)
            finally:
                whole = self._clock() - begin
                self.seconds[part] += whole - self._inner.pop()
                self._inner[-1] += whole

        return timed  # type: ignore[return-value]

    def wrap(self, part: str, owner: Any, *names: str) -> None:
        """Puts a timer around functions of a module, methods of a class, or of one object."""
        for name in names:
            setattr(owner, name, self.around(part, getattr(owner, name)))


def install(timers: Timers, engine: Engine, loop: worker.Worker) -> None:
    """Timers around the parts of a step, in all of this process."""
    timers.wrap(TAKE, loop, "_take")
    timers.wrap(PULSE, loop, "_pulse")
    timers.wrap(SEND, loop.socket, "send")
    timers.wrap(GRAPH, type(engine.loaded.model), "__call__")
    for module in attention.install(engine.loaded.model):
        timers.wrap(READS, sys.modules[module], attention.NAME)
    timers.wrap(ROWS, SessionCache, "forward")
    timers.wrap(SAMPLE, batch, "sample")
    timers.wrap(DISPATCH, mx, "async_eval")
    timers.wrap(WAIT, mx, "eval")
    timers.wrap(READ, sampling.Drawn, "read_finite", "read_logprobs")
    timers.wrap(TEXT, stream.Stream, "take")
    timers.wrap(JOURNAL, engine, "journal")
    timers.wrap(ENCODE, worker, "encode_from_worker")
    timers.wrap(REST, engine, "step")


class Link:
    """A socket around whose `send` a timer can be put."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.send = socket.send

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


class Bench:
    """A worker over a socket, whose turns are made one by one, and what it answered."""

    def __init__(self, loaded: LoadedModel, endpoint: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.timers = Timers()
        self.answers: list[Answer] = []
        self._broker, socket = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        for end in (self._broker, socket):
            end.set(zmq.LINGER, 0)
            end.set(zmq.SNDHWM, 0)
            end.set(zmq.RCVHWM, 0)  # nobody reads while a step is timed
        self._broker.bind(endpoint)
        socket.connect(endpoint)
        link = cast("zmq.Socket[bytes]", Link(socket))

        def emit(answer: FromWorker) -> None:
            if isinstance(answer, Answer):
                self.answers.append(answer)
            worker.send(link, answer)

        self._engine = worker.make_engine(loaded, emit, report, None)
        self._worker = worker.Worker(link, Commands(self._engine))
        self._busy = False

    def close(self) -> None:
        self._broker.close()
        self._worker.socket.close()

    def run(self, rows: int, tokens: int, prompt: int, *, timed: bool) -> dict[str, Any]:
        """Decodes so many tokens in so many sessions; gives seconds by part and in all, and the steps.

        Raises:
            BenchError: the engine refused, or a stream ended too soon.
        """
        for i in range(rows):
            ids = [(7 * i + k) % self._engine.loaded.vocab for k in range(prompt)]
            self._tell(Open(tokens=ids), i)
        while len(self.answers) < rows:
            self._turn()
        self._check()
        if timed:
            install(self.timers, self._engine, self._worker)
        most = WARM_UP + tokens + MARGIN
        for i in range(rows):
            self._tell(Decode(session=name_of(i), max_tokens=most, ignore_eos=True), i)
        while len(self.answers) < rows * WARM_UP:
            self._turn()
            self._check()
        self.timers.seconds.clear()
        told, begin = len(self.answers), time.perf_counter()
        for _ in range(tokens):
            self._turn()
        total = time.perf_counter() - begin
        seconds = {part: self.timers.seconds[part] for part in PARTS} if timed else {}
        made = {"seconds": seconds, "total_s": total, "steps": tokens}
        drawn = len(self.answers) - told
        self._check()
        if drawn != rows * tokens:
            raise BenchError(f"{drawn} tokens were drawn in {tokens} steps of {rows} rows.")
        return made | {"rows": rows, "facts": self._engine.loaded.facts}

    def _turn(self) -> None:
        """What `Worker.run` does in a turn."""
        self._worker._take(0 if self._busy else int(worker.PULSE_S * 1000))
        self._busy = self._engine.step()
        self._worker._pulse()

    def _tell(self, request: Request, session: int) -> None:
        self._broker.send(encode_to_worker(Command(len(self.answers) + session, request, name_of(session))))

    def _check(self) -> None:
        for answer in self.answers:
            if isinstance(answer.body, ErrorBody):
                raise BenchError(answer.body.message)


def name_of(session: int) -> str:
    return f"session-{session}"


def report(error: BaseException, rids: Sequence[int] = ()) -> str:
    traceback.print_exception(error)
    return "on stderr"


def main(model: str, rows: int = 1, tokens: int = 64, prompt: int = 128, timed: bool = True) -> None:
    """Prints one JSON object: seconds by part, the seconds of all, the steps, the rows, the model's facts."""
    with tempfile.TemporaryDirectory(prefix="sr-bench-", dir="/tmp") as folder, zmq.Context() as context:
        try:
            bench = Bench(load(model), f"ipc://{Path(folder) / 'link'}", context)
            try:
                made = bench.run(rows, tokens, prompt, timed=timed)
            finally:
                bench.close()
        except (ModelError, BenchError) as error:
            sys.exit(str(error))
    print(json.dumps(made))  # noqa: T201  (this is what the process is for)


if __name__ == "__main__":
    typer.run(main)
