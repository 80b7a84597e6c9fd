"""Where a worker's snapshots are, and what its model is known by there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stateroom.caches.snapshots import fingerprint, weights
from stateroom.caches.snapshots.library import Library
from stateroom.caches.snapshots.limits import Limits
from stateroom.caches.snapshots.places import library_of
from stateroom.caches.snapshots.refusals import InUse
from stateroom.daemon.engine.disk import Disk, kept_of
from stateroom.daemon.engine.files import Files
from stateroom.daemon.link import Kept

if TYPE_CHECKING:
    from stateroom.daemon.engine.engine import Engine
    from stateroom.daemon.engine.model import LoadedModel

DIGESTS = "digests.json"  # checksums of weight files, below the state directory
OFF = "off"


def begin(engine: Engine, state: Path | None, limits: Limits | None = None) -> str:
    """Gives the engine its disk below `state`; says "on", or why there is none: it serves all the same."""
    if state is None:
        return f"{OFF}: no place was given for them"
    try:
        library = Library(library_of(state, engine.loaded.id), limits)
    except InUse:
        return f"{OFF}: another process has them open"
    except OSError as error:
        return f"{OFF}: {error.strerror or error}"
    model = model_of(engine.loaded, state / DIGESTS)
    engine.disk = Disk(engine, library, Files(), model, lambda: int(time.time() * 1000))
    return "on"


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
