// Stores of the partial packs at the beginning and the end of a row.
#pragma once

#include <cstdint>

#include "core/cuda.h"
#include "core/vector.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// The first half of a pack, and the second.
enum class Half { kFirst, kSecond };
template <Half kHalf, class T, int kSize>
__device__ inline RegisterPack<T, kSize / 2> half_of(const RegisterPack<T, kSize>& pack) {
  RegisterPack<T, kSize / 2> half;
  constexpr int kRegisters = sizeof(half.reg) / sizeof(half.reg[0]);
  constexpr int kBegin = kHalf == Half::kFirst ? 0 : kRegisters;
  if constexpr (kSize == 2 && RegisterPack<T, kSize>::kPer == 2) {
    const auto bits = static_cast<std::uint16_t>(pack.reg[0] >> (kHalf == Half::kFirst ? 0 : 16));
    half.reg[0] = __builtin_bit_cast(T, bits);
  } else {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) half.reg[i] = pack.reg[kBegin + i];
  }
  return half;
}

// Writes the first `count` elements of a pack, fewer than all, from `to` on, with stores of half a
// pack, a quarter ...
template <int kSize, class T>
__device__ inline void write_first(const RegisterPack<T, kSize>& pack, int count, T* to) {
  if constexpr (kSize > 1) {
    auto rest = half_of<Half::kFirst>(pack);
    if (count >= kSize / 2) {
      write_global_pack(rest, to);
      rest = half_of<Half::kSecond>(pack);
      to += kSize / 2;
      count -= kSize / 2;
    }
    write_first(rest, count, to);
  }
}

// Writes the last `count` elements, so that they end at `end`.
template <int kSize, class T>
__device__ inline void write_last(const RegisterPack<T, kSize>& pack, int count, T* end) {
  if constexpr (kSize > 1) {
    auto rest = half_of<Half::kSecond>(pack);
    if (count >= kSize / 2) {
      end -= kSize / 2;
      write_global_pack(rest, end);
      rest = half_of<Half::kFirst>(pack);
      count -= kSize / 2;
    }
    write_last(rest, count, end);
  }
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
