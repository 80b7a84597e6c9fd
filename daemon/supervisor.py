"""Engine workers: one process for each loaded model, started, watched, ended, started again.

A process is spawned afresh (never forked) with a link socket of its own, whose name holds its generation;
so nothing of a dead worker can reach its successor. Its stdin is a pipe that closes when the broker is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

import zmq
from structlog.typing import FilteringBoundLogger

from stateroom.client.errors import EngineLost, Unsupported
from stateroom.client.limits import BATCH_MAX
from stateroom.client.protocol import ModelInfo
from stateroom.daemon.blas import Blas, preloaded
from stateroom.daemon.clock import Clock
from stateroom.daemon.config import Config, ModelSpec
from stateroom.daemon.lifecycle import ENGINES, EngineEvent, EngineState, after
from stateroom.daemon.link import (
    Answer,
    Command,
    Doing,
    Failed,
    FromWorker,
    Journals,
    Kept,
    Pulse,
    Ready,
    Recorded,
    Shelved,
    Short,
    Stop,
    ToWorker,
    Within,
    decode_from_worker,
    encode_to_worker,
)
from stateroom.daemon.logs import LEVELS
from stateroom.daemon.memory import Memory
from stateroom.daemon.metrics import Metrics
from stateroom.daemon.sockets import LinkSocket
from stateroom.daemon.timings import Histogram, histograms

LINE_BYTES_MAX = 8_192  # of what a worker writes to stderr; a longer line is broken up
LAST_LINES = 40  # of a dead worker's stderr that go with the news of its death
OF_OWNER = "device_ms."  # with the owner's name behind it: a gauge that is told to that one
DRAIN_S = 0.05  # after its death, for what it said last to arrive


class Listener(Protocol):
    """Whom the supervisor tells: `work.Work`, and a recorder in tests."""

    def on_kept(self, engine: Engine, kept: list[Kept], broken: list[str]) -> None: ...  # before `on_ready`
    def on_ready(self, engine: Engine) -> None: ...
    def on_shelved(self, engine: Engine, shelved: Shelved) -> None: ...
    def on_answer(self, engine: Engine, answer: Answer) -> None: ...
    def on_journals(self, engine: Engine, journals: Journals) -> None: ...
    def on_down(self, engine: Engine, generation: int, reason: str) -> None: ...
    def on_failed(self, engine: Engine, message: str) -> None: ...
    def on_silent(self, engine: Engine, silent_s: float) -> None: ...
    def on_doing(self, engine: Engine, doing: list[Doing]) -> None: ...


class Engine:
    """One model and its worker process, if it has one now."""

    def __init__(self, spec: ModelSpec, supervisor: Supervisor) -> None:
        self.spec = spec
        self.state = EngineState.STOPPED
        self.generation = -1  # of the process there is, or that there was last
        self.known: ModelInfo | None = None  # what the last worker said of the model
        self.facts: dict[str, Any] = {}
        self.gauges: dict[str, float] = {}
        self.timings: dict[str, Histogram] = {}  # as its last pulse told them
        self.doing: dict[int, Doing] = {}  # likewise, of its requests
        self.failure: str | None = None
        self.starts = self.deaths = 0
        self.pid: int | None = None
        self.changed_s = self.pulse_s = self.used_s = supervisor.clock()
        self.silent = self.unused = False
        self.retry_at_s = 0.0
        self._asked_s: float | None = None  # when a worker that hangs was asked for its stacks
        self._supervisor = supervisor
        self._link: LinkSocket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ending = ""  # why we end the process ourselves
        self._believed = True  # until a message of the process makes no sense
        self._pause_s = 0.0
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.life: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def ready(self) -> bool:
        return self.state is EngineState.READY

    @property
    def _waits(self) -> bool:
        return self.state is EngineState.WAITING

    @property
    def stopping(self) -> bool:
        """It is on its way out, or out, because it was asked to."""
        return self.state in (EngineState.STOPPING, EngineState.STOPPED)

    @property
    def info(self) -> ModelInfo:
        known = self.known
        if known is None:
            return ModelInfo(id=self.id, loaded=False)
        return ModelInfo(
            id=self.id, loaded=self.ready, context=known.context, vocab=known.vocab, kinds=known.kinds
        )

    def health(self, owner: str | None) -> dict[str, Any]:
        """What `stats` says of it to an owner, who isn't told how much others use it, or who they are."""
        now_s = self._supervisor.clock()
        own = f"{OF_OWNER}{owner}"
        gauges = {
            name: figure
            for name, figure in self.gauges.items()
            if owner is None or name == own or not name.startswith(OF_OWNER)
        }
        return {
            "id": self.id,
            "state": "silent" if self.ready and self.silent else self.state.value,
            "pid": self.pid,
            "starts": self.starts,
            "deaths": self.deaths,
            "since_s": round(now_s - self.changed_s, 1),
            "pulse_age_s": round(now_s - self.pulse_s, 1) if self.ready else None,
            "retry_in_s": round(max(self.retry_at_s - now_s, 0.0), 1) if self._waits else None,
            "failure": self.failure,
            "facts": self.facts,
            "gauges": gauges,
        }

    def advance(self, event: EngineEvent) -> None:
        self.state = after(ENGINES, self.state, event)
        self.changed_s = self._supervisor.clock()

    def send(self, message: ToWorker) -> None:
        """Sends to the worker. One that no longer reads is ended, which fails what it had."""
        if isinstance(message, Command) and message.request.op != "verify":  # that may be the daemon's own
            self.used_s = self._supervisor.clock()
        if self._link is not None and not self._link.send(encode_to_worker(message)):
            # One that has just died reads nothing either, and its end says more.
            asyncio.get_running_loop().call_later(DRAIN_S, self._unread, self.generation)

    def _unread(self, generation: int) -> None:
        process = self._process  # None with a link: it is only just being started
        over = self._link is None or (process is not None and process.returncode is not None)
        if generation == self.generation and not over:
            self.kill("it did not read what it was sent")

    def kill(self, why: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Ends the process; `on_down` follows once it is gone."""
        self._ending = self._ending or why  # one that is only just being started is ended then
        self._signal(how)

    def _signal(self, which: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(which)

    def leaves(self, why: str) -> None:
        """It is to stop, and that is no failure. `why`: nobody asked for it, since nobody uses it."""
        self.advance(EngineEvent.STOP)
        self.unused = bool(why)
        if self._process is not None:  # else it would be ended as soon as there is one
            self._ending = why

    def begin(self) -> None:
        """Starts a process; the state follows when it speaks or ends."""
        self.advance(EngineEvent.START)
        self.generation = self._supervisor.next_generation()
        self.starts += 1
        self._supervisor.metrics.count("engine_starts")
        self.pid, self.failure, self._ending, self.silent, self._asked_s = None, None, "", False, None
        self._believed = True
        self._supervisor.memory.begin(self)
        self.life = self._supervisor.spawn(self._live(self.generation))

    async def _live(self, generation: int) -> None:
        """One process from its start to its end."""
        supervisor = self._supervisor
        path = supervisor.config.runtime_dir / f"engine-{generation}.sock"
        reason = "it could not be started"
        try:
            self._link = LinkSocket(supervisor.context, f"ipc://{path}", self._receive)
            path.chmod(0o600)
            self._process = await asyncio.create_subprocess_exec(
                *supervisor.command(self.spec, path),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=preloaded(os.environ, supervisor.blas.library),
                limit=LINE_BYTES_MAX,
                start_new_session=True,  # a Ctrl-C in the terminal is for the broker to handle
            )
            self.pid = self._process.pid
            if self._ending:
                self.kill(self._ending)
            supervisor.log.info("engine started", model=self.id, pid=self.pid, generation=generation)
            reading = asyncio.ensure_future(self._read_stderr(self._process))
            code = await self._process.wait()
            # What it said last may still be on its way; a child of its own may hold its stderr.
            await asyncio.sleep(DRAIN_S)
            await asyncio.wait([reading], timeout=DRAIN_S)
            reading.cancel()
            while self._link.receive():
                pass
            reason = self._ending or _left_with(code)
        except (OSError, zmq.ZMQError) as error:
            reason = f"it could not be started: {error}"
        finally:
            if self._link is not None:
                self._link.close()
            self._link = self._process = self.pid = None
            path.unlink(missing_ok=True)
        self._ended(generation, reason)

    def _ended(self, generation: int, reason: str) -> None:
        supervisor = self._supervisor
        stable = self.ready and supervisor.clock() - self.changed_s >= supervisor.config.patience.stable_s
        was_asked = self.state is EngineState.STOPPING
        failed = self.state is EngineState.FAILED
        self.advance(EngineEvent.DIED)
        supervisor.memory.gone(generation)
        self.gauges, self.timings, self.doing = {}, {}, {}  # what it told isn't so any more
        if was_asked or failed:
            supervisor.log.info("engine stopped", model=self.id, reason=reason)
        else:
            self.deaths += 1
            supervisor.metrics.count("engine_deaths")
            self.failure = reason
            patience = supervisor.config.patience
            pause_s = patience.restart_first_s if stable else self._pause_s * 2
            self._pause_s = min(max(pause_s, patience.restart_first_s), patience.restart_most_s)
            self.retry_at_s = supervisor.clock() + self._pause_s
            asyncio.get_running_loop().call_later(self._pause_s, self.tick)
            supervisor.log.error(
                "engine died",
                model=self.id,
                reason=reason,
                restart_in_s=self._pause_s,
                stderr=list(self._last_lines),
            )
        self._last_lines.clear()
        if not failed:
            supervisor.listener.on_down(self, generation, reason)
        supervisor.recorded(generation, None)

    def _receive(self, frame: bytes) -> None:
        if not self._believed:
            return  # what it sent between its nonsense and its end
        try:
            self._take(decode_from_worker(frame))
        except Exception:
            # Ours or the worker's fault: what the two sides believe may differ now, so start afresh.
            self._believed = False
            self._supervisor.log.exception("engine link broken", model=self.id)
            self.kill("its messages made no sense")

    def _take(self, message: FromWorker) -> None:
        supervisor = self._supervisor
        self.pulse_s, self.silent, self._asked_s = supervisor.clock(), False, None
        if isinstance(message, Answer):
            supervisor.listener.on_answer(self, message)
        elif isinstance(message, Journals):
            supervisor.listener.on_journals(self, message)
        elif isinstance(message, Pulse):
            self.doing = {each.rid: each for each in message.doing}
            supervisor.listener.on_doing(self, message.doing)
            self.gauges, self.timings = message.gauges, dict(histograms(message.timings))
            supervisor.memory.take(self, message)
        elif isinstance(message, Short | Within):
            supervisor.memory.take(self, message)
        elif isinstance(message, Ready):
            if self.state is not EngineState.STARTING:
                return  # asked to stop while it loaded
            self.advance(EngineEvent.READY)
            self.known, self.facts = message.model, message.facts
            self.used_s = supervisor.clock()
            supervisor.memory.ready(self)
            supervisor.log.info("engine ready", model=self.id, pid=self.pid, **message.facts)
            supervisor.listener.on_kept(self, message.kept, message.broken)
            supervisor.listener.on_ready(self)
        elif isinstance(message, Recorded):
            supervisor.recorded(self.generation, message)
        elif isinstance(message, Shelved):
            supervisor.listener.on_shelved(self, message)
        elif isinstance(message, Failed):
            self._refused(message)

    def _refused(self, message: Failed) -> None:
        self._supervisor.log.error("model not loaded", model=self.id, reason=message.message)
        self._ending = message.message
        if message.permanent and self.state is EngineState.STARTING:
            self.advance(EngineEvent.REFUSED)
            self.failure = message.message
            self._supervisor.listener.on_failed(self, message.message)
        # Either way it is expected to leave; one that stays is ended by `tick`.

    async def _read_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readuntil()
            except asyncio.IncompleteReadError as rest:
                line = rest.partial
                if not line:
                    return
            except asyncio.LimitOverrunError as over:
                line = await process.stderr.readexactly(over.consumed)
            text = line.decode(errors="replace").rstrip()
            if text:
                self._last_lines.append(text)
                self._supervisor.pass_on(self, text)

    def tick(self) -> None:
        """Looks after a worker that says nothing."""
        supervisor, patience = self._supervisor, self._supervisor.config.patience
        now_s = supervisor.clock()
        if self.state is EngineState.WAITING and now_s >= self.retry_at_s:
            self.begin()
        elif self.state is EngineState.STARTING and now_s - self.changed_s > patience.load_s:
            self.kill("it took too long to load the model")
        elif self.state is EngineState.FAILED and now_s - self.changed_s > patience.stop_s:
            self.kill("it stayed after it had failed")
        elif self.ready and now_s - self.pulse_s > patience.hang_s:
            self._hangs(now_s)
        elif self.ready and not self.silent and now_s - self.pulse_s > patience.silence_s:
            self.silent = True
            supervisor.log.warning("engine silent", model=self.id, pid=self.pid)
            supervisor.listener.on_silent(self, now_s - self.pulse_s)

    def _hangs(self, now_s: float) -> None:
        """Asks a worker for its stacks, and ends it if it still says nothing after that."""
        supervisor, stacks_s = self._supervisor, self._supervisor.config.patience.stacks_s
        if self._asked_s is None:
            self._asked_s = now_s
            supervisor.log.error("engine hangs", model=self.id, pid=self.pid)
            # Python's own handler writes them to stderr, of 100 threads and 100 frames at the most.
            self._signal(signal.SIGUSR1)
            asyncio.get_running_loop().call_later(stacks_s, self.tick)
        elif now_s - self._asked_s >= stacks_s:
            self.kill(f"it gave no sign of life for {supervisor.config.patience.hang_s:g} s")

    async def stop(self, leave_s: float, term_s: float, park_s: float = 0.0) -> None:
        """Asks the worker to park its sessions and leave, then insists. Returns once it is gone."""
        if self.state is EngineState.STOPPED:
            return
        if self.state is not EngineState.STOPPING:
            self.advance(EngineEvent.STOP)
        self.send(Stop(park_s))
        for how, wait_s in ((None, park_s + leave_s), (signal.SIGTERM, term_s), (signal.SIGKILL, None)):
            if how is not None:
                self.kill("it was asked to stop and did not", how)
            if self.life is None or await _over(self.life, wait_s):
                return


class Supervisor:
    """All engines. `listener` must be set before the first one starts.

    Attributes:
        recall: the model that sessions are of, by its id; raises `NotFound` when it isn't here any more.
        recorded: takes what a worker, by its generation, remembers of a request; None once it is gone.
    """

    listener: Listener
    recall: Callable[[str], ModelSpec]
    recorded: Callable[[int, Recorded | None], None]

    def __init__(
        self,
        config: Config,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Clock,
        metrics: Metrics,
        log: FilteringBoundLogger,
        blas: Blas,
        memory: Memory,
    ) -> None:
        self.config, self.context, self.clock = config, context, clock
        self.metrics, self.log, self.blas, self.memory = metrics, log, blas, memory
        self._engines: dict[str, Engine] = {}
        self._generations = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def engines(self) -> list[Engine]:
        return list(self._engines.values())

    def engine(self, model: str) -> Engine:
        """The engine of a model that there are sessions of; raises what `recall` does."""
        return self._engines.get(model) or self.engine_for(self.recall(model))

    def engine_for(self, spec: ModelSpec) -> Engine:
        """The engine of a model, made (not started) if there is none."""
        if spec.id not in self._engines:
            self._engines[spec.id] = Engine(spec, self)
        return self._engines[spec.id]

    def known(self, model: str) -> Engine | None:
        return self._engines.get(model)

    def ensure(self, engine: Engine) -> None:
        """Sees to it that the engine is, or soon will be, ready.

        Raises:
            Unsupported: its model can't be loaded.
            EngineLost: it keeps dying, and its next start is too far away to wait for.
        """
        if engine.state is EngineState.FAILED:
            raise Unsupported(f"The model {engine.id} can't be loaded: {engine.failure}", field="model")
        if engine.state is EngineState.WAITING:
            wait_s = max(0.0, engine.retry_at_s - self.clock())
            if wait_s > self.config.patience.hold_s:
                raise EngineLost(
                    f"The engine of {engine.id} keeps stopping ({engine.failure}); try again later.",
                    retry_after_s=round(wait_s, 1),
                )
        if engine.state is EngineState.STOPPED:
            engine.begin()

    def unload(self, engine: Engine, why: str = "") -> None:
        """Begins to stop an engine, which takes no more from here on; `on_down` follows, with the reason."""
        engine.leaves(why)
        patience = self.config.patience
        self.spawn(engine.stop(patience.stop_s, patience.term_s, patience.unload_park_s))

    def tick(self) -> None:
        for engine in self.engines:
            engine.tick()

    async def stop(self, park_s: float = 0.0) -> None:
        """Ends all workers within the patience for the daemon's end; they may park for so long before."""
        patience = self.config.patience
        await asyncio.gather(*(e.stop(patience.leave_s, patience.kill_s, park_s) for e in self.engines))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def next_generation(self) -> int:
        return next(self._generations)

    def command(self, spec: ModelSpec, path: Path) -> list[str]:
        config = self.config
        made = [*config.worker_command, "--endpoint", f"ipc://{path}", "--model", spec.spec]
        made += ["--model-id", spec.id, "--log", "json", "--log-level", config.log_level]
        made += ["--kv-budget", "0"]  # nothing, until it is told a `Budget`
        if config.state_dir is not None:
            made += ["--state", str(config.state_dir)]
            for name, nbytes in (("bytes", config.disk_bytes_max), ("free", config.disk_free_bytes)):
                made += [] if nbytes is None else [f"--disk-{name}", str(nbytes)]
        if config.gap_ms is not None:
            made += ["--gap-ms", str(config.gap_ms)]
        for app, weight in config.weights:
            made += ["--weight", f"{app}={weight:g}"]
        if config.rows_max != BATCH_MAX:
            made += ["--rows-max", str(config.rows_max)]
        if not config.record:
            made += ["--no-record"]
        return made

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs something beside, and keeps it from being collected."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.log.error("supervision failed", exc_info=task.exception())

    def pass_on(self, engine: Engine, line: str) -> None:
        """A line of a worker's stderr to the log: as an entry, if it is one."""
        entry = _entry(line)
        if entry is None:
            self.log.info("engine says", model=engine.id, line=line)
        else:
            level = LEVELS.get(str(entry.pop("level", "info")), LEVELS["info"])
            self.log.log(level, entry.pop("event"), engine=engine.id, **entry)


def _entry(line: str) -> dict[str, Any] | None:
    """What a worker's own log said, less the time, which is now."""
    try:
        entry = json.loads(line) if line.startswith("{") else None
    except ValueError:
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("event"), str):
        return None
    return {name: value for name, value in entry.items() if name not in ("timestamp", "engine")}


def _left_with(code: int) -> str:
    if code >= 0:
        return f"it left with code {code}"
    with contextlib.suppress(ValueError):
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it was ended by signal {-code}"


async def _over(task: asyncio.Task[None], wait_s: float | None) -> bool:
    done, _ = await asyncio.wait([task], timeout=wait_s)
    return bool(done)
