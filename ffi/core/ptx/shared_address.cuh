// Addresses in PTX's shared state space.
#pragma once

#include "core/ptx/target.h"

namespace JAX_GPUOPS_NAMESPACE {

// The address, in PTX's shared state space, of a pointer to the block's shared memory.
__device__ inline unsigned shared_address(const void* pointer,
                                          [[maybe_unused]] Site site = Site::here()) {
#ifdef JAX_GPUOPS_INTERPRET
  return simt::window_address(pointer, site);
#else
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
#endif
}

}  // namespace JAX_GPUOPS_NAMESPACE
