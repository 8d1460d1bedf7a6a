// Packs of 16 bytes at unaligned addresses, as in rows of odd lengths.
#pragma once

#include <cstdint>

#include "core/cuda.h"
#include "core/ptx/memory.cuh"

namespace JAX_GPUOPS_NAMESPACE {

// Writes the 16 bytes from byte `past` on, 0 to 15, of two neighbouring packs.
//
//     low  | . . a b |   high | c d . . |   past = 2   ->   | a b c d |
//
// Words selected by a run-time index would be in local memory: so all are shifted by two words, by
// one, and then by bytes.
__device__ __forceinline__ void write_shifted(const uint4& low, const uint4& high, unsigned past,
                                              void* to) {
  std::uint32_t word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) word[i] = past & 8 ? word[i + 2] : word[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) word[i] = past & 4 ? word[i + 1] : word[i];
  const unsigned bytes = 0x3210 + past % 4 * 0x1111;
  std::uint32_t shifted[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) shifted[i] = __byte_perm(word[i], word[i + 1], bytes);
  store_words(shifted, to);
}

}  // namespace JAX_GPUOPS_NAMESPACE
