"""Finds OpenBLAS for an engine worker on Linux, where mlx's CPU wheel links the slow reference BLAS.

Preloading it makes prefill 8 to 14 times faster. `$STATEROOM_BLAS` overrides: a library's path, or `none`.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "STATEROOM_BLAS"
INSTALL = (
    "Prefill is slow with the reference BLAS: install OpenBLAS (Debian, Ubuntu: libopenblas0-pthread; "
    "Fedora: openblas-threads; Arch: openblas), or set STATEROOM_BLAS to its library."
)
_ROOTS = (Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib"), Path("/lib64"))
# The builds with their own threads first; the plain one may be without any.
_NAMES = (
    "openblas-pthread/libblas.so.3",
    "openblas-pthread/libopenblas.so.0",
    "libopenblasp.so.0",
    "libopenblas.so.0",
    "libopenblas.so",
)


@dataclass(frozen=True)
class Blas:
    """The library to preload, if any, and a sentence on what to do if there is none."""

    library: Path | None
    hint: str | None = None


def find_blas(
    environment: Mapping[str, str] = os.environ,
    system: str = sys.platform,
    roots: tuple[Path, ...] = _ROOTS,
) -> Blas:
    """The BLAS that a worker should be started with; elsewhere than on Linux none is needed."""
    if system != "linux":
        return Blas(None)
    wanted = environment.get(VARIABLE, "")
    if wanted.lower() == "none":
        return Blas(None, f"{VARIABLE} is none: the reference BLAS is used.")
    if wanted:
        if Path(wanted).is_file():
            return Blas(Path(wanted))
        return Blas(None, f"{VARIABLE} names {wanted}, which is no file: the reference BLAS is used.")
    return next((Blas(path) for path in _candidates(roots) if path.is_file()), Blas(None, INSTALL))


def _candidates(roots: tuple[Path, ...]) -> Iterator[Path]:
    triplet = f"{platform.machine()}-linux-gnu"
    for name in _NAMES:
        for root in roots:
            yield root / triplet / name
            yield root / name


def preloaded(environment: Mapping[str, str], library: Path | None) -> dict[str, str]:
    """The environment of a worker that loads `library` before everything else."""
    made = dict(environment)
    if library is not None:
        made["LD_PRELOAD"] = " ".join(filter(None, [str(library), environment.get("LD_PRELOAD", "")]))
    return made
