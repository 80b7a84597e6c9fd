"""Compiles a kernel for the host with g++ and runs it there, as slow as it is strict (see emulation.h).

For tests, and for whoever writes a kernel without the GPU it is for.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from stateroom.kernels.source import HERE, Kernel, Launch

COMPILE_TIMEOUT_S = 120.0
BUILT_MAX = 256
FLAGS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-U_FORTIFY_SOURCE",
    "-Wall",
    "-Wextra",
)
# The poisoned value of an output that a kernel never writes: NaN in every float type.
POISON = 0xFF

C_TYPES = {
    mx.float32: "float",
    mx.float16: "HALF",
    mx.bfloat16: "BFLOAT",
    mx.uint32: "uint32_t",
    mx.int32: "int32_t",
}
# numpy has no bfloat16: 16-bit floats pass as their bits.
AS_NUMPY = {mx.float16: mx.uint16, mx.bfloat16: mx.uint16}


Run = Callable[..., bytes]


class EmulationError(RuntimeError):
    """The kernel did what a GPU would have let pass: see the message."""


def compiler() -> str | None:
    return shutil.which("g++")


def host_run(launch: Launch, backwards: bool = False) -> list[mx.array]:
    """The outputs of `launch`; `backwards` turns the order of the threads around, which must change nothing.

    Raises EmulationError, or RuntimeError when there is no compiler or it refuses the text.
    """
    types = tuple(C_TYPES[array.dtype] for array in launch.inputs)
    run = _built(launch.kernel, types, tuple(C_TYPES[dtype] for dtype in launch.dtypes))
    return call(run, launch, backwards)


def call(run: Run, launch: Launch, backwards: bool) -> list[mx.array]:
    """What `host_run` does, with the library's function in hand."""
    given = [_to_numpy(array) for array in launch.inputs]
    made = [
        np.full((*shape, dtype.size), POISON, np.uint8)
        for shape, dtype in zip(launch.shapes, launch.dtypes, strict=True)
    ]
    arrays = [*given, *made]
    counts = [a.size for a in given] + [a.size // a.shape[-1] for a in made]
    message: bytes = run(
        (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays)),
        (ctypes.c_size_t * len(arrays))(*counts),
        (ctypes.c_int * 3)(*launch.groups),
        launch.threads,
        backwards,
    )
    if message:
        raise EmulationError(f"{launch.kernel.name}: {message.decode()}")
    return [
        mx.array(a).view(dtype).reshape(shape)
        for a, shape, dtype in zip(made, launch.shapes, launch.dtypes, strict=True)
    ]


def host_source(kernel: Kernel, input_types: tuple[str, ...], output_types: tuple[str, ...]) -> str:
    arrays = [f"const {kind}" for kind in input_types] + list(output_types)
    names = [*kernel.inputs, *kernel.outputs]
    parameters = ", ".join(f"emulation::Array<{t}> {n}" for t, n in zip(arrays, names, strict=True))
    passed = ", ".join(f"{{static_cast<{t}*>(data[{i}]), count[{i}]}}" for i, t in enumerate(arrays))
    return f"""{(HERE / "emulation.h").read_text()}
{kernel.header}
static void body({parameters}) {{
#line 1 "{kernel.name}"
{kernel.body}
}}
extern "C" __attribute__((visibility("default"))) const char* run(
    void* const* data, const size_t* count, const int* groups, int threads, bool backwards) {{
  return emulation::launch(groups, threads, backwards, [&] {{ body({passed}); }});
}}
"""


@lru_cache(maxsize=BUILT_MAX)
def _built(kernel: Kernel, input_types: tuple[str, ...], output_types: tuple[str, ...]) -> Run:
    return loaded(host_source(kernel, input_types, output_types), kernel.name)


def loaded(text: str, name: str) -> Run:
    """The function `run` of the C++ that `host_source` makes."""
    run = ctypes.CDLL(str(_compiled(text, name))).run
    run.restype = ctypes.c_char_p
    run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_bool)
    return run


def _compiled(text: str, name: str) -> Path:
    gxx = compiler()
    if gxx is None:
        raise RuntimeError("There is no g++ to compile a kernel for the host.")
    folder = cache_folder()
    key = hashlib.sha256("\0".join([text, *FLAGS, gxx]).encode()).hexdigest()[:24]
    library = folder / f"{name}-{key}.so"
    if library.exists():
        return library
    # Another process may compile the same: each writes a file of its own, the last rename wins.
    unfinished = folder / f"{name}-{key}.{os.getpid()}"
    done = subprocess.run(
        [gxx, *FLAGS, "-x", "c++", "-", "-o", str(unfinished)],
        input=text,
        capture_output=True,
        text=True,
        timeout=COMPILE_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"g++ refuses {name}:\n{done.stderr}")
    os.replace(unfinished, library)
    return library


def cache_folder() -> Path:
    """Where compiled kernels stay, `$XDG_CACHE_HOME/stateroom/kernels`; nobody else may write there."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "stateroom" / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _to_numpy(array: mx.array) -> np.ndarray:
    bits = AS_NUMPY.get(array.dtype)
    return np.ascontiguousarray(np.array(array if bits is None else array.view(bits)))
