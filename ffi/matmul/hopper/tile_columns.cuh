// A number for each column of a tile, such as a bias, in a consumer's registers.
#pragma once

#include <cstdint>

#include "core/collectives.h"
#include "core/cuda.h"
#include "core/dtype.h"
#include "core/vector.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// The numbers are in words of four bytes, which a warp loads together, before the products: word 32
// r + i is the r-th of lane i. A thread gets those of its columns by shuffles when it needs them,
// since its registers have no room for all of them.
template <class T, int kCols>
struct TileColumns {
  static constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
  static constexpr int kWords = kCols / kPerWord / kWarpSize;

  std::uint32_t words[kWords];

  // Loads the numbers of the columns from `first` on. There are `cols`, `step` apart; those beyond
  // the last one are 0.
  __device__ __forceinline__ void load(const T* numbers, int cols, int first, int step = 1) {
    static_assert(kWords * kPerWord * kWarpSize == kCols, "lanes have the same number of words");
    const int first_col = first + static_cast<int>(threadIdx.x) % kWarpSize * kPerWord;
    const int left = cols - first_col;
    const T* const from = numbers + first_col * step;
#pragma unroll
    for (int r = 0; r < kWords; ++r) {
      Pack<T, kPerWord> word{};
#pragma unroll
      for (int e = 0; e < kPerWord; ++e) {
        const int col = r * kWarpSize * kPerWord + e;
        if (col < left) word.element[e] = from[col * step];
      }
      words[r] = __builtin_bit_cast(std::uint32_t, word);
    }
  }

  // Gets the numbers of column 8 * `eight` + 2 * (lane % 4) + j, for j = 0 and 1.
  __device__ __forceinline__ void columns(int eight, float (&numbers)[2]) const {
    const int first = 8 * eight / kPerWord;
    const int quad = static_cast<int>(threadIdx.x) % 4;
    Pack<T, 2> both;
    if constexpr (kPerWord == 2) {
      both = __builtin_bit_cast(decltype(both), __shfl_sync(0xffffffff, words[first / kWarpSize],
                                                            first % kWarpSize + quad));
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        both.element[j] = __builtin_bit_cast(
            float,
            __shfl_sync(0xffffffff, words[first / kWarpSize], first % kWarpSize + 2 * quad + j));
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) numbers[j] = widen(both.element[j]);
  }
};

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
