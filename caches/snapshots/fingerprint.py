"""What KV was computed with, as a few checksums that name what differs. No mlx.

KV of other weights, positions or tokens isn't wrong in a way that anybody would see, so a model is known by
what is in its files, never by its name or path.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from stateroom.caches.snapshots import durable
from stateroom.caches.snapshots.refusals import Corrupt
from stateroom.caches.snapshots.tensors import DIGEST_BYTES, digest_of

WEIGHTS = ("*.safetensors", "*.npz", "*.gguf")
# What makes tokens of text and ids; a chat template makes text, and KV doesn't depend on it.
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "*.model",
    "*.tiktoken",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
NOTES = ("transformers_version", "_name_or_path", "architectures")  # of a configuration; no layer reads them
CHUNK_BYTES = 4 * 2**20
RECENT_NS = 2_000_000_000  # a file changed so lately may change again without another time of change
KNOWN_BYTES_MAX = 4 * 2**20


def of_path(path: Path, dtype: str, known: Digests | None = None) -> dict[str, str]:
    """The fingerprint of a model by its files: a GGUF file, or a folder of mlx-lm's form or with such a file.

    `dtype`: what it computes in, which may differ from what is stored. OSError when a file can't be read.
    """
    known = known or Digests()
    if path.is_file():
        whole = known.of(path)  # weights, configuration and tokenizer
        return {"weights": whole, "config": whole, "tokenizer": whole, "dtype": dtype}
    config = path / "config.json"
    if not config.is_file():
        (file,) = sorted(path.glob("*.gguf"))
        return of_path(file, dtype, known)
    return {
        "weights": _of_files(path, WEIGHTS, known),
        "config": of_config(json.loads(config.read_bytes())),
        "tokenizer": _of_files(path, TOKENIZER, known),
        "dtype": dtype,
    }


def of_config(config: Mapping[str, Any]) -> str:
    """Whatever the order of its keys."""
    told = {name: value for name, value in config.items() if name not in NOTES}
    return digest_of(json.dumps(told, sort_keys=True, default=str).encode())


def _of_files(folder: Path, patterns: Iterable[str], known: Digests) -> str:
    files = sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
    return digest_of(json.dumps([[file.name, known.of(file)] for file in files]).encode())


class Digests:
    """Checksums of files, remembered beside their size, time of change and inode.

    A file whose three are as they were isn't read again: whoever changes one in place and sets its time back
    isn't noticed. A file changed within the last two seconds is never remembered.
    """

    def __init__(self, file: Path | None = None) -> None:
        """`file`: where they are kept; one that can't be read counts as empty, and is replaced."""
        self._file = file
        self._known: dict[str, Any] = {}
        if file is not None:
            try:
                found = json.loads(durable.read(file, KNOWN_BYTES_MAX))
            except (Corrupt, ValueError, RecursionError):
                found = None
            self._known = found if isinstance(found, dict) else {}

    def of(self, path: Path) -> str:
        path = path.resolve()
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            stamp = [status.st_size, status.st_mtime_ns, status.st_ino]
            known = self._known.get(str(path))
            if isinstance(known, list) and known[:3] == stamp and isinstance(known[-1], str):
                return known[-1]
            state = blake2b(digest_size=DIGEST_BYTES)
            while chunk := file.read(CHUNK_BYTES):
                state.update(chunk)
            after = os.fstat(file.fileno())
        unchanged = stamp == [after.st_size, after.st_mtime_ns, after.st_ino]
        if unchanged and time.time_ns() - status.st_mtime_ns > RECENT_NS:
            self._remember(str(path), [*stamp, state.hexdigest()])
        return state.hexdigest()

    def _remember(self, path: str, entry: list[Any]) -> None:
        there = {known: told for known, told in self._known.items() if Path(known).exists()}
        self._known = there | {path: entry}
        if self._file is not None:
            with contextlib.suppress(OSError):  # such as a full disk: then the files are read once more
                self._write(self._file)

    def _write(self, file: Path) -> None:
        durable.make_folder(file.parent)
        staged = file.with_name(f"{file.name}.new-{os.getpid()}")
        durable.remove(staged)
        durable.write(staged, [json.dumps(self._known).encode()])
        durable.move(staged, file)
