"""A kernel's text and one call of it, the same for every compiler."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import mlx.core as mx

SIMD_WIDTH = 32
# mlx puts smaller inputs of a Metal kernel into another address space, and compiles it once more for that.
SMALLEST_INPUT = 8

HERE = Path(__file__).parent


def portable_header() -> str:
    return (HERE / "portable.h").read_text()


@dataclass(frozen=True)
class Kernel:
    """A body in the common subset (`portable.h`), the names of its arrays, and its constants (macros).

    Each set of constants is compiled apart; whoever makes them keeps their number small.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    constants: tuple[tuple[str, str], ...] = ()

    def with_constants(self, **constants: int | float | str) -> Kernel:
        written = tuple((name, _literal(value)) for name, value in constants.items())
        return Kernel(self.name, self.inputs, self.outputs, self.body, written)

    @cached_property
    def header(self) -> str:
        return portable_header() + "".join(f"#define {name} {value}\n" for name, value in self.constants)

    @cached_property
    def full_name(self) -> str:
        """One name for one text: mlx and the host's compiler keep what they compiled by it."""
        return f"{self.name}_{hashlib.sha256((self.header + self.body).encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Launch:
    """One call of a kernel: `groups` of `threads` threads (a multiple of 32), each group for itself."""

    kernel: Kernel
    inputs: tuple[mx.array, ...]
    groups: tuple[int, int, int]
    threads: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]

    def __post_init__(self) -> None:
        if self.threads % SIMD_WIDTH:
            raise ValueError(f"{self.threads} threads are no whole number of SIMD groups")
        if len(self.inputs) != len(self.kernel.inputs):
            raise ValueError(f"{self.kernel.name} takes {self.kernel.inputs}, not {len(self.inputs)} arrays")


# The names of portable.h for an output's type.
TYPE_MACROS: Mapping[mx.Dtype, str] = {mx.float32: "float", mx.float16: "HALF", mx.bfloat16: "BFLOAT"}


def small_input(numbers: list[int]) -> mx.array:
    """int32, padded with zeros to the size that Metal compiles only once."""
    return mx.array(numbers + [0] * (SMALLEST_INPUT - len(numbers)), mx.int32)


def _literal(value: int | float | str) -> str:
    return f"({value!r}f)" if isinstance(value, float) else str(value)
