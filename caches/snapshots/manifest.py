"""What a snapshot's manifest says, as typed values, and its bytes. Pure.

A manifest is a line `stateroom-manifest <BLAKE2b of the rest>` and then JSON. The line stays as it is in all
versions of the format, so that a newer snapshot is told from a broken one. Nothing is read leniently: an
unknown key, a missing one, or a number that comes as text is `Corrupt`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never, TypeVar

from stateroom.caches.snapshots.refusals import Corrupt, Mismatch
from stateroom.caches.snapshots.tensors import ITEM_BYTES, Told, digest_of, file_bytes, name_of

FORMAT = 1
MAGIC = b"stateroom-manifest "
MANIFEST_BYTES_MAX = 64 * 2**20  # a hundred layers of six planes, in eight runs and a tail, are 1 MB
INTEGER_MAX = 2**53
TOKEN_BYTES = 4
ID = re.compile(r"[0-9a-f]{32}")
DIGEST = re.compile(r"[0-9a-f]{64}")

Fact = int | bool | str
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class About:
    """What people know a snapshot by. Nothing here becomes a path.

    Attributes:
        automatic: it was taken without being asked for, and may go when room is needed.
        created_ms: since 1970.
    """

    owner: str
    model: str
    created_ms: int
    name: str | None = None
    session: str | None = None
    automatic: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A file of the snapshot's own that isn't tensors."""

    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens [start, start + length) of the row in the cache's n-th store, in a file that may be shared."""

    store: int
    start: int
    length: int
    tensors: tuple[Told, ...]

    @property
    def digest(self) -> str:
        return name_of(self.tensors)


@dataclass(frozen=True, slots=True)
class Manifest:
    """`fingerprint`: by part, what the KV was computed with; `facts`: every scalar of the cache."""

    id: str
    about: About
    fingerprint: Mapping[str, str]
    facts: Mapping[str, Fact]
    tokens: Part
    chat: Part
    tail: tuple[Told, ...]
    runs: tuple[Run, ...]
    replaces: str | None = None  # the id of the snapshot in whose place this one is

    @property
    def length(self) -> int:
        """Tokens of the session; as many or fewer have KV."""
        return self.tokens.nbytes // TOKEN_BYTES

    @property
    def stored(self) -> int:
        """Tokens that have KV in it."""
        stored = self.facts.get("length", 0)
        return stored if type(stored) is int else 0

    @property
    def own_bytes(self) -> int:
        """All but the manifest and what is shared."""
        return self.tokens.nbytes + self.chat.nbytes + file_bytes(self.tail)

    @property
    def run_bytes(self) -> dict[str, int]:
        return {run.digest: file_bytes(run.tensors) for run in self.runs}


# ---------------------------------------------------------------- bytes


def encode(manifest: Manifest) -> bytes:
    body = _body(manifest)
    return MAGIC + digest_of(body).encode() + b"\n" + body


def checksum(manifest: Manifest) -> str:
    """As its first line has it: of all that belongs to the snapshot, by their own checksums."""
    return digest_of(_body(manifest))


def _body(manifest: Manifest) -> bytes:
    return json.dumps(_plain(manifest), separators=(",", ":"), allow_nan=False).encode()


def decode(content: bytes, file: Path | str) -> Manifest:
    """Raises `Corrupt`, naming `file`, and `Mismatch` for a manifest of another format that is whole."""
    line, newline, body = content.partition(b"\n")
    if not newline or not line.startswith(MAGIC):
        raise Corrupt(file, "is no manifest")
    if line[len(MAGIC) :] != digest_of(body).encode():
        raise Corrupt(file, "isn't what was written: its checksum differs")
    read = _Reader(file)
    try:
        found = json.loads(body, object_pairs_hook=read.once, parse_constant=read.no_number)
    except (ValueError, RecursionError) as error:
        raise Corrupt(file, "is no JSON") from error
    version = found.get("format") if isinstance(found, dict) else None
    if type(version) is not int:
        raise Corrupt(file, f"has {version!r} for a format")
    if version != FORMAT:
        raise Mismatch("format", str(FORMAT), str(version))
    return read.manifest(found)


def _plain(manifest: Manifest) -> dict[str, Any]:
    about = manifest.about
    return {
        "format": FORMAT,
        "id": manifest.id,
        "replaces": manifest.replaces,
        "about": {
            "owner": about.owner,
            "model": about.model,
            "created_ms": about.created_ms,
            "name": about.name,
            "session": about.session,
            "automatic": about.automatic,
        },
        "fingerprint": dict(manifest.fingerprint),
        "facts": dict(manifest.facts),
        "tokens": {"nbytes": manifest.tokens.nbytes, "digest": manifest.tokens.digest},
        "chat": {"nbytes": manifest.chat.nbytes, "digest": manifest.chat.digest},
        "tail": [_told(tensor) for tensor in manifest.tail],
        "runs": [
            {
                "store": run.store,
                "start": run.start,
                "length": run.length,
                "tensors": [_told(tensor) for tensor in run.tensors],
            }
            for run in manifest.runs
        ],
    }


