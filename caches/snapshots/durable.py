"""Files that are there completely or not at all, also after power was lost. No mlx.

A name is given to a file only after its bytes are on the disk, and whoever gives or takes a name syncs the
directory that holds it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import sys
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from stateroom.caches.snapshots.refusals import Corrupt, InUse
from stateroom.caches.snapshots.tensors import DIGEST_BYTES, Buffer

FILE_MODE, FOLDER_MODE = 0o600, 0o700
BLOCK_BYTES = 2**20  # read at once of a file that may be larger than memory
_FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync alone leaves bytes in the drive's cache


def sync(descriptor: int) -> None:
    """Until the bytes are on the disk itself."""
    if sys.platform == "darwin" and _FULL_SYNC is not None:
        try:
            fcntl.fcntl(descriptor, _FULL_SYNC)
            return
        except OSError:  # a file system that can't
            pass
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """And its parents, private and for good."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(FOLDER_MODE)
    sync_folder(path.parent)


def write(path: Path, parts: Iterable[Buffer]) -> None:
    """A new file, synced; its name isn't until its folder is. OSError, and no file, when it can't be."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE)
    try:
        for part in parts:
            left = memoryview(part).cast("B")
            while left:
                left = left[os.write(descriptor, left) :]
        sync(descriptor)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def move(path: Path, to: Path) -> None:
    """A file or folder gets another name, for good; a file that has it already is replaced."""
    os.rename(path, to)
    sync_folder(to.parent)
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """A file, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read(path: Path, most: int, exactly: int | None = None) -> bytes:
    """The bytes of a file of `exactly` so many, or `most`; `Corrupt` when it isn't there or isn't that."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Corrupt(path, "is no file")
            if exactly is not None and status.st_size != exactly:
                raise Corrupt(path, f"has {status.st_size} bytes, not {exactly}")
            if status.st_size > most:
                raise Corrupt(path, f"has {status.st_size} bytes, more than {most}")
            with open(descriptor, "rb", buffering=0, closefd=False) as file:
                content = file.readall()
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _corrupt(path, error) from error
    if len(content) != status.st_size:
        raise Corrupt(path, f"gave {len(content)} bytes of {status.st_size}")
    return content


def open_checked(path: Path, parts: Iterable[tuple[int, str]]) -> tuple[int, int]:
    """A file that holds these parts, each of so many bytes and that checksum, and nothing else.

    Gives its descriptor and its bytes. Raises `Corrupt`, naming it. It may be larger than memory.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _corrupt(path, error) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Corrupt(path, "is no file")
        at = 0
        for nbytes, digest in parts:
            state = blake2b(digest_size=DIGEST_BYTES)
            end = at + nbytes
            while at < end and (block := os.pread(descriptor, min(BLOCK_BYTES, end - at), at)):
                state.update(block)
                at += len(block)
            if state.hexdigest() != digest:
                raise Corrupt(path, "holds other bytes than were written")
        if status.st_size != at:
            raise Corrupt(path, f"has {status.st_size} bytes, not {at}")
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise _corrupt(path, error) from error
        raise
    return descriptor, at


def _corrupt(path: Path, error: OSError) -> Corrupt | OSError:
    """What a file that can't be opened or read means."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return Corrupt(path, "is missing")
    if error.errno in (errno.EIO, errno.ELOOP):
        return Corrupt(path, f"can't be read: {error.strerror}")
    return error


def lock(path: Path) -> int:
    """Makes this process the only one with the file locked, for as long as the descriptor is open.

    Raises `InUse` when another has it. The lock goes with its process, however that ends.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise InUse(f"another process has {path.parent} open") from None
    return descriptor
