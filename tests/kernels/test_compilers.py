"""The text that Metal and CUDA get, as far as a machine without either can compile it.

mlx writes the function around a body (its `custom_kernel.cpp` of either back end); the same is written here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest
from tests.kernels.test_packed_attention import SHAPES, Shape, drawn

from stateroom.kernels import build, host
from stateroom.kernels.host import C_TYPES
from stateroom.kernels.join_segments.fused import join_segments
from stateroom.kernels.packed_attention.fused import blocks_launch
from stateroom.kernels.source import HERE, Launch

CUDA_TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.uint32: "uint32_t",
    mx.int32: "int32_t",
}
NVCC = ("nvcc", "-std=c++17", "-arch=sm_80", "-cubin", "-Xptxas", "-v", "-Werror", "all-warnings")
NVCC_TIMEOUT_S = 240.0
# As many queries of one KV head as a thread group takes at the largest width.
FULL = Shape(8, 1, 1, 11, 256, 256, [(0, 11), (2, 3)], (4, 64), (4, 64))


def launches() -> list[Launch]:
    """Every kernel: each head width and dtype, dense and 4 and 8 bits, one query and several."""
    made = []
    for name, dtype in [
        ("ragged", mx.float16),
        ("affine 4", mx.bfloat16),
        ("head 256 in fours", mx.bfloat16),
        ("k8 v4", mx.float32),
        ("many queries", mx.bfloat16),
        ("registers full", mx.bfloat16),
    ]:
        case = drawn(FULL if name == "registers full" else SHAPES[name], dtype)
        made.append(blocks_launch(case.queries, case.keys, case.values, case.spans, case.scale, None, 512))
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        join_segments(
            lambda launch: _keep(made, launch), mx.zeros((1, 1, 1, 2, 37)), mx.zeros((1, 1, 1, 2)), dtype
        )
    return made


def _keep(made: list[Launch], launch: Launch) -> list[mx.array]:
    made.append(launch)
    return [mx.zeros(shape) for shape in launch.shapes]


def cuda_text(launch: Launch) -> str:
    kernel = launch.kernel
    inputs = [f"const {CUDA_TYPES[a.dtype]}* {n}" for a, n in zip(launch.inputs, kernel.inputs, strict=True)]
    outputs = [f"{CUDA_TYPES[d]}* {n}" for d, n in zip(launch.dtypes, kernel.outputs, strict=True)]
    return f"""
#define inf (1.0f / 0.0f)
{kernel.header}
namespace mlx::core::cu {{
__global__ void custom_kernel_{kernel.full_name}({", ".join(inputs + outputs)}) {{
{kernel.body}
}}
}}
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_cuda_compiles_and_keeps_its_sums_in_registers(tmp_path: Path) -> None:
    texts = launches()
    for number, launch in enumerate(texts):
        # mlx compiles each alone: the constants of one are macros that the next would trip over.
        (tmp_path / f"{number}.cu").write_text(
            "#include <cstdint>\n#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n" + cuda_text(launch)
        )
    for number in range(len(texts)):
        done = subprocess.run(
            [*NVCC, "-o", f"{number}.cubin", f"{number}.cu"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=NVCC_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr, done.stderr
        assert (tmp_path / f"{number}.cubin").stat().st_size > 0


# Metal's words, over the emulation: enough to run the Metal branch of portable.h.
METAL_WORDS = """
#define __METAL_VERSION__ 320
#define device
#define constant
#define threadgroup static
struct uint3 { unsigned x, y, z; };
typedef emulation::Half half;
typedef emulation::BFloat bfloat16_t;
typedef unsigned short ushort;
namespace metal {
enum class mem_flags { mem_threadgroup };
inline float simd_sum(float x) { return emulation::simd_sum(x, 0); }
inline float simd_max(float x) { return emulation::simd_max(x, 0); }
inline float simd_shuffle(float x, ushort lane) { return emulation::simd_shuffle(x, lane, 0); }
namespace fast { inline float exp(float x) { return std::exp(x); } }
namespace precise { inline float log(float x) { return std::log(x); } }
}
using namespace metal;
inline void threadgroup_barrier(mem_flags) { emulation::group_barrier(0); }
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
"""
# What mlx offers, and how it is had here.
METAL_POSITIONS = {
    "threadgroup_position_in_grid": "uint3{unsigned(at.group_position[0]), unsigned(at.group_position[1]),"
    " unsigned(at.group_position[2])}",
    "thread_index_in_threadgroup": "unsigned(at.thread)",
    "thread_index_in_simdgroup": "unsigned(at.thread % 32)",
    "simdgroup_index_in_threadgroup": "unsigned(at.thread / 32)",
    "thread_position_in_grid": "uint3{}",
}


def metal_text(launch: Launch) -> str:
    """The function that mlx writes, and one that runs it on the host."""
    kernel = launch.kernel
    source = build.METAL_POSITIONS + kernel.body
    named = [position for position in METAL_POSITIONS if position in source]
    inputs = [
        f"const {'constant' if array.size < 8 else 'device'} {C_TYPES[array.dtype]}"
        f"{'&' if array.ndim == 0 else '*'} {name}"
        for array, name in zip(launch.inputs, kernel.inputs, strict=True)
    ]
    outputs = [f"device {C_TYPES[d]}* {n}" for d, n in zip(launch.dtypes, kernel.outputs, strict=True)]
    positions = [f"{'uint3' if 'position' in name else 'unsigned'} {name}" for name in named]
    types = [C_TYPES[array.dtype] for array in launch.inputs] + [C_TYPES[dtype] for dtype in launch.dtypes]
    passed = [f"static_cast<{kind}*>(data[{i}])" for i, kind in enumerate(types)]
    return f"""{(HERE / "emulation.h").read_text()}{METAL_WORDS}{kernel.header}
static void body({", ".join(inputs + outputs + positions)}) {{
{source}
}}
extern "C" __attribute__((visibility("default"))) const char* run(
    void* const* data, const size_t*, const int* groups, int threads, bool backwards) {{
  return emulation::launch(groups, threads, backwards, [&] {{
    const emulation::State& at = emulation::current();
    body({", ".join(passed + [METAL_POSITIONS[name] for name in named])});
  }});
}}
"""


@pytest.mark.skipif(host.compiler() is None, reason="no g++")
def test_the_metal_form_does_what_the_host_form_does() -> None:
    """Its macros, the positions that mlx looks for in the text, and small inputs in another address space."""
    for launch in launches():
        metal = host.call(host.loaded(metal_text(launch), "metal"), launch, False)
        for one, other in zip(metal, host.host_run(launch), strict=True):
            assert mx.array_equal(one, other, equal_nan=True)


def test_a_compiler_is_there_where_it_must_be() -> None:
    """Other tests skip without one; where all of them are to run, that would be a failure unseen."""
    assert host.compiler() or not os.environ.get("STATEROOM_TESTS_NEED_GXX")
