"""A snapshot in one file that people can carry, with what it shares in it. No mlx.

    stateroom-snapshot\\n, 8 bytes: length of the manifest (little endian), the manifest, and then each of its
    files in the order that it tells: tokens, chat, tail, runs. Nothing follows.

There are no names in it, so that nothing in it can be taken for a path.
"""

from __future__ import annotations

import errno
import os
import secrets
from dataclasses import replace
from typing import BinaryIO

from stateroom.caches.snapshots import durable, manifest
from stateroom.caches.snapshots.library import ID_BYTES, Files, Library
from stateroom.caches.snapshots.manifest import MANIFEST_BYTES_MAX, About, Manifest, Part
from stateroom.caches.snapshots.reading import CHAT, TAIL, TOKENS, Reader, by_digest, wrong_with
from stateroom.caches.snapshots.refusals import Corrupt
from stateroom.caches.snapshots.tensors import Buffer, Told, digest_of, file_bytes, header, wrong_in

MAGIC = b"stateroom-snapshot\n"
SIZE_BYTES = 8
BLOCK_BYTES = 2**20


class Carried:
    """A snapshot as the file that people carry, to be read from anywhere in it. Any thread, one at a time.

    Every byte was checked when this was made. Its files stay open, so that it stays whole though the snapshot
    is removed meanwhile.

    Attributes:
        total: bytes of the file.
    """

    def __init__(self, library: Reader, snapshot: str) -> None:
        """Raises `Missing`, `Corrupt`, `Mismatch` for another format."""
        found = library.manifest(snapshot)
        head = manifest.encode(replace(found, replaces=None))
        self._head = MAGIC + len(head).to_bytes(SIZE_BYTES, "little") + head
        self._files: list[tuple[int, int]] = []  # descriptor and bytes of each
        self.total = len(self._head)
        try:
            for file, as_told in library.files(found):
                descriptor, size = durable.open_checked(file, _parts(as_told))
                self._files.append((descriptor, size))
                self.total += size
        except BaseException as error:
            self.close()
            if isinstance(error, Corrupt):
                library.manifest(snapshot)  # `Missing`, when it was removed meanwhile
            raise

    def read(self, at: int, most: int) -> bytes:
        """So many bytes from there on, or what there is. Raises OSError when the disk fails."""
        made = [self._head[at : at + most]]
        left, start = most - len(made[0]), len(self._head)
        for descriptor, size in self._files:
            within = max(at - start, 0)
            while left and within < size:
                got = os.pread(descriptor, min(left, size - within), within)
                if not got:
                    raise OSError(errno.EIO, "a file of the snapshot became shorter")
                made.append(got)
                within, left = within + len(got), left - len(got)
            start += size
        return b"".join(made)

    def close(self) -> None:
        for descriptor, _ in self._files:
            os.close(descriptor)
        self._files.clear()


def export(library: Reader, snapshot: str, to: BinaryIO) -> int:
    """Writes it, once all of it was checked; gives the bytes written. Raises as `Carried` does."""
    carried = Carried(library, snapshot)
    try:
        for at in range(0, carried.total, BLOCK_BYTES):
            to.write(carried.read(at, BLOCK_BYTES))
    finally:
        carried.close()
    return carried.total


def _parts(as_told: Part | tuple[Told, ...]) -> list[tuple[int, str]]:
    """Lengths and checksums of what a file is made of."""
    if isinstance(as_told, Part):
        return [(as_told.nbytes, as_told.digest)]
    start = header(as_told)
    return [(len(start), digest_of(start)), *((tensor.nbytes, tensor.digest) for tensor in as_told)]


def take_in(library: Library, carried: BinaryIO, about: About, file: str = "the file") -> Manifest:
    """A new snapshot from a file, under a new id. `carried` must be seekable; `file`: how errors call it.

    Raises `Corrupt` for what isn't such a file from its first byte to its last, `Mismatch` for another
    format, and what `Library.write` raises; whose model it is of is asked when it is restored.
    """
    found = _manifest(carried, file)
    told: list[Part | tuple[Told, ...]] = [found.tokens, found.chat, found.tail]
    told += [run.tensors for run in by_digest(found).values()]
    sizes = [part.nbytes if isinstance(part, Part) else file_bytes(part) for part in told]
    start = carried.tell()
    end = carried.seek(0, 2)
    if end - start != sum(sizes):
        raise Corrupt(file, f"has {end - start} bytes behind its manifest, not {sum(sizes)}")
    carried.seek(start)
    contents: list[Buffer] = []
    for size, part in zip(sizes, told, strict=True):
        content = carried.read(size)
        wrong = wrong_with(content, part) if isinstance(part, Part) else wrong_in(content, part)
        if wrong:
            raise Corrupt(file, wrong)
        contents.append(content)
    made = replace(found, id=secrets.token_hex(ID_BYTES), about=about, replaces=None)
    own: Files = {name: [content] for name, content in zip((TOKENS, CHAT, TAIL), contents, strict=False)}
    shared: dict[str, list[Buffer] | None] = {
        run: [content] for run, content in zip(by_digest(made), contents[3:], strict=True)
    }
    library.add(made, own, shared)
    return made


def _manifest(carried: BinaryIO, file: str) -> Manifest:
    if carried.read(len(MAGIC)) != MAGIC:
        raise Corrupt(file, "is no snapshot")
    size = int.from_bytes(carried.read(SIZE_BYTES), "little")
    if size > MANIFEST_BYTES_MAX:
        raise Corrupt(file, f"tells of a manifest of {size} bytes")
    head = carried.read(size)
    if len(head) != size:
        raise Corrupt(file, "ends in its manifest")
    return manifest.decode(head, file)
