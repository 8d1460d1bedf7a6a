// Ladder, step 1: `naive`, interleaved addressing with a divergent branch.
//
// A tree in shared memory. At each level every second, fourth, ... thread adds its neighbour at
// distance `stride`:
//
//     stride 1:   0<-1    2<-3    4<-5    6<-7
//     stride 2:   0<------2       4<------6
//     stride 4:   0<--------------4
//
// The active threads are scattered over all warps, so every warp runs at every level with most of
// its lanes inactive; and selecting the active threads takes a slow modulo.
#pragma once

#include "reduce/ladder/tree.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

template <class Reducer>
__global__ void __launch_bounds__(kLadderThreads)
    naive_kernel(const typename Reducer::Element* __restrict__ x, Target y, ContiguousRows rows) {
  const auto tree = shared<TreeStorage<Reducer>>().tree;
  const typename Reducer::Combine combine;
  const unsigned thread = threadIdx.x;

  for_each_tile<Reducer, kLadderThreads>(x, y, rows, [&](const RowTile<Reducer>& tile) {
    tree[thread] = tile[thread];
    __syncthreads();
    for (unsigned stride = 1; stride < blockDim.x; stride *= 2) {
      if (thread % (2 * stride) == 0) {
        tree[thread] = combine(tree[thread], tree[thread + stride]);
      }
      __syncthreads();
    }
    return tree[0];
  });
}

template <class Reducer>
void launch_naive(const Queue& queue, const typename Reducer::Element* x, const Target& y,
                  ContiguousRows rows) {
  launch_step<naive_kernel<Reducer>, Reducer>(queue, Algorithm::kNaive, x, y, rows);
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
