// Where the parts of rows are those of the blocks of a thread-block cluster: what `column` and
// `interleaved` do in place of partials in the workspace and the launch of combine.cuh.
//
// The results of the cluster's rows are divided among its blocks. A block sends what it has of a
// result to the shared memory of the result's block, which combines it with what the others sent:
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
// A block with results ends when it has them all, and to one without nothing is sent: so no block
// ends before what others send it has come.
#pragma once

#include "core/cuda.h"
#include "core/ptx/cluster.cuh"
#include "reduce/reduce.h"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

static_assert(kMostClusterBlocks <= kMostApart,
              "a thread combines what all blocks sent it at once");

template <class Reducer>
class ClusterParts {
 public:
  using Partial = typename Reducer::Partial;

  // `memory`: cluster_parts_bytes() of shared memory, at a multiple of 8 bytes.
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

  // All threads of the block call it. own(r) is what the block has of result r of `results`, and
  // store(r, partial) stores it; both are called by one of the block's threads.
  template <class Own, class Store>
  __device__ void combine(int results, const Own& own, const Store& store) {
    const int rank = cluster_rank();
    const int share = (results + blocks_ - 1) / blocks_;
    const int first = rank * share;
    const int left = results - first;
    const int taken = left < share ? left : share;  // not more than 0 for some of the last blocks
    cluster_wait();  // for all blocks to have initialised their barriers

    // What others send may come before it is announced: the phase is not over until it has been.
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
  Partial* slots_;  // of each block, in the order of their ranks: `share` partials
  int blocks_;
};

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
