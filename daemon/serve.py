"""`stateroom serve`: from a configuration to a running daemon, and out again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import stat
import sys
from typing import TextIO

import zmq
from structlog.typing import FilteringBoundLogger

from stateroom.client.paths import ipc_path
from stateroom.daemon import activation
from stateroom.daemon.blas import find_blas
from stateroom.daemon.broker import Broker
from stateroom.daemon.config import Config
from stateroom.daemon.exits import CONFIG, OK, SERVICE_VARIABLE, Leave
from stateroom.daemon.lock import (
    LOCK_NAME,
    OTHERS_WRITE,
    Lock,
    clear_engine_sockets,
    clear_socket,
    make_private,
    make_socket_private,
)
from stateroom.daemon.log_file import LogFile
from stateroom.daemon.logs import make_log
from stateroom.daemon.shelf import Shelf
from stateroom.daemon.sockets import NO_DESCRIPTOR

FILES_WANTED = 8_192  # open files: one a client, a few a worker; launchd gives 256
STDERR_BYTES_MOST = 2**20  # of what was written there before, when a service manager keeps it in a file
UMASK = 0o077  # sockets and files are ours alone


def serve(config: Config) -> int:
    """Runs a daemon until SIGTERM or SIGINT, and gives its exit code.

    Raises:
        Leave: it can't start; nothing was bound or changed.
    """
    os.umask(UMASK)
    descriptor = activation.taken(config.endpoint) if config.activated else NO_DESCRIPTOR
    locks = take_places(config)
    # Behind the locks: two daemons must not let the same files take turns.
    file, problem = _log_file(config)
    # What is left of stderr then is for crashes: a manager's file is nobody's to keep small but ours.
    beside = empty_stderr() if file is not None and os.environ.get(SERVICE_VARIABLE) else None
    log = make_log(config.log_format, config.log_level, beside, file)
    if problem is not None:
        log.warning("no log file", error=problem)
    try:
        raise_file_limit(log)
        return asyncio.run(_run(config, log, descriptor, file))
    finally:
        if file is not None:
            file.close()
        for lock in locks:
            lock.release()


def _log_file(config: Config) -> tuple[LogFile | None, str | None]:
    """The daemon's own log, or why there is none: it is no reason not to start."""
    if config.log_file is None:
        return None, None
    try:
        return LogFile(config.log_file), None
    except OSError as error:
        return None, str(error)


def empty_stderr() -> TextIO:
    """Begins a long file that stderr goes to anew, and gives what takes the log's lines in its place.

    It is cut short where it is: launchd holds it open, and would go on in one that was put aside.
    """
    with contextlib.suppress(OSError, ValueError):
        descriptor = sys.stderr.fileno()
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_size > STDERR_BYTES_MOST:
            os.ftruncate(descriptor, 0)
    return open(os.devnull, "w", encoding="utf-8")  # for as long as we run


def take_places(config: Config) -> list[Lock]:
    """Makes the directories, takes the locks, and removes what a dead daemon left.

    Raises:
        Leave: a directory isn't ours, another daemon holds a lock, or a file that is no socket is in the way.
    """
    make_private(config.runtime_dir)
    if config.state_dir is not None:
        make_private(config.state_dir)
    wanted = [config.runtime_dir / LOCK_NAME]
    path = ipc_path(config.endpoint)
    if path is not None and path.parent.resolve() != config.runtime_dir.resolve():
        make_private(path.parent, OTHERS_WRITE)
        wanted.append(path.with_name(f"{path.name}.lock"))
    held: list[Lock] = []
    try:
        for lock_path in wanted:
            lock = Lock(lock_path)
            lock.take(config.endpoint)
            held.append(lock)
        if path is not None and not config.activated:
            clear_socket(path)
        clear_engine_sockets(config.runtime_dir)
    except BaseException:
        for lock in held:
            lock.release()
        raise
    return held


async def _run(config: Config, log: FilteringBoundLogger, descriptor: int, file: LogFile | None) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    blas = find_blas()
    if blas.hint:
        log.warning("slow linear algebra", hint=blas.hint)
    if not Shelf(config.models, config.models_dir).all():
        log.warning("no models", hint="Install one with `stateroom model add demo`, or give `serve` one.")
    broker = Broker(config, log, blas)
    if file is not None:
        broker.metrics.others.append(lambda: {"log_lines_dropped": file.dropped})
    path = ipc_path(config.endpoint)
    try:
        endpoint = broker.start(descriptor)
    except zmq.ZMQError as error:
        await broker.stop()
        raise Leave(CONFIG, f"The endpoint {config.endpoint} can't be bound: {error}.") from error
    try:
        if path is not None:
            make_socket_private(path)
        models = [spec.id for spec in config.models]
        if path is not None and not broker.own_user_only:
            log.warning(
                "peers unchecked", hint="This libzmq can't tell whose a connection is; modes must do."
            )
        log.info("serving", endpoint=endpoint, listening=broker.listening, pid=os.getpid(), models=models)
        await stopping.wait()
        log.info("stopping", sessions=len(broker.catalog), requests=len(broker.tickets))
        return OK
    finally:
        await broker.stop()
        if path is not None and not config.activated:
            path.unlink(missing_ok=True)
        log.info("stopped")


def raise_file_limit(log: FilteringBoundLogger) -> None:
    """Raises the soft limit of open files towards `FILES_WANTED`, as far as the hard limit lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(FILES_WANTED, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("few open files", soft=soft, wanted=wanted, error=str(error))
