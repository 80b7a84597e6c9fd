"""What a daemon is started with: flags and environment as one frozen `Config`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from stateroom.client.limits import BATCH_MAX
from stateroom.daemon.exits import CONFIG, Leave
from stateroom.daemon.log_file import LogFormat
from stateroom.daemon.models import resolve
from stateroom.daemon.quotas import Quota
from stateroom.daemon.scheduler.fairness import WEIGHT_MAX, WEIGHT_MIN

STATE_NAME = "state"  # below the home: the catalog, snapshots
WORKER_COMMAND = (sys.executable, "-m", "stateroom.daemon.engine.worker")
SIZE_MAX = 2**50  # bytes
_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the daemon waits, and for what. Seconds."""

    load_s: float = 900.0  # a worker that has not said a word of its model is ended; clients wait longer
    silence_s: float = 10.0  # a ready worker without a pulse for so long is reported as silent
    hang_s: float = 120.0  # and is ended after this; one prefill chunk on a slow CPU may take a minute
    stacks_s: float = 1.0  # between: to write where its threads are, or to show that it lives
    unload_park_s: float = 30.0  # for a worker to save sessions when its model is unloaded
    stop_s: float = 5.0  # and then to leave; then SIGTERM
    term_s: float = 1.0  # from SIGTERM to SIGKILL
    restart_first_s: float = 0.25  # pause before the first restart, doubled with each
    restart_most_s: float = 30.0
    stable_s: float = 60.0  # a worker that was ready for so long starts with the first pause again
    awake_after_s: float = 3.0  # requests that have run for so long keep a Mac awake
    awake_until_s: float = 5.0  # until none has for so long
    hold_s: float = 5.0  # requests wait for a restart that is no further away than this
    # At the daemon's end, all of it within 4.5 s: launchd may kill it 5 s after it has asked.
    finals_s: float = 1.0  # for running requests to end as cancelled
    park_s: float = 1.5  # for workers to save sessions, longer by what was left of `finals_s`
    leave_s: float = 0.6  # and then to leave before SIGTERM
    kill_s: float = 0.4  # from SIGTERM to SIGKILL


@dataclass(frozen=True)
class ModelSpec:
    """A model by the id that clients use, and what the worker loads: a path or a Hugging Face id."""

    id: str
    spec: str


@dataclass(frozen=True, kw_only=True)
class Config:
    endpoint: str
    runtime_dir: Path
    models_dir: Path
    state_dir: Path | None = None  # what outlives the daemon; None: nothing does
    keys_dir: Path | None = None  # of the network's keys
    activated: bool = False  # systemd or launchd listens at the endpoint, and hands its socket over
    listen: str | None = None  # a second endpoint, tcp://
    insecure_loopback: bool = False  # tcp:// without keys, on this machine alone
    models: tuple[ModelSpec, ...] = ()  # loaded at start; the first is the default
    allow_any_model: bool = False  # clients may name paths and Hugging Face ids
    kv_budget_bytes: int | None = None  # of all workers together; None: by the machine
    unload_after_s: float | None = None  # a model that nobody used for so long is unloaded; None: never
    quotas: Mapping[str, Quota] = field(default_factory=dict)  # by app, and "default"
    weights: tuple[tuple[str, float], ...] = ()  # of apps whose part of a device isn't 1
    gap_ms: float | None = None  # of running streams; None: by the device
    rows_max: int = BATCH_MAX
    verify_every_s: float | None = None  # sessions are verified this often; None: when asked for
    log_format: LogFormat = "console"
    log_level: str = "info"
    log_content: bool = False
    record: bool = True  # what happens to each request, for `trace`
    disk_bytes_max: int | None = None  # of one model's snapshots; None: see `caches/snapshots/limits.py`
    disk_free_bytes: int | None = None  # what they leave free
    keep_awake: tuple[str, ...] | None = None  # the program that keeps the machine awake; None: none does
    metrics_port: int | None = None  # of the page for Prometheus, on loopback
    log_file: Path | None = None  # beside what goes to stderr
    worker_command: tuple[str, ...] = WORKER_COMMAND
    patience: Patience = field(default_factory=Patience)


