// Algorithm `row`: each group of threads of a block reduces a row.
//
// The size of a group is a power of two, so that a warp holds several short rows or a part of a
// long one. A group reads neighbouring packs; lanes combine by shuffles, without a barrier, and the
// warps of a longer row in shared memory. A block is large even if a row needs few threads, since
// many small blocks take long to start.
//
//     8 threads a row:     threads 0 ..  7 -> row r    threads  8 ..  15 -> row r + 1   ...
//     64 threads a row:    warps 0 and 1   -> row r    warps 2 and 3     -> row r + 1   ...
//
// Rows that need more threads than a block of this kernel has get the kernel of `multiple`, with
// one block per row.
#pragma once

#include "core/shared.h"
#include "reduce/row_packs.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

inline constexpr int kRowWarps = kRowThreads / kWarpSize;
// Least number of blocks per multiprocessor: fewer do not keep memory busy.
inline constexpr int kRowBlocks = 1024 / kRowThreads;

template <class Reducer, class Masks>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    row_kernel(const typename Reducer::Element* __restrict__ x, Target y, ContiguousRows rows,
               int threads_log2, Masks masks) {
  const auto warps = shared<BlockStorage<Reducer>>().warps;
  const int threads = 1 << threads_log2;
  const int thread = threadIdx.x & (threads - 1);
  const int row_in_block = threadIdx.x >> threads_log2;
  const int rows_per_block = kRowThreads >> threads_log2;
  const int row_warps = threads / kWarpSize;  // 0 for a part of a warp; else a power of two
  const typename Reducer::Combine combine;
  const typename Reducer::Reader read(y);

  // A grid can cover more rows than fit in memory, so there is no loop over rows.
  const std::int64_t first = std::int64_t{blockIdx.x} * rows_per_block;
  const std::int64_t row = first + row_in_block;
  const bool has_row = row < rows.count;
  auto partial = Reducer::identity();
  if (has_row) {
    const RowPacks<typename Reducer::Element, int> packs(x, rows, row);
    partial = fold_row<Reducer, kLoads>(packs, masks.of(row), read, thread, threads);
  }
  partial = group_reduce(partial, combine, row_warps == 0 ? threads : kWarpSize);
  if (row_warps <= 1) {
    if (has_row && thread == 0) Reducer::store(y, row, partial);
    return;
  }
  if (threadIdx.x % kWarpSize == 0) warps[threadIdx.x / kWarpSize] = partial;
  __syncthreads();
  if (threadIdx.x >= kWarpSize) return;
  const int warp = threadIdx.x;
  const auto of_warp = warp < kRowWarps ? warps[warp] : Reducer::identity();
  const auto total = group_reduce<kRowWarps>(of_warp, combine, row_warps);
  const std::int64_t own = first + (warp * kWarpSize >> threads_log2);
  const bool is_first = (warp & (row_warps - 1)) == 0;
  if (warp < kRowWarps && is_first && own < rows.count) Reducer::store(y, own, total);
}

template <class Instance>
void launch_row(const Call& call) {
  const Config& config = call.config;
  const int rows_per_block = config.threads / config.lanes;
  const int threads_log2 = log2_of(config.lanes);
  launch_kernel<row_kernel<typename Instance::First, typename Instance::Masks>>(
      call.queue,
      {grid_extent(divide_up(call.problem.rows(), rows_per_block)),
       static_cast<unsigned>(config.threads), sizeof(BlockStorage<typename Instance::First>)},
      Instance::elements(call), call.result(), call.rows(), threads_log2, Instance::masks(call));
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
