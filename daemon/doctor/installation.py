"""Which Stateroom runs here, from where, and with which packages."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from pathlib import Path

from stateroom.daemon.doctor.check import Check, noted, passed, problem

PACKAGES = ("stateroom", "pyzmq", "msgpack", "mlx", "mlx-lm", "structlog", "pydantic", "typer", "rich")
INSTALL = "pip install 'stateroom[daemon]' (Linux with an NVIDIA GPU: 'stateroom[daemon,cuda]')"


def python() -> Iterator[Check]:
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        yield problem("python", found, "mlx needs Apple silicon and a native (arm64) Python.")
    else:
        yield passed("python", found)


def program() -> Iterator[Check]:
    """What `stateroom` means in this shell, and what runs."""
    here = Path(sys.executable).parent
    found = f"{version('stateroom')}, {_kind()}, in {here}"
    first = shutil.which("stateroom")
    if first is None:
        yield noted("program", f"{found}; not on PATH", f"Add {here} to PATH, or activate the environment.")
    elif Path(first).resolve().parent != here.resolve():
        yield noted(
            "program", f"{found}; but `stateroom` is {first}", f"Put {here} before it on PATH, or keep one."
        )
    else:
        yield passed("program", found)


def _kind() -> str:
    told = json.loads(distribution("stateroom").read_text("direct_url.json") or "{}")
    if told.get("dir_info", {}).get("editable"):
        return f"an editable install of {told['url'].removeprefix('file://')}"
    return "an installed wheel"


def packages() -> Iterator[Check]:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    wrong = [
        f"{name} is {version(name)}, not {wanted}"
        for name, wanted in sorted(_pinned())
        if name not in missing and version(name) != wanted
    ]
    if missing:
        yield problem("packages", f"not installed: {', '.join(missing)}", INSTALL)
    elif wrong:
        yield problem("packages", f"another version than this release needs: {', '.join(wrong)}", INSTALL)
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
