"""Runs many command lines at once, each in a fork of one process that has imported everything already.

What a fork runs is the entry point itself, to the interpreter's very end, with streams of its own: the same
as `stateroom …` in a shell, without the half second that each would take to import.
Jobs come on its stdin, a list a line, and what they did goes to its stdout, both as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

AT_ONCE = 12  # most of them wait for a daemon that does not answer
JOB_S = 30.0  # and it is killed
POLL_S = 0.02
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Job:
    """A command line.

    Attributes:
        stdin: text; None: closed.
        stdout: "kept", "full" (/dev/full), or "unread" (a pipe whose reader has gone).
        interrupt_s: after so long it gets SIGINT.
        file_bytes: the most that a file may have.
        uid: the user that it runs as.
    """

    arguments: list[str]
    env: dict[str, str]
    stdin: str | None = ""
    stdout: str = "kept"
    interrupt_s: float | None = None
    file_bytes: int | None = None
    uid: int | None = None
    cwd: str = "/"


@dataclass(frozen=True)
class Done:
    """What became of it. `code`: None when it had to be killed."""

    arguments: list[str]
    code: int | None
    out: str
    err: str
    s: float

    @property
    def lines(self) -> list[str]:
        return self.err.splitlines()


class Many:
    """The process that forks, started when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, jobs: list[Job]) -> list[Done]:
        """Runs them, some at a time, and gives what became of each, in order."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.system.many"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).resolve().parent.parent.parent,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([asdict(job) for job in jobs]) + "\n")
        self._process.stdin.flush()
        return [Done(**each) for each in json.loads(self._process.stdout.readline())]

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=JOB_S)
            self._process = None


# ---------------------------------------------------------------- in the process that forks


@dataclass
class Running:
    job: Job
    pid: int
    began_s: float
    pipes: dict[int, str]  # those that are still open, by what they bring
    brought: dict[str, bytes] = field(default_factory=lambda: {"out": b"", "err": b"", "ready": b""})
    code: int | None = None
    interrupted: bool = False
    ready_s: float | None = None  # when it was about to begin
    ended_s: float | None = None


def start(job: Job) -> Running | None:
    """None: this is the fork, and everything is as its job wants it."""
    ends = {name: os.pipe() for name in ("in", "out", "err", "ready")}
    pid = os.fork()
    if pid:
        for reads, writes in (ends["out"], ends["err"], ends["ready"]):
            os.set_blocking(reads, False)
            os.close(writes)
        os.close(ends["in"][0])
        if job.stdin:
            os.write(ends["in"][1], job.stdin.encode())
        os.close(ends["in"][1])
        pipes = {ends[name][0]: name for name in ("out", "err", "ready")}
        return Running(job, pid, time.monotonic(), pipes)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python starts with
    os.dup2(ends["in"][0], 0)
    os.dup2(ends["out"][1], 1)
    os.dup2(ends["err"][1], 2)
    ready = os.dup2(ends["ready"][1], 255)
    os.closerange(3, 255)
    if job.stdout == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    elif job.stdout == "unread":
        reads, writes = os.pipe()
        os.dup2(writes, 1)
        os.close(reads)
        os.close(writes)
    os.chdir(job.cwd)
    os.environ.clear()
    os.environ.update(job.env)
    if job.file_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (job.file_bytes, job.file_bytes))
    sys.stdin = None if job.stdin is None else open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    if job.stdin is None:
        os.close(0)
    if job.uid is not None:
        os.setgroups([])
        os.setgid(job.uid)
        os.setuid(job.uid)
    sys.argv = ["stateroom", *job.arguments]
    os.close(ready)
    return None


def look_after(running: Running) -> bool:
    """Reads what it says, and whether it has ended; sends what is due. False: it is over, and all is read."""
    took_s = time.monotonic() - running.began_s
    due_s = running.job.interrupt_s
    if running.code is None and running.ended_s is None:
        begun = running.ready_s is not None and time.monotonic() - running.ready_s > (due_s or 0.0)
        if due_s is not None and begun and not running.interrupted:
            running.interrupted = True
            os.kill(running.pid, signal.SIGINT)
        if took_s > JOB_S:
            os.killpg(running.pid, signal.SIGKILL)
        pid, status = os.waitpid(running.pid, os.WNOHANG)
        if pid:
            running.ended_s = took_s
            running.code = None if took_s > JOB_S else os.waitstatus_to_exitcode(status)
    ready, _, _ = select.select(list(running.pipes), [], [], 0)
    for pipe in ready:
        piece = os.read(pipe, READ_BYTES)
        running.brought[running.pipes[pipe]] += piece
        if not piece:
            os.close(pipe)
            if running.pipes.pop(pipe) == "ready":
                running.ready_s = time.monotonic()
    # What it left behind may hold its streams; that is no reason to wait for ever.
    return running.ended_s is None or (bool(ready) and bool(running.pipes))


def told(running: Running) -> dict[str, Any]:
    return asdict(
        Done(
            running.job.arguments,
            running.code,
            running.brought["out"].decode("utf-8", "replace"),
            running.brought["err"].decode("utf-8", "replace"),
            running.ended_s or 0.0,
        )
    )


def run_all(jobs: list[Job], run: Callable[[], object]) -> list[dict[str, Any]]:
    """`run`: what a fork does; it doesn't come back."""
    waiting, at_work, done = list(enumerate(jobs)), {}, {}
    while waiting or at_work:
        while waiting and len(at_work) < AT_ONCE:
            number, job = waiting.pop(0)
            running = start(job)
            if running is None:
                run()
            at_work[number] = running
        for number, running in list(at_work.items()):
            if not look_after(running):
                done[number] = told(running)
                del at_work[number]
        time.sleep(POLL_S)
    return [done[number] for number in range(len(jobs))]


def main() -> None:
    """Ends at the end of its stdin, and in each fork as the command line does."""
    # Imported once for all, what a command brings in by itself among it.
    import stateroom.daemon.demo.run
    import stateroom.daemon.serve
    import stateroom.deploy.systemd  # noqa: F401
    from stateroom.daemon import cli, commands  # noqa: F401

    gc.freeze()  # else each fork copies everything in its first collection
    while line := sys.stdin.readline():
        done = run_all([Job(**each) for each in json.loads(line)], cli.main)
        sys.stdout.write(json.dumps(done) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
