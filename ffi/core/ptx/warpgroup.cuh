// Warpgroups, four warps each, with different roles in a block.
#pragma once

#include "core/ptx/hopper.h"

namespace JAX_GPUOPS_NAMESPACE {

inline constexpr int kWarpgroupThreads = 128;

// All threads of a warpgroup reduce their registers to kRegisters each, or wait until others have
// done so and increase theirs to kRegisters, a multiple of 8. The kernel must bound its blocks per
// multiprocessor to one.
template <int kRegisters>
__device__ inline void give_up_registers([[maybe_unused]] Site site = Site::here()) {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24);
#ifdef JAX_GPUOPS_INTERPRET
  simt::set_registers("give_up_registers", site, kRegisters, false);
#elif JAX_GPUOPS_HAS_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

template <int kRegisters>
__device__ inline void take_registers([[maybe_unused]] Site site = Site::here()) {
  static_assert(kRegisters % 8 == 0 && kRegisters <= 256);
#ifdef JAX_GPUOPS_INTERPRET
  simt::set_registers("take_registers", site, kRegisters, true);
#elif JAX_GPUOPS_HAS_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// Named barrier `number` (1 to 15; 0 is __syncthreads) of `threads` threads, whole warps: meet()
// arrives and waits, pass() only arrives.
__device__ inline void meet(int number, int threads, [[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::named_barrier("meet", site, number, threads, true);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
#endif
}

__device__ inline void pass(int number, int threads, [[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::named_barrier("pass", site, number, threads, false);
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
#endif
}

}  // namespace JAX_GPUOPS_NAMESPACE
