// Algorithm `row`, for rows that are short: a group of lanes takes one.
//
// The groups are a power of two of lanes, so that a warp holds several short rows or one long one;
// a group's lanes read neighbouring packs and combine by shuffles, without shared memory or a
// barrier. The first lanes of a warp's groups write neighbouring results. Rows that would keep a
// warp busy for long get a block each: the kernel of `multiple`, with one block a row.
//
//     8 lanes a row:   lanes 0 .. 7 -> row r    lanes 8 .. 15 -> row r + 1   ...
#pragma once

#include "reduce/ladder/06_multiple.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

inline constexpr int kRowThreads = 256;

template <class Reducer>
__global__ void __launch_bounds__(kRowThreads)
    row_kernel(const typename Reducer::Element* __restrict__ x, Target y, ContiguousRows rows,
               int lanes_log2) {
  const int lanes = 1 << lanes_log2;
  const int lane = threadIdx.x & (lanes - 1);
  const int row_in_block = threadIdx.x >> lanes_log2;
  const int rows_per_block = kRowThreads >> lanes_log2;

  // The loop's bounds are those of the block, so that all lanes reach every shuffle.
  for (std::int64_t first = std::int64_t{blockIdx.x} * rows_per_block; first < rows.count;
       first += std::int64_t{gridDim.x} * rows_per_block) {
    const std::int64_t row = first + row_in_block;
    const bool has_row = row < rows.count;
    auto partial = Reducer::identity();
    if (has_row) {
      partial = fold_row<Reducer>(x + row * rows.columns, rows.columns, lane, lanes);
    }
    partial = group_reduce(partial, typename Reducer::Combine{}, lanes);
    if (has_row && lane == 0) Reducer::store(y, row, partial);
  }
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
