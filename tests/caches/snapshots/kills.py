"""Run as a program: kills processes that save, and looks at what they leave. Says what it saw as JSON.

It forks, which is why it is a program of its own: nothing here has loaded mlx or started a thread.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.caches.snapshots.material import (
    EXPECTED,
    MODEL,
    about,
    files,
    material,
    plain_of,
    plain_of_material,
    run,
)
from tests.dying import steps_told

from stateroom.caches.snapshots.content import Material
from stateroom.caches.snapshots.library import Library

STEPS = ("write", "rename", "mkdir", "unlink", "rmdir", "fsync")
STEPS_MAX = 300  # more than one save takes
OLD, NEW = 1, 2


def session(seed: int) -> Material:
    """A run that all have, and one of its own."""
    return material(seed, length=40, runs=(run(0), run(seed, start=11)))


def save(library: Library, seed: int) -> None:
    """In the place of the only one that is there, if one is."""
    replaced = next(iter(library.entries), None)
    library.write(session(seed), MODEL, about("mine", at=seed), replaces=replaced)


def seed_found(folder: Path) -> int | None:
    """Which save is there after a fresh start, whole and with nothing beside it; None: none at all."""
    library = Library(folder)
    try:
        assert not library.broken, library.broken
        assert sum(path.stat().st_size for path in files(library)) == library.used_bytes
        if not library.entries:
            return None
        (found,) = library.entries
        content = library.read(found, EXPECTED)
        seed = content.manifest.about.created_ms
        assert plain_of(content) == plain_of_material(session(seed))
        return seed
    finally:
        library.close()


def forked(work: Callable[[], None]) -> int:
    """The pid of a process that does this and leaves with 0, or 1 when it fails."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def die_at(step: int) -> None:
    """SIGKILL before the n-th call to the system that changes the disk."""
    left = step

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))


def at_every_step(folder: Path, first: bool) -> dict[str, int]:
    """One save is killed before each of its steps; `first`: there was no snapshot before it."""
    seen = {"none": 0, "old": 0, "new": 0}
    template = folder / "template"
    library = Library(template)
    if not first:
        save(library, OLD)
    library.close()
    for step in range(STEPS_MAX):
        there = folder / f"step-{step}"
        shutil.copytree(template, there)

        def work(there: Path = there, step: int = step) -> None:
            opened = Library(there)
            die_at(step)
            save(opened, NEW)

        _, status = os.waitpid(forked(work), 0)
        found = seed_found(there)
        seen[{None: "none", OLD: "old", NEW: "new"}[found]] += 1
        shutil.rmtree(there)
        if status == 0:
            assert found == NEW
            return seen
        assert os.WTERMSIG(status) == signal.SIGKILL
    raise AssertionError("a save never ends")


def at_random(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Processes that save one after the other, killed at any time; what was told as saved must be there."""
    drawn = random.Random(seed)
    seen = {"kills": 0, "saves": 0}
    last = 0
    for _ in range(kills):

        def work(begin: int = last) -> Iterator[None]:
            opened = Library(folder)
            yield
            for n in range(begin + 1, begin + 10_000):
                save(opened, n)
                yield

        told = steps_told(work(), drawn.random() * 0.1)
        found = seed_found(folder) or 0
        assert last + told <= found <= last + told + 1, (last, told, found)
        seen["kills"] += 1
        seen["saves"] += found - last
        last = found
    return seen


def on_a_full_disk(folder: Path) -> dict[str, int]:
    """The system refuses to write more than so many bytes of a file, for many such limits."""
    seen = {"failed": 0, "saved": 0}
    library = Library(folder)
    save(library, OLD)
    before = {path: path.read_bytes() for path in files(library)}
    library.close()
    for most in range(0, 4_000, 97):

        def work(most: int = most, before: dict[Path, bytes] = before) -> None:
            opened = Library(folder)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            try:
                save(opened, OLD)
            except OSError:
                # The process that failed has cleared away everything already.
                assert {path: path.read_bytes() for path in files(opened)} == before
                assert len(opened.entries) == 1
                os._exit(3)

        _, status = os.waitpid(forked(work), 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, 3), code
        seen["failed" if code else "saved"] += 1
        assert seed_found(folder) == OLD
        library = Library(folder)
        before = {path: path.read_bytes() for path in files(library)}
        library.close()
    return seen


if __name__ == "__main__":
    place = Path(sys.argv[1])
    told = {
        "first": at_every_step(place / "first", first=True),
        "replacing": at_every_step(place / "replacing", first=False),
        "random": at_random(place / "random", int(sys.argv[2]), int(sys.argv[3])),
        "full": on_a_full_disk(place / "full"),
    }
    sys.stdout.write(json.dumps(told))
