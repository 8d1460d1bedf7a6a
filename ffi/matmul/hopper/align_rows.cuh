// Copies rows that begin anywhere to rows that begin at multiples of 128 bytes: factors for tensor
// copies, which need multiples of 16, and are fastest with 128. One launch copies both factors.
//
//     from   |x0 x1 x2 x3 x4|y0 y1 y2 y3 y4|z0 z1 ...
//     to     |x0 x1 x2 x3 x4 .  .  . |y0 y1 y2 y3 y4 .  .  . |z0 z1 ...
//
// A thread makes two packs of 16 bytes of the result, each from the two aligned packs that contain
// it. The second of these is the first of the neighbouring lane: it comes from the L1 cache.
#pragma once

#include <cstdint>
#include <limits>

#include "core/integer.h"
#include "core/launch.h"
#include "core/ptx/early_launch.cuh"
#include "core/shifted_packs.cuh"
#include "core/vector.h"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

inline constexpr int kAlignThreads = 256;
inline constexpr int kAlignPacks = 2;  // per thread: enough to keep memory busy
inline constexpr int kAlignBlockPacks = kAlignThreads * kAlignPacks;
// 48 KiB in flight on each multiprocessor.
inline constexpr int kAlignResident = 6;

// A copy of contiguous rows of `length` elements, which begin at a multiple of 16 bytes. `packs` is
// the number of packs of a row of the result that have elements; those after them are not written,
// and the last one's contents beyond the row's end are arbitrary.
template <class T>
struct RowCopy {
  const T* from;
  T* to;
  std::int64_t length;
  std::int64_t to_length;  // of a row of the result
  std::int64_t packs;
  std::int64_t count;  // of packs of all rows
  std::int64_t whole;  // packs that lie within `from`
  Divisor by_packs;
  bool is_small;  // `count` is less than 2^31: a 64-bit division takes long

  std::int64_t blocks() const { return divide_up(count, kAlignBlockPacks); }
};

// One copy, or two: the blocks from `first_blocks` on have the second.
template <class T>
struct RowCopies {
  RowCopy<T> copy[2];
  unsigned first_blocks;
};

template <class T>
__global__ void __launch_bounds__(kAlignThreads, kAlignResident)
    align_rows_kernel(const __grid_constant__ RowCopies<T> copies) {
  constexpr int kPack = kWidestPack<T>;
  constexpr int kBytes = static_cast<int>(sizeof(T));
  // Blocks of the product set themselves up where this kernel's last blocks leave room.
  let_next_kernel_start();
  const bool is_second = blockIdx.x >= copies.first_blocks;
  const RowCopy<T>& copy = copies.copy[is_second];
  const std::int64_t block = blockIdx.x - (is_second ? copies.first_blocks : 0);
  const auto* const packs = reinterpret_cast<const uint4*>(copy.from);

  uint4 low[kAlignPacks];
  uint4 high[kAlignPacks];
  unsigned past[kAlignPacks];
  T* to[kAlignPacks];  // null: there is nothing to write
#pragma unroll
  for (int p = 0; p < kAlignPacks; ++p) {
    const std::int64_t i = block * kAlignBlockPacks + p * kAlignThreads + threadIdx.x;
    to[p] = nullptr;
    if (i >= copy.count) continue;
    std::int64_t row;
    std::int64_t column;
    if (copy.is_small) {
      const Division at = copy.by_packs.divide(static_cast<std::uint32_t>(i));
      row = at.quotient;
      column = std::int64_t{at.remainder} * kPack;
    } else {
      row = i / copy.packs;
      column = (i - row * copy.packs) * kPack;
    }
    const std::int64_t first = row * copy.length + column;
    const std::int64_t pack = first / kPack;
    T* const own_to = copy.to + row * copy.to_length + column;
    if (pack + 1 < copy.whole) {
      to[p] = own_to;
      past[p] = static_cast<unsigned>(first % kPack) * kBytes;
      low[p] = packs[pack];
      high[p] = packs[pack + 1];
    } else {  // the last two of the array, beyond whose end nothing may be read
      const std::int64_t left = copy.length - column;
#pragma unroll 1
      for (int e = 0; e < kPack && e < left; ++e) own_to[e] = copy.from[first + e];
    }
  }
#pragma unroll
  for (int p = 0; p < kAlignPacks; ++p) {
    if (to[p] != nullptr) {
      write_shifted(low[p], high[p], past[p], to[p]);
    }
  }
}

template <class T>
RowCopy<T> row_copy(const void* from, void* to, const StoredFactor& factor) {
  const std::int64_t rows = factor.batch * factor.rows;
  const std::int64_t packs = divide_up(factor.length, kWidestPack<T>);
  return {static_cast<const T*>(from),
          static_cast<T*>(to),
          factor.length,
          pitch_of_copy(factor),
          packs,
          rows * packs,
          rows * factor.length / kWidestPack<T>,
          Divisor(packs),
          rows * packs <= std::numeric_limits<std::int32_t>::max()};
}

// A copy without rows takes no blocks.
template <class T>
void launch_align_rows(const Queue& queue, const RowCopy<T>& first, const RowCopy<T>& second) {
  const std::int64_t blocks = first.blocks() + second.blocks();
  launch_kernel<align_rows_kernel<T>>(
      queue, {dim3(grid_extent(blocks)), kAlignThreads},
      RowCopies<T>{{first, second}, static_cast<unsigned>(first.blocks())});
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
