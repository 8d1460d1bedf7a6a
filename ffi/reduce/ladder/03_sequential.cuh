// Ladder, step 3: `sequential`, sequential addressing.
//
// Each level adds the upper half of the remaining elements to the lower half, so the lanes of a
// warp access neighbouring words: no bank conflicts, and whole warps still become idle.
//
//     half 4:   0<-4   1<-5   2<-6   3<-7
//     half 2:   0<-2   1<-3
//     half 1:   0<-1
#pragma once

#include "reduce/ladder/tree.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

template <class Reducer>
__global__ void __launch_bounds__(kLadderThreads)
    sequential_kernel(const typename Reducer::Element* __restrict__ x, Target y,
                      ContiguousRows rows) {
  const auto tree = shared<TreeStorage<Reducer>>().tree;
  const typename Reducer::Combine combine;
  const unsigned thread = threadIdx.x;

  for_each_tile<Reducer, kLadderThreads>(x, y, rows, [&](const RowTile<Reducer>& tile) {
    tree[thread] = tile[thread];
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
      if (thread < half) tree[thread] = combine(tree[thread], tree[thread + half]);
      __syncthreads();
    }
    return tree[0];
  });
}

template <class Reducer>
void launch_sequential(const Queue& queue, const typename Reducer::Element* x, const Target& y,
                       ContiguousRows rows) {
  launch_step<sequential_kernel<Reducer>, Reducer>(queue, Algorithm::kSequential, x, y, rows);
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