def _told(tensor: Told) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "nbytes": tensor.nbytes,
        "digest": tensor.digest,
    }


class _Reader:
    """Values of the types that they must have, or `Corrupt`."""

    def __init__(self, file: Path | str) -> None:
        self.file = file

    def refuse(self, why: str) -> Never:
        raise Corrupt(self.file, why)

    def once(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            self.refuse("says something twice")
        return found

    def no_number(self, word: str) -> Never:
        self.refuse(f"says {word} for a number")

    def manifest(self, value: Any) -> Manifest:
        keys = "format id replaces about fingerprint facts tokens chat tail runs"
        found = self.fields(value, keys)
        made = Manifest(
            id=self.text(found["id"], ID),
            about=self.about(found["about"]),
            fingerprint={part: self.text(told) for part, told in self.table(found["fingerprint"]).items()},
            facts={name: self.fact(fact) for name, fact in self.table(found["facts"]).items()},
            tokens=self.part(found["tokens"]),
            chat=self.part(found["chat"]),
            tail=self.tensors(found["tail"]),
            runs=tuple(self.run(run) for run in self.items(found["runs"])),
            replaces=self.maybe(found["replaces"], lambda text: self.text(text, ID)),
        )
        if made.tokens.nbytes % TOKEN_BYTES:
            self.refuse(f"tells of {made.tokens.nbytes} bytes of tokens")
        return made

    def about(self, value: Any) -> About:
        found = self.fields(value, "owner model created_ms name session automatic")
        return About(
            owner=self.text(found["owner"]),
            model=self.text(found["model"]),
            created_ms=self.count(found["created_ms"]),
            name=self.maybe(found["name"], self.text),
            session=self.maybe(found["session"], self.text),
            automatic=self.flag(found["automatic"]),
        )

    def part(self, value: Any) -> Part:
        found = self.fields(value, "nbytes digest")
        return Part(self.count(found["nbytes"]), self.text(found["digest"], DIGEST))

    def run(self, value: Any) -> Run:
        found = self.fields(value, "store start length tensors")
        return Run(
            self.count(found["store"]),
            self.count(found["start"]),
            self.count(found["length"]),
            self.tensors(found["tensors"]),
        )

    def tensors(self, value: Any) -> tuple[Told, ...]:
        made = tuple(self.tensor(each) for each in self.items(value))
        if len({tensor.name for tensor in made}) != len(made):
            self.refuse("names a tensor twice")
        return made

    def tensor(self, value: Any) -> Told:
        found = self.fields(value, "name dtype shape nbytes digest")
        dtype = self.text(found["dtype"])
        if dtype not in ITEM_BYTES:
            self.refuse(f"tells of tensors of type {dtype}")
        shape = tuple(self.count(size) for size in self.items(found["shape"]))
        made = Told(self.text(found["name"]), dtype, shape, self.text(found["digest"], DIGEST))
        if self.count(found["nbytes"]) != made.nbytes:
            self.refuse(f"tells of {found['nbytes']} bytes for the tensor {made.name}, of {made.nbytes}")
        return made

    # ------------------------------------------------------------ plain values

    def fields(self, value: Any, names: str) -> dict[str, Any]:
        found, expected = self.table(value), set(names.split())
        if found.keys() != expected:
            wrong = ", ".join(sorted(found.keys() ^ expected))
            self.refuse(f"has keys that are unknown or missing: {wrong}")
        return found

    def table(self, value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            self.refuse(f"has {type(value).__name__} where a table is due")
        return value

    def items(self, value: Any) -> list[Any]:
        if type(value) is not list:
            self.refuse(f"has {type(value).__name__} where a list is due")
        return value

    def text(self, value: Any, form: re.Pattern[str] | None = None) -> str:
        if type(value) is not str or (form is not None and form.fullmatch(value) is None):
            self.refuse(f"has {value!r} where a text of a certain form is due")
        return value

    def count(self, value: Any) -> int:
        if type(value) is not int or not 0 <= value <= INTEGER_MAX:
            self.refuse(f"has {value!r} where a count is due")
        return value

    def flag(self, value: Any) -> bool:
        if type(value) is not bool:
            self.refuse(f"has {value!r} where true or false is due")
        return value

    def fact(self, value: Any) -> Fact:
        if type(value) in (bool, str):
            return value  # type: ignore[no-any-return]
        return self.count(value)

    def maybe(self, value: Any, read: Callable[[Any], T]) -> T | None:
        return None if value is None else read(value)
