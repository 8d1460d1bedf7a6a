// Asynchronous bulk copies between global and shared memory, without registers. Addresses and sizes
// are multiples of 16.
#pragma once

#include "core/ptx/hopper.h"
#include "core/ptx/mbarrier.cuh"

namespace JAX_GPUOPS_NAMESPACE {

// Copies from global to shared memory; the bytes complete transactions of the mbarrier.
__device__ inline void copy_bulk([[maybe_unused]] void* to, [[maybe_unused]] const void* from,
                                 [[maybe_unused]] unsigned bytes,
                                 [[maybe_unused]] Mbarrier* barrier,
                                 [[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::bulk_read("copy_bulk", site, to, from, bytes, barrier);
#elif JAX_GPUOPS_HOPPER_PTX
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#endif
}

// write_bulk() copies from shared to global memory what all threads wrote before they called
// finish_writes_before_copies() and met at a barrier. wait_until_read() returns when all but the
// caller's last kPending copies have read the shared memory.
__device__ inline void finish_writes_before_copies() {
#ifdef JAX_GPUOPS_INTERPRET
  simt::proxy_fence();
#elif JAX_GPUOPS_HOPPER_PTX
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ inline void write_bulk([[maybe_unused]] void* to, [[maybe_unused]] const void* from,
                                  [[maybe_unused]] unsigned bytes,
                                  [[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::bulk_write("write_bulk", site, to, from, bytes);
#elif JAX_GPUOPS_HOPPER_PTX
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

template <int kPending = 0>
__device__ inline void wait_until_read([[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::bulk_wait_read("wait_until_read", site, kPending);
#elif JAX_GPUOPS_HOPPER_PTX
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace JAX_GPUOPS_NAMESPACE
