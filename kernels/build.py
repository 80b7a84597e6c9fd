"""Runs a kernel with mlx on the GPU: built when first called, since construction itself fails without one.

mlx makes the function around a body: one parameter an array, by name. Its grid counts threads, on CUDA too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx

from stateroom.kernels.source import Kernel, Launch

# Each is a compiled GPU program; a model needs a handful (geometry x scheme x two kernels).
BUILT_MAX = 256
# mlx passes a Metal kernel the positions that the text of its body names; our macros are in the header.
METAL_POSITIONS = (
    "// threadgroup_position_in_grid thread_index_in_threadgroup"
    " thread_index_in_simdgroup simdgroup_index_in_threadgroup\n"
)


def gpu_run(launch: Launch) -> list[mx.array]:
    """The outputs, as mlx makes them; raises RuntimeError where there is no GPU."""
    threads = launch.threads
    outputs: list[mx.array] = _built(launch.kernel)(
        inputs=list(launch.inputs),
        grid=(launch.groups[0] * threads, launch.groups[1], launch.groups[2]),
        threadgroup=(threads, 1, 1),
        output_shapes=list(launch.shapes),
        output_dtypes=list(launch.dtypes),
    )
    return outputs


@lru_cache(maxsize=BUILT_MAX)
def _built(kernel: Kernel) -> Callable[..., Any]:
    if mx.metal.is_available():
        return _metal(kernel)
    if mx.cuda.is_available():
        return _cuda(kernel)
    raise RuntimeError(f"The kernel {kernel.name} needs a GPU, and mlx sees neither Metal nor CUDA.")


def _metal(kernel: Kernel) -> Callable[..., Any]:
    return mx.fast.metal_kernel(  # type: ignore[return-value]  # stubbed as object
        name=kernel.full_name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=METAL_POSITIONS + kernel.body,
        header=kernel.header,
    )


def _cuda(kernel: Kernel) -> Callable[..., Any]:
    return mx.fast.cuda_kernel(  # type: ignore[return-value]
        name=kernel.full_name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.body,
        header=kernel.header,
    )
