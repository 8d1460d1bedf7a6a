// Asynchronous copies of a few bytes from global to shared memory, without registers: PTX's
// cp.async.
#pragma once

#include "core/ptx/shared_address.cuh"

namespace JAX_GPUOPS_NAMESPACE {

// Copies kBytes to shared memory, or zeros if not `valid`; then `from` is not read. Both addresses
// are multiples of kBytes. kShared: other threads of the multiprocessor are about to copy the same,
// and find it in the L1 cache, which copies of 16 bytes bypass otherwise.
template <int kBytes, bool kShared = false>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid,
                                           [[maybe_unused]] Site site = Site::here()) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
#ifdef JAX_GPUOPS_INTERPRET
  simt::async_copy("copy_async", site, to, valid ? from : nullptr, kBytes);
#else
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16 && !kShared) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)),
                 "l"(from), "n"(kBytes), "r"(bytes)
                 : "memory");
  }
#endif
}

// Commits the thread's copies since the last call as a group, which may be empty.
__device__ __forceinline__ void end_copy_group() {
#ifdef JAX_GPUOPS_INTERPRET
  simt::end_copy_group();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all groups of the thread but the last kPending are complete. Other threads see what
// these have copied after a barrier.
template <int kPending>
__device__ __forceinline__ void wait_for_copy_groups() {
#ifdef JAX_GPUOPS_INTERPRET
  simt::wait_for_copy_groups(kPending);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace JAX_GPUOPS_NAMESPACE
