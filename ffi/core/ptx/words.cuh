// Words that blocks send each other through global memory, without ordering other accesses.
#pragma once

#include <cstdint>

#include "core/ptx/hopper.h"

namespace JAX_GPUOPS_NAMESPACE {

// Writes a word for other blocks, with a number that distinguishes it from earlier ones. Both are
// written, and read, by one access, and nothing else is ordered.
__device__ inline void post([[maybe_unused]] std::uint64_t* to, [[maybe_unused]] std::uint32_t word,
                            [[maybe_unused]] std::uint32_t number,
                            [[maybe_unused]] Site site = Site::here()) {
  [[maybe_unused]] const std::uint64_t both = std::uint64_t{number} << 32 | word;
#ifdef JAX_GPUOPS_INTERPRET
  simt::relaxed_store(to, &both, sizeof(both), site);
#elif JAX_GPUOPS_HOPPER_PTX
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(both) : "memory");
#endif
}

// Reads a word, and returns whether it has the number `number`. For loops that wait for it.
__device__ inline bool look([[maybe_unused]] const std::uint64_t* from,
                            [[maybe_unused]] std::uint32_t number,
                            [[maybe_unused]] std::uint32_t& word,
                            [[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  std::uint64_t both;
  simt::relaxed_load(&both, from, sizeof(both));
  word = static_cast<std::uint32_t>(both);
  if (both >> 32 == number) return true;
  simt::let_others_run("look", site);
  return false;
#elif JAX_GPUOPS_HOPPER_PTX
  std::uint64_t both;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(both) : "l"(from) : "memory");
  word = static_cast<std::uint32_t>(both);
  return both >> 32 == number;
#else
  return false;
#endif
}

// Adds 1 to a counter, and orders nothing else.
__device__ inline void count_one([[maybe_unused]] std::uint32_t* counter) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::relaxed_add(counter, 1);
#elif JAX_GPUOPS_HOPPER_PTX
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
#endif
}

// Waits until a counter is `count` or more, modulo 2^32, and orders nothing else.
__device__ inline void await_count([[maybe_unused]] const std::uint32_t* counter,
                                   [[maybe_unused]] std::uint32_t count,
                                   [[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  while (static_cast<std::int32_t>(*counter - count) < 0) simt::let_others_run("await_count", site);
#elif JAX_GPUOPS_HOPPER_PTX
  std::uint32_t seen;
  do {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (static_cast<std::int32_t>(seen - count) < 0);
#endif
}

}  // namespace JAX_GPUOPS_NAMESPACE
