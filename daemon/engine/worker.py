"""The engine worker: the process that holds one model, and the shell around `Engine`.

`python -m stateroom.daemon.engine.worker --endpoint ipc://… --model SPEC --model-id ID`, started by the
supervisor. Its main thread owns mlx, the engine and the socket; between two turns of the engine's loop
it takes what the broker sent, and when nothing runs it sleeps in `poll`. A second thread only watches
stdin: the broker holds the other end, so end of file means that the broker is gone, however it went.
What brings in mlx is therefore imported in `main`: that takes seconds, and the broker is watched by then.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
import zmq
from structlog.typing import FilteringBoundLogger

from stateroom.client.limits import BATCH_MAX
from stateroom.client.protocol import ModelInfo
from stateroom.daemon.engine.blas_threads import BlasThreads
from stateroom.daemon.link import (
    Budget,
    Failed,
    FromWorker,
    Pulse,
    Ready,
    Recall,
    Recorded,
    Stop,
    decode_to_worker,
    encode_from_worker,
)
from stateroom.daemon.logs import LogFormat, incident, make_log
from stateroom.daemon.scheduler.pace import Pace
from stateroom.daemon.usage import usage

if TYPE_CHECKING:
    from stateroom.daemon.engine.commands import Commands
    from stateroom.daemon.engine.device_limits import DeviceLimits
    from stateroom.daemon.engine.engine import Engine
    from stateroom.daemon.engine.model import LoadedModel

PULSE_S = 1.0  # between two proofs of life
ORPHAN_EXIT_S = 1.0  # after the broker's end, for the step in flight; then the process goes
COMMANDS_PER_TURN = 256  # taken between two turns, so that a flood can't starve the streams
RECALLS_MAX = 16  # requests that are to be told of; as many as are waited for, the last asked for
STOP_TURNS_S = 3.0  # for ending open requests when told to stop
EVENTS, READABLE = int(zmq.EVENTS), int(zmq.POLLIN)  # as numbers: pyzmq takes its time over its enums
GAP_MS_GPU = 50.0  # inter-token budget of a running stream on a GPU; a CPU's is in steps


class Worker:
    """Moves messages between the socket and the engine."""

    def __init__(
        self, socket: zmq.Socket[bytes], commands: Commands, limits: DeviceLimits | None = None
    ) -> None:
        self.socket, self.limits = socket, limits
        self.commands = commands
        self.engine = commands.engine
        self.stopping = False
        self._park_s = 0.0
        self._recalls: deque[int] = deque(maxlen=RECALLS_MAX)  # rids
        self._pulse_due = 0.0
        self._sleep: Callable[[int], object] = socket.poll
        if self.engine.disk is not None:  # what it was asked may be done
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(self.engine.disk.files.fileno(), zmq.POLLIN)
            self._sleep = poller.poll

    def run(self) -> None:
        """Until told to stop."""
        busy = unchecked = False
        while not self.stopping:
            unchecked |= self._take(0 if busy else int(PULSE_S * 1000))
            busy = self.engine.step()
            busy |= self._recall()
            if unchecked and not busy:
                unchecked = not self.engine.conservation.at_rest()
            self._pulse()
        self._wind_down()

    def _take(self, wait_ms: int) -> bool:
        """Whether there was anything to take."""
        if wait_ms and not self._sleep(wait_ms):
            return False
        for taken in range(COMMANDS_PER_TURN):
            # A fifth of what a receive in vain costs, at every turn.
            if not cast("int", self.socket.get(EVENTS)) & READABLE:
                return taken > 0
            message = decode_to_worker(self.socket.recv(zmq.NOBLOCK))
            if isinstance(message, Stop):
                self.stopping, self._park_s = True, message.park_s
                return True
            if isinstance(message, Budget) and self.limits is not None:
                self.limits.apply(message.nbytes)
            if isinstance(message, Recall):
                self._recalls.append(message.rid)
            else:
                self.commands.take(message)
        return True

    def _recall(self) -> bool:
        """Tells what is remembered of one request, and no more in a turn. Whether others are left."""
        if self._recalls:
            rid = self._recalls.popleft()
            send(self.socket, Recorded(rid, *self.engine.recorder.marks(rid, self.engine.clock_ms())))
        return bool(self._recalls)

    def _pulse(self) -> None:
        now = time.monotonic()
        if now >= self._pulse_due:
            self._pulse_due = now + PULSE_S
            gauges = {} if self.limits is None else self.limits.gauges()
            timings = self.engine.filling.timings.told()
            doing = self.commands.doings.now()
            send(self.socket, Pulse(self.engine.gauges() | gauges | usage(), doing, timings))

    def _wind_down(self) -> None:
        """Every open request ends with its own final answer; then sessions are parked while there is time."""
        self.engine.cancel_all()
        deadline = time.monotonic() + STOP_TURNS_S
        while (left_s := deadline - time.monotonic()) > 0:
            if self.engine.step():
                continue
            if self.engine.disk is None or not self.engine.requests:
                break
            self.engine.disk.files.wait(left_s)
        self.commands.snapshots.stop()
        from stateroom.daemon.engine.parking import park_all

        park_all(self.engine, self._park_s)


def send(socket: zmq.Socket[bytes], message: FromWorker) -> None:
    socket.send(encode_from_worker(message))


def watch_parent(gone: Callable[[], None]) -> None:
    """Reads stdin to its end on a thread of its own, then calls `gone`."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        gone()

    threading.Thread(target=watch, name="parent", daemon=True).start()


