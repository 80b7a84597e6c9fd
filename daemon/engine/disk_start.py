"""Where a worker's snapshots are, and what its model is known by there."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stateroom.caches.snapshots import fingerprint, weights
from stateroom.caches.snapshots.library import Library
from stateroom.caches.snapshots.limits import BYTES_MAX, Limits, floor_of
from stateroom.caches.snapshots.places import library_of
from stateroom.caches.snapshots.refusals import InUse
from stateroom.daemon.engine.disk import Disk
from stateroom.daemon.engine.files import Files
from stateroom.daemon.engine.kept import kept_of
from stateroom.daemon.link import Kept

if TYPE_CHECKING:
    from stateroom.daemon.engine.engine import Engine
    from stateroom.daemon.engine.model import LoadedModel

DIGESTS = "digests.json"  # checksums of weight files, below the state directory
OFF = "off"
WAIT_S, POLL_S = 5.0, 0.05  # for another process to let go of the library


def begin(
    engine: Engine, state: Path | None, bytes_max: int | None = None, free_min_bytes: int | None = None
) -> str:
    """Gives the engine its disk below `state`; says "on", or why there is none: it serves all the same."""
    if state is None:
        return f"{OFF}: no place was given for them"
    try:
        library = _library(library_of(state, engine.loaded.id))
        if free_min_bytes is None:
            free_min_bytes = floor_of(shutil.disk_usage(library.folder).total)
        library.limits = Limits(BYTES_MAX if bytes_max is None else bytes_max, free_min_bytes)
    except InUse:
        return f"{OFF}: another process has them open"
    except OSError as error:
        return f"{OFF}: {error.strerror or error}"
    model = model_of(engine.loaded, state / DIGESTS)
    engine.disk = Disk(engine, library, Files(), model, lambda: int(time.time() * 1000))
    return "on"


def _library(folder: Path) -> Library:
    """A worker whose daemon was killed leaves within a second: it may still be there."""
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            return Library(folder)
        except InUse:
            if time.monotonic() > until_s:
                raise
            time.sleep(POLL_S)


def model_of(loaded: LoadedModel, digests: Path) -> Callable[[], Mapping[str, str]]:
    """The fingerprint, made when it is first asked for: by the model's files, or of what was loaded."""
    known: list[Mapping[str, str]] = []
    path = loaded.path
    if path is None:
        known.append(weights.of_model(loaded.model, loaded.config))

    def model() -> Mapping[str, str]:
        if not known:
            assert path is not None
            known.append(fingerprint.of_path(path, loaded.facts["dtype"], fingerprint.Digests(digests)))
        return known[0]

    return model


def contents(engine: Engine) -> tuple[list[Kept], list[str]]:
    """The snapshots that are there, and ids of those that can't be read."""
    if engine.disk is None:
        return [], []
    library = engine.disk.library
    return [kept_of(entry) for entry in library.entries.values()], list(library.broken)