def parse_bytes(text: str) -> int:
    """`8GiB`, `500MB`, `1073741824`: a size in bytes.

    Raises:
        Leave: it can't be read, or is nothing.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if found is None or (found[3] and not found[2]):
        raise Leave(CONFIG, f"{text!r} is no size; write it like 8GiB or 500MB.")
    unit = _BINARY[found[2]] if found[3] else _UNITS[found[2]]
    size = float(found[1]) * unit
    if size < 1:
        raise Leave(CONFIG, f"A size of {text!r} leaves no room for anything.")
    if size > SIZE_MAX:
        raise Leave(CONFIG, "A size is 1024 TiB at the most, which no machine has.")
    return int(size)


def parse_weights(given: list[str]) -> tuple[tuple[str, float], ...]:
    """`editor=4`: apps and their weights.

    Raises:
        Leave: one can't be read, is out of range, or is given twice.
    """
    made: dict[str, float] = {}
    for text in given:
        app, _, number = text.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not app or not WEIGHT_MIN <= weight <= WEIGHT_MAX:
            raise Leave(
                CONFIG,
                f"{text!r} is no weight; write it like editor=4, with a number from {WEIGHT_MIN:g} to "
                f"{WEIGHT_MAX:g}.",
            )
        if app in made:
            raise Leave(CONFIG, f"The app {app!r} is given two weights.")
        made[app] = weight
    return tuple(made.items())


def parse_quotas(given: list[str]) -> dict[str, Quota]:
    """`editor=sessions:100,bytes:8GiB`: apps (or `default`, for all others) and the most that each may have.

    Raises:
        Leave: one can't be read, or an app is given two.
    """
    made: dict[str, Quota] = {}
    for text in given:
        app, _, limits = text.rpartition("=")
        if not app or not limits or "/" in app:
            raise Leave(CONFIG, f"{text!r} is no quota; write it like editor=sessions:100,bytes:8GiB.")
        if app in made:
            raise Leave(CONFIG, f"The app {app!r} is given two quotas.")
        asked = dict(part.partition(":")[::2] for part in limits.split(","))
        wrong = sorted(set(asked) - {known.name for known in fields(Quota)})
        if wrong or len(asked) < limits.count(",") + 1:
            said = f"{wrong[0]!r} is none" if wrong else "one is given twice"
            raise Leave(CONFIG, f"A quota is of sessions, bytes, disk and requests; in {text!r} {said}.")
        made[app] = Quota(**{what: _limit(what, number) for what, number in asked.items()})
    return made


def _limit(what: str, number: str) -> int:
    if what in ("bytes", "disk"):
        return parse_bytes(number)
    if not number.isascii() or not number.isdigit():
        raise Leave(CONFIG, f"{number!r} is no number of {what}.")
    return int(number)


def model_id(spec: str) -> str:
    """The id that clients use: a Hugging Face id as it is, else the file's or directory's name."""
    if looks_like_path(spec):
        path = Path(spec)
        return path.stem if path.suffix.lower() == ".gguf" else path.name
    return spec


def looks_like_path(spec: str) -> bool:
    """Whether a model is meant to be a local one; `org/name` is a Hugging Face id unless it exists here."""
    return (
        spec.startswith(("/", "./", "../", "~"))
        or spec.lower().endswith(".gguf")
        or existing_path(spec) is not None
    )


def existing_path(spec: str) -> Path | None:
    """The absolute path of a file or directory; None where none can be reached under that name."""
    try:
        path = Path(spec).expanduser().resolve()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, forbidden, with a NUL, of no known user
        return None


def model_specs(specs: list[str], models_dir: Path) -> tuple[ModelSpec, ...]:
    """The models given at start (installed names, paths, Hugging Face ids), each under an id of its own.

    Raises:
        Leave: a path that isn't there, or two models of one name.
    """
    made: dict[str, ModelSpec] = {}
    for given in specs:
        spec = resolve(given, models_dir)
        if looks_like_path(spec):
            path = existing_path(spec)
            if path is None:
                raise Leave(CONFIG, f"There is no model at {spec}.")
            spec = str(path)
        elif "/" not in spec:  # the id of a model on a hub has one
            raise Leave(
                CONFIG,
                f"There is no model {spec!r}: no path, nor installed. `stateroom model list` names those "
                "that are, `stateroom model add demo` fetches one.",
            )
        known = ModelSpec(model_id(spec), spec)
        if known.id in made:
            raise Leave(CONFIG, f"Two models are called {known.id!r}; rename one of the directories.")
        made[known.id] = known
    return tuple(made.values())
