// PTX's mbarrier, in shared memory, by which threads wait for each other and for copies. A phase is
// complete when all its arrivals and all its announced transaction bytes have come. Phases are
// named by their parity: the first is 0, the next 1, the next 0 again.
#pragma once

#include <cstdint>

#include "core/ptx/hopper.h"
#include "core/ptx/shared_address.cuh"

namespace JAX_GPUOPS_NAMESPACE {

using Mbarrier = std::uint64_t;

// Called by one thread, before a barrier of all threads that use the mbarrier. `arrivals`: how many
// calls of announce() or arrive() belong to a phase.
__device__ inline void initialise([[maybe_unused]] Mbarrier* barrier,
                                  [[maybe_unused]] unsigned arrivals = 1,
                                  [[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::mbarrier_init(barrier, arrivals, site);
#elif JAX_GPUOPS_HOPPER_PTX
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Arrives, and announces the transaction bytes of the phase. Called by one thread, once in a phase,
// before the copies.
__device__ inline void announce([[maybe_unused]] Mbarrier* barrier, [[maybe_unused]] unsigned bytes,
                                [[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::mbarrier_arrive("announce", site, barrier, bytes);
#elif JAX_GPUOPS_HOPPER_PTX
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

// Threads that wait see what the calling thread wrote before.
__device__ inline void arrive([[maybe_unused]] Mbarrier* barrier,
                              [[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::mbarrier_arrive("arrive", site, barrier, 0);
#elif JAX_GPUOPS_HOPPER_PTX
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
#endif
}

// Waits until the phase with this parity is complete: the current one, or the one before, which is.
__device__ inline void wait([[maybe_unused]] Mbarrier* barrier, [[maybe_unused]] unsigned phase,
                            [[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  simt::mbarrier_wait("wait", site, barrier, phase);
#elif JAX_GPUOPS_HOPPER_PTX
  unsigned done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        "  .reg .pred done;\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(phase)
        : "memory");
  }
#endif
}

}  // namespace JAX_GPUOPS_NAMESPACE
