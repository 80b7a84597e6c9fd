// One kernel body, three compilers: Metal, CUDA, and a C++ compiler on the host (emulation.h).
//
// A body is the inside of a kernel function. It sees its inputs and outputs by name, as arrays of one index,
// and its constants as macros. What it may use besides plain C++:
//
//   GROUP_X GROUP_Y GROUP_Z   place of this thread group in the grid of groups
//   THREAD LANE SIMD          index of this thread in its group, in its SIMD group (32 wide), and of that SIMD group
//   SHARED(type, name, n)     memory of the thread group, at the top of the body
//   BARRIER()                 all threads of the group arrive, and see what the others wrote to shared memory
//   SIMD_SUM(x) SIMD_MAX(x)   over the 32 lanes, the same result in each; floats
//   SIMD_SHUFFLE(x, lane)     the value of another lane
//   EXP(x) LOG(x)             float; EXP is the fast one of the GPU
//   HALF BFLOAT               16-bit floats; convert with float(x) and HALF(x)
//   UNROLL                    before a loop whose count is a constant
//   LOWEST                    a finite float below any score: differences with it stay finite, exp of them is 0
//   MINUS_INFINITY            to be stored
//
// Collectives are reached by all 32 lanes together, barriers by all threads. An infinity is only ever stored,
// never computed with, so that a compiler's fast-math rules can't matter.

#if defined(__METAL_VERSION__)

#define GROUP_X int(threadgroup_position_in_grid.x)
#define GROUP_Y int(threadgroup_position_in_grid.y)
#define GROUP_Z int(threadgroup_position_in_grid.z)
#define THREAD int(thread_index_in_threadgroup)
#define LANE int(thread_index_in_simdgroup)
#define SIMD int(simdgroup_index_in_threadgroup)
#define SHARED(type, name, count) threadgroup type name[count]
#define BARRIER() threadgroup_barrier(metal::mem_flags::mem_threadgroup)
#define SIMD_SUM(x) metal::simd_sum(x)
#define SIMD_MAX(x) metal::simd_max(x)
#define SIMD_SHUFFLE(x, lane) metal::simd_shuffle(x, ushort(lane))
#define EXP(x) metal::fast::exp(x)
#define LOG(x) metal::precise::log(x)
#define HALF half
#define BFLOAT bfloat16_t
#define MINUS_INFINITY (-INFINITY)
#define UNROLL _Pragma("clang loop unroll(full)")

#elif defined(__CUDACC__) || defined(__CUDACC_RTC__)

#define GROUP_X int(blockIdx.x)
#define GROUP_Y int(blockIdx.y)
#define GROUP_Z int(blockIdx.z)
#define THREAD int(threadIdx.x)
#define LANE (int(threadIdx.x) & 31)
#define SIMD (int(threadIdx.x) >> 5)
#define SHARED(type, name, count) __shared__ type name[count]
#define BARRIER() __syncthreads()
#define SIMD_SUM(x) portable_sum(x)
#define SIMD_MAX(x) portable_max(x)
#define SIMD_SHUFFLE(x, lane) __shfl_sync(0xffffffffu, x, lane)
#define EXP(x) __expf(x)
#define LOG(x) logf(x)
#define HALF __half
#define BFLOAT __nv_bfloat16
#define MINUS_INFINITY __int_as_float(int(0xff800000u))
#define UNROLL _Pragma("unroll")

__device__ __forceinline__ float portable_sum(float x) {
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

__device__ __forceinline__ float portable_max(float x) {
  for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

#else

#define GROUP_X emulation::current().group_position[0]
#define GROUP_Y emulation::current().group_position[1]
#define GROUP_Z emulation::current().group_position[2]
#define THREAD emulation::current().thread
#define LANE (emulation::current().thread % emulation::SIMD_WIDTH)
#define SIMD (emulation::current().thread / emulation::SIMD_WIDTH)
#define SHARED(type, name, count) static emulation::Shared<type, count> name; name.enter()
#define BARRIER() emulation::group_barrier(__LINE__)
#define SIMD_SUM(x) emulation::simd_sum(x, __LINE__)
#define SIMD_MAX(x) emulation::simd_max(x, __LINE__)
#define SIMD_SHUFFLE(x, lane) emulation::simd_shuffle(x, lane, __LINE__)
#define EXP(x) std::exp(float(x))
#define LOG(x) std::log(float(x))
#define HALF emulation::Half
#define BFLOAT emulation::BFloat
#define MINUS_INFINITY (-INFINITY)
#define UNROLL

#endif

#define LOWEST (-3.0e38f)
