"""Tensors as plain bytes, and safetensors files of them. Pure: no mlx, no disk.

A file's header follows from the tensors' names, types and shapes alone, so that a reader who knows those can
tell every byte of it; the rest is covered by one checksum for each tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod

DIGEST_BYTES = 32
ALIGNMENT = 8  # of the header, as the format's own writer pads it
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip  # of each of the format's types that mlx has

Buffer = bytes | bytearray | memoryview


def digest_of(*parts: Buffer) -> str:
    """BLAKE2b of the parts in a row: 64 hexadecimal digits."""
    state = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(part)
    return state.hexdigest()


@dataclass(frozen=True, slots=True)
class Plain:
    """A tensor in row-major order. `dtype`: the format's word for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: Buffer


@dataclass(frozen=True, slots=True)
class Told:
    """The same without its content."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def told(tensors: Iterable[Plain]) -> tuple[Told, ...]:
    """With checksums; this is where the bytes are hashed."""
    return tuple(Told(t.name, t.dtype, t.shape, digest_of(t.content)) for t in tensors)


def name_of(tensors: Sequence[Told]) -> str:
    """What a file of these is called: equal names, equal bytes."""
    return digest_of(json.dumps([[t.name, t.dtype, t.shape, t.digest] for t in tensors]).encode())


def header(tensors: Sequence[Told]) -> bytes:
    """The bytes of a safetensors file before the tensors' own."""
    entries = {}
    at = 0
    for tensor in tensors:
        end = at + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def file_bytes(tensors: Sequence[Told]) -> int:
    """How long a file of these is."""
    return len(header(tensors)) + sum(tensor.nbytes for tensor in tensors)


def wrong_in(content: Buffer, tensors: Sequence[Told]) -> str | None:
    """What of a file isn't as told, in words; None: every byte is."""
    if len(content) != file_bytes(tensors):
        return f"has {len(content)} bytes, not {file_bytes(tensors)}"
    start = header(tensors)
    if content[: len(start)] != start:
        return "has another header"
    for tensor, part in cut(content, tensors):
        if digest_of(part) != tensor.digest:
            return f"holds other bytes for the tensor {tensor.name}"
    return None


def cut(content: Buffer, tensors: Sequence[Told]) -> Iterator[tuple[Told, memoryview]]:
    """Each tensor's bytes in a file that is as long as it should be."""
    at = len(header(tensors))
    for tensor in tensors:
        yield tensor, memoryview(content)[at : at + tensor.nbytes]
        at += tensor.nbytes
