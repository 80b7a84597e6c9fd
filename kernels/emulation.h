// Runs a kernel body on the host, one thread group after the other, and finds what a GPU would hide.
//
// Each GPU thread is a fiber with a stack of its own; all fibers of a group share one OS thread and switch only
// at barriers and collectives. The order in which waiting fibers go on is chosen by the caller: a missing barrier
// shows as a result that depends on it. An index outside an array, lanes that meet in different collectives, and a
// barrier that some thread never reaches end the launch with a message. Shared memory starts as NaN in each group.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

namespace emulation {

constexpr int SIMD_WIDTH = 32;
constexpr size_t STACK_BYTES = 64 * 1024;

// ---- 16-bit floats, rounded to nearest even ----

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

struct BFloat {
  uint16_t bits;
  BFloat() = default;
  explicit BFloat(float value) {
    const uint32_t wide = bits_of(value);
    const bool is_nan = (wide & 0x7fffffffu) > 0x7f800000u;
    bits = is_nan ? 0x7fc0 : uint16_t((wide + 0x7fffu + ((wide >> 16) & 1)) >> 16);
  }
  explicit operator float() const { return float_of(uint32_t(bits) << 16); }
};

struct Half {
  uint16_t bits;
  Half() = default;
  explicit Half(float value) {
    const uint32_t sign = bits_of(value) >> 16 & 0x8000u;
    const float size = std::fabs(value);
    if (!(size == size)) {
      bits = uint16_t(0x7e00);
    } else if (size >= 65520.0f) {
      bits = uint16_t(sign | 0x7c00u);
    } else if (size < 0x1p-14f) {  // subnormal: adding 0.5 rounds to multiples of 2^-24
      bits = uint16_t(sign | (bits_of(size + 0.5f) - bits_of(0.5f)));
    } else {
      const uint32_t wide = bits_of(size);
      bits = uint16_t(sign | ((wide + 0xfffu + ((wide >> 13) & 1) - (112u << 23)) >> 13));
    }
  }
  explicit operator float() const {
    const uint32_t sign = uint32_t(bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * float(fraction) * 0x1p-24f;
    return float_of(sign | (exponent + 112) << 23 | fraction << 13);
  }
};

// ---- threads ----

struct Barrier {
  int arrived = 0, line = 0;
  uint64_t generation = 0;
};

struct Fiber {
  ucontext_t start;
  jmp_buf at;
  bool started = false, done = false;
  const Barrier* waits_at = nullptr;
  uint64_t waits_for = 0;
};

struct State {
  int group_position[3] = {0, 0, 0};
  int thread = 0, threads = 0;
  uint64_t group_number = 0, progress = 0;
  bool failed = false;
  char message[256] = "";
  const std::function<void()>* body = nullptr;
  jmp_buf scheduler;
  std::vector<Fiber> fibers;
  std::unique_ptr<char[]> stacks;
  Barrier group;
  std::vector<Barrier> simds;
  std::vector<float> slots;
};

inline State& current() {
  static State state;
  return state;
}

inline void to_scheduler() {
  State& s = current();
  if (_setjmp(s.fibers[s.thread].at) == 0) _longjmp(s.scheduler, 1);
}

// Ends the launch; the other fibers are left where they are.
[[noreturn]] inline void fail(const char* what, long a, long b) {
  State& s = current();
  if (!s.failed) {
    std::snprintf(s.message, sizeof s.message, what, a, b);
    s.failed = true;
  }
  for (;;) to_scheduler();
}

inline void wait_at(Barrier& barrier, int members, int line) {
  if (barrier.arrived == 0) barrier.line = line;
  if (barrier.line != line) fail("threads meet at lines %ld and %ld", barrier.line, line);
  if (++barrier.arrived == members) {
    barrier.arrived = 0;
    ++barrier.generation;
    ++current().progress;
    return;
  }
  Fiber& fiber = current().fibers[current().thread];
  fiber.waits_at = &barrier;
  fiber.waits_for = barrier.generation + 1;
  to_scheduler();
}

inline void group_barrier(int line) { wait_at(current().group, current().threads, line); }

// What all lanes of this SIMD group brought.
inline std::array<float, SIMD_WIDTH> exchange(float value, int line) {
  State& s = current();
  const int simd = s.thread / SIMD_WIDTH;
  s.slots[s.thread] = value;
  wait_at(s.simds[simd], SIMD_WIDTH, line);
  std::array<float, SIMD_WIDTH> all;
  std::copy_n(s.slots.begin() + simd * SIMD_WIDTH, SIMD_WIDTH, all.begin());
  wait_at(s.simds[simd], SIMD_WIDTH, line);
  return all;
}

inline float simd_sum(float value, int line) {
  auto all = exchange(value, line);
  for (int step = SIMD_WIDTH / 2; step > 0; step /= 2)
    for (int lane = 0; lane < step; ++lane) all[lane] += all[lane + step];
  return all[0];
}

inline float simd_max(float value, int line) {
  const auto all = exchange(value, line);
  return *std::max_element(all.begin(), all.end());
}

inline float simd_shuffle(float value, int lane, int line) {
  const auto all = exchange(value, line);
  if (lane < 0 || lane >= SIMD_WIDTH) fail("shuffle from lane %ld at line %ld", lane, line);
  return all[lane];
}

// ---- memory ----

template <typename T>
struct Array {
  T* data;
  size_t count;
  T& operator[](size_t index) const {
    if (index >= count) fail("index %ld of an array of %ld", long(index), long(count));
    return data[index];
  }
};

template <typename T, size_t count>
struct Shared {
  T data[count];
  uint64_t group_number = 0;
  void enter() {
    if (group_number == current().group_number) return;
    group_number = current().group_number;
    std::memset(data, 0xff, sizeof data);
  }
  T& operator[](size_t index) { return Array<T>{data, count}[index]; }
};

// ---- launch ----

inline void run_fiber() {
  State& s = current();
  (*s.body)();
  s.fibers[s.thread].done = true;
  ++s.progress;
  for (;;) _longjmp(s.scheduler, 1);
}

inline void resume(int thread) {
  State& s = current();
  s.thread = thread;
  Fiber& fiber = s.fibers[thread];
  fiber.waits_at = nullptr;
  if (_setjmp(s.scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

inline void run_group(bool backwards) {
  State& s = current();
  ++s.group_number;
  s.group = Barrier();
  s.simds.assign(s.threads / SIMD_WIDTH, Barrier());
  s.fibers.assign(s.threads, Fiber());
  for (int thread = 0; thread < s.threads; ++thread) {
    ucontext_t& start = s.fibers[thread].start;
    getcontext(&start);
    start.uc_stack.ss_sp = s.stacks.get() + thread * STACK_BYTES;
    start.uc_stack.ss_size = STACK_BYTES;
    start.uc_link = nullptr;
    makecontext(&start, run_fiber, 0);
  }
  for (volatile int left = s.threads; left > 0 && !s.failed;) {
    const volatile uint64_t before = s.progress;
    for (volatile int i = 0; i < s.threads && !s.failed; i = i + 1) {
      const int thread = backwards ? s.threads - 1 - i : i;
      const Fiber& fiber = s.fibers[thread];
      if (fiber.done || (fiber.waits_at && fiber.waits_at->generation < fiber.waits_for)) continue;
      resume(thread);
      if (s.fibers[thread].done) left = left - 1;
    }
    if (s.progress == before && !s.failed) {
      s.failed = true;
      std::snprintf(s.message, sizeof s.message, "threads wait for others that never come (line %d)",
                    s.group.arrived ? s.group.line : s.simds[0].line);
    }
  }
}

// A message when something went wrong, else an empty text.
inline const char* launch(const int* groups, int threads, bool backwards, const std::function<void()>& body) {
  State& s = current();
  s.failed = false;
  s.message[0] = 0;
  s.body = &body;
  s.threads = threads;
  s.slots.assign(threads, 0.0f);
  s.stacks.reset(new char[threads * STACK_BYTES]);
  int* const at = s.group_position;
  for (at[2] = 0; at[2] < groups[2]; ++at[2])
    for (at[1] = 0; at[1] < groups[1]; ++at[1])
      for (at[0] = 0; at[0] < groups[0] && !s.failed; ++at[0]) run_group(backwards);
  return s.message;
}

}  // namespace emulation
