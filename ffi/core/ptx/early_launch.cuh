// Kernels that are launched while the one before may still run (programmatic dependent launch).
#pragma once

#include "core/ptx/hopper.h"

namespace JAX_GPUOPS_NAMESPACE {

// The blocks of a kernel let those of the next start, once all have called the first of these, or
// ended. The next one's wait, by the second, for all of it to have ended, and see what it wrote.
// The executor runs one launch after the other, so there they have nothing to do.
__device__ inline void let_next_kernel_start() {
#if JAX_GPUOPS_HOPPER_PTX
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline void wait_for_kernel_before() {
#if JAX_GPUOPS_HOPPER_PTX
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace JAX_GPUOPS_NAMESPACE
