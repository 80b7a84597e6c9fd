"""The checks of `stateroom doctor`. Each looks at one thing and says pass, note or problem, and what to do.

Nothing is changed, nothing is started but a short process that imports mlx.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from stat import S_ISREG
from typing import Literal

from stateroom.client import Room, connect
from stateroom.client.errors import (
    BadEndpoint,
    ClientError,
    NoDaemon,
    NotFound,
    RequestTimeout,
    StateroomError,
)
from stateroom.client.paths import default_endpoint, home_dir, ipc_path, runtime_dir
from stateroom.client.protocol import VerifyResult
from stateroom.daemon.blas import find_blas, preloaded
from stateroom.daemon.commands.sessions import verdict
from stateroom.daemon.commands.terminal import size
from stateroom.daemon.config import STATE_NAME
from stateroom.daemon.models import list_installed

State = Literal["pass", "note", "problem"]
PACKAGES = ("stateroom", "pyzmq", "msgpack", "mlx", "mlx-lm", "structlog", "pydantic", "typer", "rich")
FACTS = ("architecture", "device", "dtype", "blas")  # of a worker, worth a line
PROBE_S = 120.0  # mlx's first import on a cold disk
HELLO_S = 3.0
LAG_S = 5.0  # what is to be kept is on disk within 1 s
SAMPLE = 3  # sessions that are verified
VERIFY_S = 60.0  # for each of them: they give way to everything else
DISK_BYTES_MIN = 2 * 2**30  # a small model with room to convert it

INSTALL = "pip install 'stateroom[daemon]' (Linux with an NVIDIA GPU: 'stateroom[daemon,cuda]')"
REPORT = "The daemon's log names it: close it, and report what you know of it."
ELSEWHERE = "Set STATEROOM_RUNTIME_DIR to a directory of yours."

# Runs beside the doctor: a broken GPU driver or BLAS may abort the process that touches it.
PROBE = """
import json, time
import mlx.core as mx
a = mx.random.normal((512, 512)); mx.eval(a @ a)
t = time.perf_counter(); mx.eval(*[a @ a for _ in range(4)]); s = time.perf_counter() - t
device = mx.default_device()
print(json.dumps({
    "device": "cpu" if device == mx.cpu else "gpu",
    "metal": mx.metal.is_available(),
    "gflops": round(4 * 2 * 512**3 / s / 1e9, 1),
}))
"""


@dataclass(frozen=True)
class Check:
    """One line of the doctor. `note` is nothing wrong, but worth knowing; `advice` says what to do."""

    name: str
    state: State
    finding: str
    advice: str | None = None


def passed(name: str, finding: str) -> Check:
    return Check(name, "pass", finding)


def problem(name: str, finding: str, advice: str | None = None) -> Check:
    return Check(name, "problem", finding, advice)


def examine() -> Iterator[Check]:
    """All checks, as they are made."""
    for check in (python, packages, engine, socket, runtime, disk, kept, models, daemon):
        yield from check()


def python() -> Iterator[Check]:
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        yield problem("python", found, "mlx needs Apple silicon and a native (arm64) Python.")
    else:
        yield passed("python", found)


def packages() -> Iterator[Check]:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    wrong = [name for name, wanted in _pinned() if name not in missing and version(name) != wanted]
    if missing:
        yield problem("packages", f"not installed: {', '.join(missing)}", INSTALL)
    elif wrong:
        yield problem("packages", f"not the version that this release needs: {', '.join(wrong)}", INSTALL)
    else:
        yield passed("packages", ", ".join(found))


def _pinned() -> set[tuple[str, str]]:
    """(package, version) of what this release pins."""
    pinned = set()
    for requirement in requires("stateroom") or []:
        name, equals, rest = requirement.partition(";")[0].partition("==")
        if equals:
            pinned.add((name.partition("[")[0].strip(), rest.strip()))
    return pinned


def engine() -> Iterator[Check]:
    """Imports mlx as a worker would, in a process of its own."""
    blas = find_blas()
    command, environment = [sys.executable, "-c", PROBE], preloaded(os.environ, blas.library)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        yield problem("mlx", f"no answer within {PROBE_S:.0f} s", INSTALL)
        return
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield problem("mlx", last, INSTALL)
        return
    told = json.loads(done.stdout.splitlines()[-1])
    speed = f"{told['gflops']:.0f} GFLOP/s in float32"
    if told["device"] == "gpu":
        yield passed("mlx", f"{'Metal' if told['metal'] else 'CUDA'} GPU, {speed}")
        return
    yield passed("mlx", f"CPU, {speed}")
    if blas.library is not None:
        yield passed("blas", f"workers are started with {blas.library}")
    elif sys.platform == "linux":
        yield problem("blas", "the reference BLAS, about ten times slower", blas.hint)


def socket() -> Iterator[Check]:
    """The endpoint, and what is in its place."""
    try:
        endpoint = default_endpoint()
    except BadEndpoint as error:
        yield problem("socket", str(error))
        return
    path = ipc_path(endpoint)
    if path is not None and path.exists() and not path.is_socket():
        yield problem("socket", f"{path} is in the way and is no socket", "Move it elsewhere.")
    else:
        yield passed("socket", endpoint)


def runtime() -> Iterator[Check]:
    """Who may reach the directory of the socket and the lock: what the daemon itself insists on."""
    try:
        folder = runtime_dir()
        about = folder.stat()
    except BadEndpoint as error:
        yield problem("permissions", str(error))
    except FileNotFoundError:
        yield passed("permissions", f"{folder} isn't there yet; the daemon makes it")
    else:
        if about.st_uid != os.getuid():
            yield problem("permissions", f"{folder} belongs to another user", ELSEWHERE)
        elif about.st_mode & 0o077:
            yield problem("permissions", f"others can reach into {folder}", f"chmod 700 {folder}")
        else:
            yield passed("permissions", f"{folder} is yours")


def disk() -> Iterator[Check]:
    """Room for models, below the home directory or the nearest parent that exists."""
    home = home_dir()
    there = next(path for path in (home, *home.parents) if path.exists())
    if not os.access(there, os.W_OK):
        yield problem("disk", f"{there} can't be written", "Set STATEROOM_HOME to a directory of yours.")
        return
    free = shutil.disk_usage(there).free
    finding = f"{free / 2**30:.1f} GiB free at {home}"
    if free < DISK_BYTES_MIN:
        yield problem("disk", finding, "Free some, or set STATEROOM_HOME to a larger disk.")
    else:
        yield passed("disk", finding)


def kept() -> Iterator[Check]:
    """What outlives the daemon, and what it takes on the disk."""
    folder = home_dir() / STATE_NAME
    if not folder.is_dir():
        yield passed("state", f"nothing is kept at {folder} yet")
        return
    parts = {"database": folder.glob("catalog.db*"), "snapshots": (folder / "snapshots").rglob("*")}
    try:
        sizes = {name: sum(map(_size, paths)) for name, paths in parts.items()}
        total = sum(map(_size, folder.rglob("*")))
    except OSError as error:
        yield problem("state", f"{folder} can't be read: {error}", f"chmod -R u+rwX {folder}")
        return
    told = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in sizes.items())
    yield passed("state", f"{size(total)} at {folder}: {told}")


def _size(path: Path) -> int:
    """Of a file; of one that went meanwhile nothing."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return 0
    return about.st_size if S_ISREG(about.st_mode) else 0


