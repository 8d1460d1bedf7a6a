// Ladder, step 4: `first_add`, the first level of the tree while loading.
//
// In `sequential` half of the threads do nothing after their load. Here a tile has two elements per
// thread, combined before they are stored in shared memory: half as many blocks, and every thread
// combines.
#pragma once

#include "reduce/ladder/tree.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

// Combines the calling thread's two elements of a tile.
template <class Reducer>
__device__ inline typename Reducer::Partial first_level(const RowTile<Reducer>& tile) {
  const int thread = threadIdx.x;
  return typename Reducer::Combine{}(tile[thread], tile[thread + kLadderThreads]);
}

template <class Reducer>
__global__ void __launch_bounds__(kLadderThreads)
    first_add_kernel(const typename Reducer::Element* __restrict__ x, Target y,
                     ContiguousRows rows) {
  const auto tree = shared<TreeStorage<Reducer>>().tree;
  const typename Reducer::Combine combine;
  const unsigned thread = threadIdx.x;

  for_each_tile<Reducer, 2 * kLadderThreads>(x, y, rows, [&](const RowTile<Reducer>& tile) {
    tree[thread] = first_level(tile);
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
      if (thread < half) tree[thread] = combine(tree[thread], tree[thread + half]);
      __syncthreads();
    }
    return tree[0];
  });
}

template <class Reducer>
void launch_first_add(const Queue& queue, const typename Reducer::Element* x, const Target& y,
                      ContiguousRows rows) {
  launch_step<first_add_kernel<Reducer>, Reducer>(queue, Algorithm::kFirstAdd, x, y, rows);
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
