"""Whether a file of weights is whole: its header says how long it must be. Nothing but headers is read.

Formats: https://github.com/huggingface/safetensors#format,
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import BinaryIO

HEADER_BYTES_MAX = 100 * 2**20  # what safetensors itself allows
ENTRIES_MAX = 1_000_000  # of a GGUF file, in any of its lists: larger vocabularies don't exist
TEXT_BYTES_MAX = 16 * 2**20  # a chat template has some kilobytes
GGUF_MAGIC = b"GGUF"
ALIGNMENT = 32  # of GGUF's tensors, unless it says otherwise
# Bytes of GGUF's kinds of value, by their number.
VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
UINT32, TEXT, ARRAY = 4, 8, 9
# (values, bytes) of a block of the types of tensor that mlx reads; of others only the beginning is known.
BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 30: (1, 2)}


class NotWhole(ValueError):
    """What is wrong with the file, without its name."""


def check(path: Path) -> None:
    """Raises NotWhole for a damaged or cut `.safetensors` or `.gguf` file, OSError when it can't be read."""
    length = path.stat().st_size
    with path.open("rb") as file:
        try:
            needs = (_gguf if path.suffix.lower() == ".gguf" else _safetensors)(file, length)
        except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise NotWhole("has no header that can be read") from error
        if length < needs:
            raise NotWhole(f"is cut off: it has {length:,} of {needs:,} bytes")
        file.seek(max(0, length - 1))
        file.read(1)  # the end, too, can be read


def _safetensors(file: BinaryIO, length: int) -> int:
    (header_bytes,) = struct.unpack("<Q", file.read(8))
    if header_bytes > min(length, HEADER_BYTES_MAX):
        raise ValueError(header_bytes)
    header = json.loads(file.read(header_bytes))
    ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    return 8 + int(header_bytes) + max(ends, default=0)


def _gguf(file: BinaryIO, length: int) -> int:
    if file.read(4) != GGUF_MAGIC:
        raise ValueError("magic")
    _, tensors, entries = _numbers(file, "<IQQ")
    alignment = ALIGNMENT
    for _ in range(_counted(entries)):
        name, (kind,) = _text(file), _numbers(file, "<I")
        if name == b"general.alignment" and kind == UINT32:
            (alignment,) = _numbers(file, "<I")
        else:
            _skip(file, kind)
    ends = [_tensor_end(file) for _ in range(_counted(tensors))]
    begin = -(-file.tell() // alignment) * alignment
    return begin + max(ends, default=0)


def _tensor_end(file: BinaryIO) -> int:
    _text(file)
    (dimensions,) = _numbers(file, "<I")
    shape = _numbers(file, f"<{_counted(dimensions)}Q")
    kind, offset = _numbers(file, "<IQ")
    values, size = BLOCKS.get(kind, (1, 0))
    return offset + math.prod(shape) // values * size


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == TEXT:
        _text(file)
    elif kind == ARRAY:
        inner, count = _numbers(file, "<IQ")
        if inner == TEXT:
            for _ in range(_counted(count)):
                _text(file)
        else:
            file.seek(VALUE_BYTES[inner] * _counted(count), 1)
    else:
        file.seek(VALUE_BYTES[kind], 1)


def _text(file: BinaryIO) -> bytes:
    (size,) = _numbers(file, "<Q")
    if size > TEXT_BYTES_MAX:
        raise ValueError(size)
    return file.read(size)


def _numbers(file: BinaryIO, form: str) -> tuple[int, ...]:
    return struct.unpack(form, file.read(struct.calcsize(form)))


def _counted(count: int) -> int:
    if count > ENTRIES_MAX:
        raise ValueError(count)
    return count
