// Ladder, step 6: `multiple`, many elements per thread.
//
// A row is walked by as many blocks as the GPU holds at a time, in packs of 16 bytes; each thread
// folds its packs in registers before the block combines them once. The cost of the tree is then
// spread over thousands of elements, and the kernel runs at the speed of memory. The partials of
// the blocks are for a second launch, of combine.cuh.
//
//     row ->  | pack: block 0, thread 0 | block 0, thread 1 | ... | block 1, thread 0 | ...
//             | block 0, thread 0 again | ...
#pragma once

#include "core/ptx/early_launch.cuh"
#include "core/shared.h"
#include "reduce/instance.cuh"
#include "reduce/reducer.cuh"
#include "reduce/row_packs.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

// blockIdx.x counts the blocks of a row, and blockIdx.y rows.
template <class Reducer, class Masks>
__global__ void __launch_bounds__(kMultipleThreads)
    multiple_kernel(const typename Reducer::Element* __restrict__ x, Target y, ContiguousRows rows,
                    Masks masks) {
  const auto warps = shared<BlockStorage<Reducer>>().warps;
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int threads = gridDim.x * blockDim.x;
  const typename Reducer::Reader read(y);

  for (std::int64_t row = blockIdx.y; row < rows.count; row += gridDim.y) {
    const RowPacks<typename Reducer::Element, std::int64_t> packs(x, rows, row);
    const auto folded =
        fold_row<Reducer, kMultipleLoads>(packs, masks.of(row), read, thread, threads);
    let_next_kernel_start();
    const auto partial =
        block_reduce(folded, Reducer::identity(), typename Reducer::Combine{}, warps);
    if (threadIdx.x == 0) Reducer::store(y, row * gridDim.x + blockIdx.x, partial);
  }
}

template <class Instance>
void launch_multiple(const Call& call) {
  using First = typename Instance::First;
  const Config& config = call.config;
  const dim3 grid(static_cast<unsigned>(config.parts), grid_extent_beyond_x(call.problem.rows()));
  const Target to = config.parts == 1 ? call.result() : Instance::partial_target(call);
  launch_kernel<multiple_kernel<First, typename Instance::Masks>>(
      call.queue, {grid, static_cast<unsigned>(config.threads), sizeof(BlockStorage<First>)},
      Instance::elements(call), to, call.rows(), Instance::masks(call));
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
