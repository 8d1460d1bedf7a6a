// High halves of products. Written as a wide product and a shift, the compiler would take two
// instructions for 32 bits.
#pragma once

#include <cstdint>

#include "core/ptx/target.h"

namespace JAX_GPUOPS_NAMESPACE {

__device__ inline std::uint32_t high_product(std::uint32_t a, std::uint32_t b) {
#ifdef JAX_GPUOPS_INTERPRET
  return static_cast<std::uint32_t>(std::uint64_t{a} * b >> 32);
#else
  return __umulhi(a, b);
#endif
}

__device__ inline std::uint64_t high_product(std::uint64_t a, std::uint64_t b) {
#ifdef JAX_GPUOPS_INTERPRET
  return static_cast<std::uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
#else
  return __umul64hi(a, b);
#endif
}

}  // namespace JAX_GPUOPS_NAMESPACE
