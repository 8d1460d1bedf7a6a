// Shifts by any number of places.
#pragma once

#include <cstdint>

#include "core/ptx/target.h"

namespace JAX_GPUOPS_NAMESPACE {

// bits << by, which is 0 from 64 on.
__device__ inline std::uint64_t shifted_left(std::uint64_t bits, unsigned by) {
#ifdef JAX_GPUOPS_INTERPRET
  return by < 64 ? bits << by : 0;
#else
  std::uint64_t result;
  asm("shl.b64 %0, %1, %2;" : "=l"(result) : "l"(bits), "r"(by));
  return result;
#endif
}

}  // namespace JAX_GPUOPS_NAMESPACE