def orphaned(log: FilteringBoundLogger) -> None:
    """The broker is gone: nothing can be answered, and the memory is wanted back."""
    with contextlib.suppress(OSError):  # the log went through the broker
        log.warning("broker_gone", exit_in_s=ORPHAN_EXIT_S)
    time.sleep(ORPHAN_EXIT_S)
    os._exit(0)


def reporter(log: FilteringBoundLogger) -> Callable[[BaseException, Sequence[int]], str]:
    """Logs a bug with its stack, and the requests that it befell; gives the incident's name."""

    def report(error: BaseException, rids: Sequence[int]) -> str:
        name = incident()
        befell: dict[str, object] = {"rid": rids[0]} if len(rids) == 1 else {"rids": list(rids) or None}
        log.error("internal error", incident=name, **befell, exc_info=error)
        return name

    return report


def weights_of(given: Sequence[str]) -> dict[str, float]:
    """From APP=N, as the supervisor writes them."""
    pairs = (text.rpartition("=") for text in given)
    return {app: float(number) for app, _, number in pairs}


def make_engine(
    loaded: LoadedModel,
    emit: Callable[[FromWorker], None],
    report: Callable[[BaseException, Sequence[int]], str],
    kv_budget: int | None,
    *,
    gap_ms: float | None = None,
    weights: Mapping[str, float] | None = None,
    rows_max: int = BATCH_MAX,
    record: bool = True,
) -> Engine:
    """An engine for this device. `gap_ms`: of running streams; None: what is usual on it."""
    from stateroom.daemon.engine.engine import Engine
    from stateroom.daemon.engine.part_costs import measured

    on_gpu = str(loaded.facts.get("device", "cpu")).startswith("gpu")
    blas = None if on_gpu else BlasThreads.find()
    engine = Engine(
        loaded,
        clock_ms=lambda: time.monotonic() * 1000.0,
        emit=emit,
        report=report,
        kv_budget_bytes=kv_budget,
        pace=Pace(gap_ms=GAP_MS_GPU if gap_ms is None and on_gpu else gap_ms),
        weights=weights,
        rows_max=rows_max,
        blas=blas,
        record=record,
    )
    if blas is not None and not blas.pays(engine.trial_step()):
        blas.many()
        engine.blas = None  # then nothing is switched, and quanta share the device with steps
    if engine.schemes.groupable:
        try:
            engine.decoding.costs = measured(loaded.model, engine.schemes.dense.samples[0])
        except Exception as error:  # such as no memory: it goes by what is usual
            report(error, ())
    return engine


def main(
    endpoint: Annotated[str, typer.Option()],
    model: Annotated[str, typer.Option()],
    model_id: Annotated[str, typer.Option()],
    state: Annotated[Path | None, typer.Option()] = None,
    disk_bytes: Annotated[int | None, typer.Option()] = None,
    disk_free: Annotated[int | None, typer.Option()] = None,
    kv_budget: Annotated[int | None, typer.Option()] = None,
    gap_ms: Annotated[float | None, typer.Option()] = None,
    weight: Annotated[list[str] | None, typer.Option()] = None,
    rows_max: Annotated[int, typer.Option()] = BATCH_MAX,
    record: Annotated[bool, typer.Option()] = True,
    log_format: Annotated[LogFormat, typer.Option("--log")] = "console",
    log_level: Annotated[str, typer.Option()] = "info",
) -> None:
    """Loads the model, says so, and serves the broker until told to stop."""
    log = make_log(log_format, log_level)
    faulthandler.enable(sys.stderr, all_threads=True)  # where it was, when a fault ends it
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)  # when it hangs: the broker asks
    watch_parent(lambda: orphaned(log))
    from stateroom.daemon.engine.commands import Commands
    from stateroom.daemon.engine.device_limits import DeviceLimits
    from stateroom.daemon.engine.disk_start import begin, contents
    from stateroom.daemon.engine.model import ModelError, load

    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.SNDHWM, 0)  # the broker always reads; its own queues are bounded
    socket.connect(endpoint)
    try:
        loaded = load(model, model_id)
        limits = DeviceLimits(loaded.facts["weight_bytes"])
        limits.apply(kv_budget or 0)
        engine = make_engine(
            loaded,
            lambda answer: send(socket, answer),
            reporter(log),
            kv_budget,
            gap_ms=gap_ms,
            weights=weights_of(weight or []),
            rows_max=rows_max,
            record=record,
        )
        snapshots = begin(engine, state, disk_bytes, disk_free)
    except Exception as error:
        if isinstance(error, ModelError):
            failed = Failed(str(error), error.permanent)
        else:
            log.error("internal error", exc_info=error)
            failed = Failed(f"Loading {model_id} failed: {type(error).__name__}: {error}", permanent=False)
        send(socket, failed)
        socket.close()
        context.term()
        raise SystemExit(1) from None
    info = ModelInfo(id=model_id, loaded=True, context=loaded.context, vocab=loaded.vocab, kinds=engine.kinds)
    facts = {
        **loaded.facts,
        "bytes_per_token": engine.bytes_per_token,
        "blas_switched": engine.blas is not None,
        **limits.facts(),
        "snapshots": snapshots,
    }
    log.info("ready", model=model_id, **facts)
    send(socket, Ready(info, facts, *contents(engine)))
    Worker(socket, Commands(engine), limits).run()
    socket.close()
    context.term()


if __name__ == "__main__":
    typer.run(main)
