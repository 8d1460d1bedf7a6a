// Algorithm `row`, for rows that are short: a group of lanes takes one.
//
// The groups are a power of two of lanes, so that a warp holds several short rows or one long one;
// a group's lanes read neighbouring packs and combine by shuffles, without shared memory or a
// barrier. The first lanes of a warp's groups write neighbouring results. Rows that would keep a
// warp busy for long get a block each: the kernel of `multiple`, with one block a row.
//
//     8 lanes a row:   lanes 0 .. 7 -> row r    lanes 8 .. 15 -> row r + 1   ...
#pragma once

#include "reduce/row_packs.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

template <class Reducer, class Masks>
__global__ void __launch_bounds__(kRowThreads)
    row_kernel(const typename Reducer::Element* __restrict__ x, Target y, ContiguousRows rows,
               int lanes_log2, Masks masks) {
  const int lanes = 1 << lanes_log2;
  const int lane = threadIdx.x & (lanes - 1);
  const int row_in_block = threadIdx.x >> lanes_log2;
  const int rows_per_block = kRowThreads >> lanes_log2;
  const typename Reducer::Reader read(y);

  // The loop's bounds are those of the block, so that all lanes reach every shuffle.
  for (std::int64_t first = std::int64_t{blockIdx.x} * rows_per_block; first < rows.count;
       first += std::int64_t{gridDim.x} * rows_per_block) {
    const std::int64_t row = first + row_in_block;
    const bool has_row = row < rows.count;
    auto partial = Reducer::identity();
    if (has_row) {
      const RowPacks<typename Reducer::Element, int> packs(x, rows, row);
      partial = fold_row<Reducer, kLoads>(packs, masks.of(row), read, lane, lanes);
    }
    partial = group_reduce(partial, typename Reducer::Combine{}, lanes);
    if (has_row && lane == 0) Reducer::store(y, row, partial);
  }
}

template <class Instance>
void launch_row(const Call& call) {
  const Config& config = call.config;
  const int rows_per_block = config.threads / config.lanes;
  const int lanes_log2 = __builtin_ctz(static_cast<unsigned>(config.lanes));
  launch_kernel<row_kernel<typename Instance::First, typename Instance::Masks>>(
      call.queue,
      {grid_extent(divide_up(call.problem.rows(), rows_per_block)),
       static_cast<unsigned>(config.threads)},
      Instance::elements(call), call.result(), call.rows(), lanes_log2, Instance::masks(call));
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
