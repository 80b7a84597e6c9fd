"""A snapshot in one file that people can carry, with what it shares in it. No mlx.

    stateroom-snapshot\\n, 8 bytes: length of the manifest (little endian), the manifest, and then each of its
    files in the order that it tells: tokens, chat, tail, runs. Nothing follows.

There are no names in it, so that nothing in it can be taken for a path.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate
from typing import BinaryIO

from stateroom.caches.snapshots import durable, manifest
from stateroom.caches.snapshots.library import ID_BYTES, Library
from stateroom.caches.snapshots.manifest import MANIFEST_BYTES_MAX, About, Manifest, Part
from stateroom.caches.snapshots.reading import CHAT, TAIL, TOKENS, Reader, by_digest
from stateroom.caches.snapshots.refusals import Corrupt
from stateroom.caches.snapshots.tensors import DIGEST_BYTES, Buffer, Told, digest_of, file_bytes, header

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
    for as_told in told:
        _check(carried, _parts(as_told), file)
    made = replace(found, id=secrets.token_hex(ID_BYTES), about=about, replaces=None)
    starts = accumulate(sizes, initial=start)
    contents = [_blocks(carried, at, size) for at, size in zip(starts, sizes, strict=False)]
    own = dict(zip((TOKENS, CHAT, TAIL), contents, strict=False))
    library.add(made, own, dict(zip(by_digest(made), contents[3:], strict=True)))
    return made


def _check(carried: BinaryIO, parts: list[tuple[int, str]], file: str) -> None:
    """Reads what comes next. Raises `Corrupt` when it isn't that."""
    for left, digest in parts:
        state = blake2b(digest_size=DIGEST_BYTES)
        while left and (block := carried.read(min(BLOCK_BYTES, left))):
            state.update(block)
            left -= len(block)
        if state.hexdigest() != digest:
            raise Corrupt(file, "holds other bytes than were written")


def _blocks(carried: BinaryIO, at: int, size: int) -> Iterator[Buffer]:
    """The bytes from there on, which may be more than fit into memory."""
    for start in range(at, at + size, BLOCK_BYTES):
        carried.seek(start)
        yield carried.read(min(BLOCK_BYTES, at + size - start))


def _manifest(carried: BinaryIO, file: str) -> Manifest:
    if carried.read(len(MAGIC)) != MAGIC:
        raise Corrupt(file, "isn't one that `export` wrote")
    size = int.from_bytes(carried.read(SIZE_BYTES), "little")
    if size > MANIFEST_BYTES_MAX:
        raise Corrupt(file, f"tells of a manifest of {size} bytes")
    head = carried.read(size)
    if len(head) != size:
        raise Corrupt(file, "ends in its manifest")
    return manifest.decode(head, file)
