"""Models: whether the files of each are there, whole, and can be read in time.

A disk that sleeps or is gone, or macOS's privacy settings (a model in Documents, on a volume), let a program
wait for ever without a word; so each model is looked at with a limit of time.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stateroom.daemon.commands.terminal import size
from stateroom.daemon.doctor import configuration, service, weights
from stateroom.daemon.doctor.check import Check, noted, passed, problem
from stateroom.daemon.doctor.weights import NotWhole
from stateroom.daemon.models import DEMO, list_installed, models_dir
from stateroom.daemon.readable import within

LOOK_S = 20.0  # for all of a model's files; only their headers and ends are read
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
PRIVACY = "Let the terminal into it (System Settings, Privacy & Security), or move the model to your home."
AWAKE = "Is its disk there, and awake? macOS may be asking whether it may be read."


def models() -> Iterator[Check]:
    """Those that are installed, and local ones that the configuration or the service name."""
    folder = models_dir()
    found = [(model.name, model.path) for model in list_installed(folder)]
    named = [*configuration.models(), *service.models()]
    found += [(spec, path) for spec in named if (path := _local(spec)) is not None]
    if not found:
        yield noted("models", "none installed", "stateroom model add demo")
    for name, path in {path: (name, path) for name, path in found}.values():
        yield model(name, path)


def _local(spec: str) -> Path | None:
    """Where it is; None of one that isn't named by a whole path."""
    try:
        path = Path(spec).expanduser()
    except RuntimeError:  # of no known user
        return None
    return path if path.is_absolute() else None


def model(name: str, path: Path, limit_s: float = LOOK_S) -> Check:
    """One of them. `path`: its folder, or its `.gguf` file."""
    again = "Remove it and add it again."
    if name == DEMO and path.parent == models_dir():
        again = "stateroom model remove demo; stateroom model add demo"
    try:
        nbytes = within(limit_s, lambda: _look(path))
    except TimeoutError:
        return problem("model", f"{name}: {path} gives no answer within {limit_s:g} s", AWAKE)
    except FileNotFoundError as error:
        return problem("model", f"{name}: there is no {error.filename}", again)
    except OSError as error:
        private = sys.platform == "darwin" and error.errno in (errno.EPERM, errno.EACCES)
        advice = PRIVACY if private else f"chmod -R u+rX {path}"
        return problem("model", f"{name}: {error.filename or path} can't be read: {error.strerror}", advice)
    except NotWhole as error:
        return problem("model", f"{name}: {error}", again)
    return passed("model", f"{name}: whole, {size(nbytes)} at {path}")


def _look(path: Path) -> int:
    """The bytes of its weights. Raises OSError, NotWhole."""
    files = [path] if path.is_file() else _files(path)
    for file in files:
        try:
            weights.check(file)
        except NotWhole as error:
            raise NotWhole(f"{file} {error}") from error
    return sum(file.stat().st_size for file in files)


def _files(folder: Path) -> list[Path]:
    """The files of weights in a folder: one GGUF file, or what mlx-lm's form has."""
    inside = sorted(folder.iterdir())
    ggufs = [path for path in inside if path.suffix.lower() == ".gguf"]
    if ggufs and not (folder / CONFIG).exists():
        return ggufs
    told = _read(folder / CONFIG)
    if not isinstance(told.get("model_type"), str):
        raise NotWhole(f"{folder / CONFIG} names no model_type")
    found = [path for path in inside if path.suffix == ".safetensors"]
    if (folder / INDEX).exists():
        parts = sorted(set(_read(folder / INDEX).get("weight_map", {}).values()))
        found = [folder / part for part in parts]  # one that isn't there is told by its name
    if not found:
        raise NotWhole(f"{folder} has no .safetensors file")
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_bytes())
    except ValueError as error:
        raise NotWhole(f"{path} is no JSON") from error
    if not isinstance(told, dict):
        raise NotWhole(f"{path} is no JSON object")
    return told
