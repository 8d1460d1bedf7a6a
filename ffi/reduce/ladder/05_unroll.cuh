// Ladder, step 5: `unroll`, the last warp without barriers.
//
// Once 32 elements are left, one warp holds them, and a barrier of the whole block for each of the
// last five levels is wasted. The original drops the barriers and relies on the lanes of a warp
// running in lockstep, which GPUs since Volta do not guarantee; here the warp exchanges registers
// by shuffles, which synchronise the lanes of their mask. The levels above are unrolled too.
#pragma once

#include "reduce/ladder/04_first_add.cuh"
#include "reduce/ladder/tree.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

template <class Reducer>
__global__ void __launch_bounds__(kLadderThreads)
    unroll_kernel(const typename Reducer::Element* __restrict__ x, Target y, ContiguousRows rows) {
  const auto tree = shared<TreeStorage<Reducer>>().tree;
  const typename Reducer::Combine combine;
  const unsigned thread = threadIdx.x;

  for_each_tile<Reducer, 2 * kLadderThreads>(x, y, rows, [&](const RowTile<Reducer>& tile) {
    auto partial = first_level(tile);
    tree[thread] = partial;
    __syncthreads();
#pragma unroll
    for (unsigned half = kLadderThreads / 2; half >= kWarpSize; half /= 2) {
      if (thread < half) {
        partial = combine(partial, tree[thread + half]);
        tree[thread] = partial;
      }
      __syncthreads();
    }
    return thread < kWarpSize ? warp_reduce(partial, combine) : partial;
  });
}

template <class Reducer>
void launch_unroll(const Queue& queue, const typename Reducer::Element* x, const Target& y,
                   ContiguousRows rows) {
  launch_step<unroll_kernel<Reducer>, Reducer>(queue, Algorithm::kUnroll, x, y, rows);
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
