// Ladder, step 2: `stride`, interleaved addressing by neighbouring threads.
//
// The same tree as `naive`, but the active threads are the first ones: thread t takes index
// 2 * stride * t. Whole warps become idle, and no modulo is needed. But the lanes of a warp access
// shared memory with a stride that is a power of two, which causes bank conflicts.
//
//     stride 2:   thread 0: 0<-2    thread 1: 4<-6    thread 2: 8<-10 ...
#pragma once

#include "reduce/ladder/tree.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

template <class Reducer>
__global__ void __launch_bounds__(kLadderThreads)
    stride_kernel(const typename Reducer::Element* __restrict__ x, Target y, ContiguousRows rows) {
  const auto tree = shared<TreeStorage<Reducer>>().tree;
  const typename Reducer::Combine combine;
  const unsigned thread = threadIdx.x;

  for_each_tile<Reducer, kLadderThreads>(x, y, rows, [&](const RowTile<Reducer>& tile) {
    tree[thread] = tile[thread];
    __syncthreads();
    for (unsigned stride = 1; stride < blockDim.x; stride *= 2) {
      const unsigned index = 2 * stride * thread;
      if (index < blockDim.x) tree[index] = combine(tree[index], tree[index + stride]);
      __syncthreads();
    }
    return tree[0];
  });
}

template <class Reducer>
void launch_stride(const Queue& queue, const typename Reducer::Element* x, const Target& y,
                   ContiguousRows rows) {
  launch_step<stride_kernel<Reducer>, Reducer>(queue, Algorithm::kStride, x, y, rows);
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