def models() -> Iterator[Check]:
    installed = ", ".join(model.name for model in list_installed())
    if installed:
        yield passed("models", installed)
    else:
        yield Check("models", "note", "none installed", "stateroom model add demo")


def daemon() -> Iterator[Check]:
    """Whether a daemon answers, how its engines are, and whether sessions are what their tokens give."""
    try:
        with connect(app="doctor", timeout_s=HELLO_S) as room:
            hello, stats = room.hello(), room.stats()
            verified = list(sample(room))
    except NoDaemon as error:
        yield Check("daemon", "note", str(error))
        return
    except (ClientError, StateroomError) as error:
        yield problem("daemon", str(error))
        return
    yield passed("daemon", f"{hello.server} {hello.version} answers")
    yield memory(stats.gauges)
    if "journal_pending" in stats.gauges:  # else it was told to keep nothing
        yield journal(stats.gauges)
    for model in stats.models:
        finding = f"{model['id']} is {model['state']}"
        if model["failure"]:
            yield problem("engine", f"{finding}: {model['failure']}")
        else:
            facts = ", ".join(f"{name} {model['facts'][name]}" for name in FACTS if name in model["facts"])
            yield passed("engine", f"{finding}{f' ({facts})' if facts else ''}")
    yield from verified


def memory(gauges: dict[str, float]) -> Check:
    """The KV that sessions may take, what they take, and whether the machine is short of memory."""
    held, granted, total = (
        f"{gauges[name] / 2**30:.1f}" for name in ("kv_held_bytes", "kv_granted_bytes", "kv_budget_bytes")
    )
    finding = f"{held} of {total} GiB of KV held, {granted} granted to engines"
    if not gauges["memory_pressure"]:
        return passed("memory", finding)
    return Check("memory", "note", f"{finding}; the machine is short of memory", "Close other programs.")


def journal(gauges: dict[str, float]) -> Check:
    """Whether what clients were told is on disk, or waits for it."""
    waiting, lag_s = int(gauges["journal_pending"]), gauges["journal_lag_s"]
    if lag_s < LAG_S:
        return passed("journal", "what clients were told is on disk")
    finding = f"{waiting} of its records could not be written for {lag_s:.0f} s"
    return problem("journal", finding, "See `stateroom logs`; if the disk is full, free some.")


def sample(room: Room) -> Iterator[Check]:
    """Verifies some sessions, whosever they are: those that were verified longest ago."""
    found: list[VerifyResult] = []
    resident = int(room.stats().gauges["sessions_resident"])
    try:
        while len(found) < min(SAMPLE, resident):
            found.append(room.verify(timeout_s=VERIFY_S))
    except NotFound:
        pass  # the others have something to do
    except (StateroomError, RequestTimeout) as error:
        yield Check("sessions", "note", f"one could not be verified: {error}")
    for result in found:
        if not result.healthy:
            yield problem("sessions", f"one isn't what its tokens give: {verdict(result)}", REPORT)
    if found and all(result.healthy for result in found):
        yield passed("sessions", f"{len(found)} computed again: the same as stored")
    elif not found:
        yield passed("sessions", f"{resident} have KV on the device{', all in use' if resident else ''}")
