// Ladder, step 6: `multiple`, many elements per thread.
//
// As many blocks as are resident on the GPU read a row in packs of 16 bytes; each thread folds its
// packs in registers before the block combines them once. The cost of the tree is then spread over
// thousands of elements, and the kernel is bound by memory bandwidth. The first block of a row
// waits for the partials of the others, and combines all:
//
//     row ->  | pack: block 0, thread 0 | block 0, thread 1 | ... | block 1, thread 0 | ...
//             | block 0, thread 0 again | ...
//
//     block 0 -> slot 0, block 1 -> slot 1, ...      slots 0, 1, ... -> block 0 -> result
#pragma once

#include <algorithm>

#include "core/shared.h"
#include "core/tag.h"
#include "reduce/instance.cuh"
#include "reduce/reducer.cuh"
#include "reduce/row_packs.cuh"
#include "reduce/slots.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

// A group of gridDim.x blocks takes every gridDim.y-th row.
template <class Reducer, class Masks>
__global__ void __launch_bounds__(kMultipleThreads, Masks::kMasks ? 1 : 1024 / kMultipleThreads)
    multiple_kernel(const typename Reducer::Element* __restrict__ x, Target y, ContiguousRows rows,
                    Masks masks, Slots slots) {
  using Partial = typename Reducer::Partial;
  const auto warps = shared<BlockStorage<Reducer>>().warps;
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int threads = gridDim.x * blockDim.x;
  const typename Reducer::Combine combine;
  const typename Reducer::Reader read(y);

  for (std::int64_t row = blockIdx.y; row < rows.count; row += gridDim.y) {
    const RowPacks<typename Reducer::Element, std::int64_t> packs(x, rows, row);
    const auto folded =
        fold_row<Reducer, kMultipleLoads>(packs, masks.of(row), read, thread, threads);
    const auto partial = block_reduce(folded, Reducer::identity(), combine, warps);
    if (gridDim.x == 1) {
      if (threadIdx.x == 0) Reducer::store(y, row, partial);
      continue;
    }
    const std::int64_t first_slot = row * gridDim.x;
    if (threadIdx.x == 0) leave(slots, first_slot + blockIdx.x, partial);
    if (blockIdx.x != 0) continue;
    Partial total = Reducer::identity();
    for (unsigned part = threadIdx.x; part < gridDim.x; part += blockDim.x) {
      total = combine(total, take<Partial>(slots, first_slot + part));
    }
    total = block_reduce(total, Reducer::identity(), combine, warps);
    if (threadIdx.x == 0) Reducer::store(y, row, total);
  }
}

template <class Instance>
void launch_multiple(const Call& call) {
  using First = typename Instance::First;
  const Config& config = call.config;
  const bool divides = config.parts > 1;
  const std::int64_t rows = call.problem.rows();
  const unsigned groups = grid_extent_beyond_x(divides ? std::min(rows, config.groups) : rows);
  Slots slots{};
  if (divides) slots = {static_cast<TaggedWord*>(call.buffers.workspace), unique_tag()};
  LaunchShape shape{{static_cast<unsigned>(config.parts), groups},
                    static_cast<unsigned>(config.threads),
                    sizeof(BlockStorage<First>)};
  shape.together = divides;
  launch_kernel<multiple_kernel<First, typename Instance::Masks>>(
      call.queue, shape, Instance::elements(call), call.result(), call.rows(),
      Instance::masks(call), slots);
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
