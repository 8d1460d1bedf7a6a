// Combines rows that are split over the blocks of a thread block cluster: `column` and
// `interleaved` use it in place of partials in the workspace and the launch of combine.cuh.
//
// The results of the cluster's rows are divided among its blocks. A block sends its partial of a
// result to the shared memory of the result's block, which combines the partials of all blocks:
//
//                  block 0        block 1        block 2        block 3
//     has of       r0 ... r7      r0 ... r7      r0 ... r7      r0 ... r7
//
//     is sent by   r0 r1          r2 r3          r4 r5          r6 r7
//       block 0    .  .           .  .           .  .           .  .
//       block 1    .  .           .  .           .  .           .  .
//       block 2    .  .           .  .           .  .           .  .
//       block 3    .  .           .  .           .  .           .  .
//                  |  |           |  |           |  |           |  |
//     stores       r0 r1          r2 r3          r4 r5          r6 r7
//
// A block with results waits for all partials of these, and nothing is sent to a block without: so
// no block exits before the partials that are sent to it have arrived.
#pragma once

#include "core/cuda.h"
#include "core/ptx/cluster.cuh"
#include "reduce/reduce.h"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

static_assert(kMostReducingBlocks <= kMostApart,
              "a thread combines what all blocks sent it at once");

template <class Reducer>
class ClusterParts {
 public:
  using Partial = typename Reducer::Partial;

  // `memory`: cluster_parts_bytes() of shared memory, aligned to 8 bytes.
  __device__ ClusterParts(void* memory, int blocks)
      : all_came_(static_cast<Mbarrier*>(memory)),
        slots_(reinterpret_cast<Partial*>(all_came_ + 1)),
        blocks_(blocks) {}

  // All threads of the block call it, before they read elements.
  __device__ void begin() {
    if (threadIdx.x == 0) initialise(all_came_);
    __syncthreads();
    cluster_arrive();
  }

  // All threads of the block call it. own(r) is the block's partial of result r of `results`, and
  // store(r, partial) stores the result; each is called by one thread of the block.
  template <class Own, class Store>
  __device__ void combine(int results, const Own& own, const Store& store) {
    const int rank = cluster_rank();
    const int share = (results + blocks_ - 1) / blocks_;
    const int first = rank * share;
    const int left = results - first;
    const int taken = left < share ? left : share;  // 0 or less for some of the last blocks
    cluster_wait();  // until all blocks have initialised their mbarriers

    // Partials may arrive before this announces them: the phase does not complete before it does.
    if (threadIdx.x == 0 && taken > 0) {
      announce(all_came_, static_cast<unsigned>(blocks_ * taken * sizeof(Partial)));
    }
#pragma unroll 1
    for (int result = threadIdx.x; result < results; result += blockDim.x) {
      const int to = result / share;
      send(own(result), slots_ + rank * share + (result - to * share), all_came_, to);
    }
    if (taken <= 0) return;

    wait(all_came_, 0);
#pragma unroll 1
    for (int result = threadIdx.x; result < taken; result += blockDim.x) {
      store(first + result, combine_apart<Reducer>(slots_, result, blocks_ * share, share));
    }
  }

 private:
  Mbarrier* all_came_;
  Partial* slots_;  // `share` partials of each block, in the order of their ranks
  int blocks_;
};

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
