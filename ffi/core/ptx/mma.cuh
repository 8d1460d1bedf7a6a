// The matrix instruction of a warp, mma.sync, with operands and sums in the registers of its lanes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/ptx/target.h"

namespace JAX_GPUOPS_NAMESPACE {

// sums += left right, of 16 x 16 by 16 x 8. All lanes call it together. Lane 4 g + t holds, each
// word with two neighbours in k, the lower one in the low half:
//
//     left[0]: row g, k 2 t      left[1]: row g + 8, k 2 t      right[0]: k 2 t, col g
//     left[2]: row g, k 2 t + 8  left[3]: row g + 8, k 2 t + 8  right[1]: k 2 t + 8, col g
//
//     sums[0], sums[1]: row g, col 2 t and 2 t + 1              sums[2], sums[3]: row g + 8
template <class T>
__device__ __forceinline__ void multiply_add_warp(float (&sums)[4], const std::uint32_t (&left)[4],
                                                  const std::uint32_t (&right)[2],
                                                  [[maybe_unused]] Site site = Site::here()) {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
#ifdef JAX_GPUOPS_INTERPRET
  constexpr auto kType =
      std::is_same_v<T, __half> ? simt::FactorType::kFloat16 : simt::FactorType::kBFloat16;
  simt::multiply_add_warp("multiply_add_warp", site, sums, left, right, kType);
#else
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
  }
#endif
}

}  // namespace JAX_GPUOPS_NAMESPACE
