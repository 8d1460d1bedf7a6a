// Copies rows that begin anywhere to rows that begin at multiples of 128 bytes: factors for tensor
// copies, which need multiples of 16, and are fastest with 128.
//
//     from   |x0 x1 x2 x3 x4|y0 y1 y2 y3 y4|z0 z1 ...
//     to     |x0 x1 x2 x3 x4 .  .  . |y0 y1 y2 y3 y4 .  .  . |z0 z1 ...
//
// A thread makes one pack of 16 bytes of the result, from elements that it reads one by one: the
// lanes of a warp read neighbouring ones, most of them from the L1 cache.
#pragma once

#include <cstdint>
#include <limits>

#include "core/integer.h"
#include "core/launch.h"
#include "core/vector.h"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

inline constexpr int kAlignThreads = 256;

// `rows` rows of `length` elements, one after the other. `packs` is the number of packs of a row of
// the result that have elements; those behind them are not written.
template <class T>
struct RowCopy {
  const T* from;
  T* to;
  std::int64_t rows;
  std::int64_t length;
  std::int64_t to_length;  // of a row of the result
  std::int64_t packs;
  Divisor by_packs;
  bool is_small;  // rows * packs is less than 2^31: a 64-bit division takes long
};

template <class T>
__global__ void __launch_bounds__(kAlignThreads)
    align_rows_kernel(const __grid_constant__ RowCopy<T> copy) {
  constexpr int kPack = kWidestPack<T>;
  const std::int64_t count = copy.rows * copy.packs;
  for (std::int64_t i = blockIdx.x * std::int64_t{kAlignThreads} + threadIdx.x; i < count;
       i += gridDim.x * std::int64_t{kAlignThreads}) {
    const std::int64_t row =
        copy.is_small ? copy.by_packs.quotient(static_cast<std::uint32_t>(i)) : i / copy.packs;
    const std::int64_t column = (i - row * copy.packs) * kPack;
    const T* const from = copy.from + row * copy.length + column;
    const std::int64_t left = copy.length - column;
    Pack<T, kPack> pack{};
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      if (e < left) pack.element[e] = from[e];
    }
    *reinterpret_cast<Pack<T, kPack>*>(copy.to + row * copy.to_length + column) = pack;
  }
}

template <class T>
void launch_align_rows(const Queue& queue, const void* from, void* to, const StoredFactor& factor) {
  const std::int64_t rows = factor.batch * factor.rows;
  const std::int64_t packs = divide_up(factor.length, kWidestPack<T>);
  const std::int64_t blocks = divide_up(rows * packs, kAlignThreads);
  launch_kernel<align_rows_kernel<T>>(
      queue, {dim3(grid_extent(blocks)), kAlignThreads},
      RowCopy<T>{static_cast<const T*>(from), static_cast<T*>(to), rows, factor.length,
                 pitch_of_copy(factor), packs, Divisor(packs),
                 rows * packs <= std::numeric_limits<std::int32_t>::max()});
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
