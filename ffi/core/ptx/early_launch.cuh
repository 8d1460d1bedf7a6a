// Kernels that may start while the previous one still runs (programmatic dependent launch).
#pragma once

#include "core/ptx/hopper.h"

namespace JAX_GPUOPS_NAMESPACE {

// Blocks of the next kernel may start once all blocks of this one have called
// let_next_kernel_start() or exited. wait_for_kernel_before() waits until the previous kernel is
// complete and its writes are visible. The host executor runs one launch after the other, so there
// neither does anything.
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
