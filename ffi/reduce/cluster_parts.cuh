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

// Combines what `blocks` blocks have sent: slots[first], slots[first + apart], ...
template <class Reducer, class Partial>
__device__ inline Partial combine_blocks(const Partial* slots, int first, int blocks, int apart) {
  return combine_apart<Reducer>(slots, first, blocks * apart, apart);
}

// Of moments, in fewer operations than a merge for each, and not one after the other: the formula
// of group_reduce() in moments.cuh.
template <class Reducer, class A>
__device__ inline Moments<A> combine_blocks(const Moments<A>* slots, int first, int blocks,
                                            int apart) {
  Moments<A> part[kMostReducingBlocks];
  A distance[kMostReducingBlocks];
  A terms[kMostReducingBlocks];
#pragma unroll
  for (int i = 0; i < kMostReducingBlocks; ++i) {
    part[i] = i < blocks ? slots[first + i * apart] : Moments<A>{};
    terms[i] = part[i].count;
  }
  const A count = tree<Add>(terms);
  const A each = fast_reciprocal(count);
#pragma unroll
  for (int i = 0; i < kMostReducingBlocks; ++i) {
    distance[i] = (part[i].mean - part[0].mean) + part[i].low;
    terms[i] = part[i].count > 0 ? part[i].count * each * distance[i] : A(0);
  }
  const A step = tree<Add>(terms);
#pragma unroll
  for (int i = 0; i < kMostReducingBlocks; ++i) {
    distance[i] = part[i].count > 0 ? distance[i] - step : A(0);
    terms[i] = part[i].count * each * distance[i];
  }
  const A low = tree<Add>(terms);
#pragma unroll
  for (int i = 0; i < kMostReducingBlocks; ++i) {
    terms[i] = part[i].squares + part[i].count * distance[i] * distance[i];
  }
  const A squares = tree<Add>(terms);
  if (!is_finite(squares) || part[0].count == 0) {
    return combine_apart<Reducer>(slots, first, blocks * apart, apart);
  }
  Moments<A> all{part[0].mean, 0, squares - count * low * low, count};
  add_exactly(step, all.mean, all.low);
  all.low += low;
  return all;
}

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
      store(first + result, combine_blocks<Reducer>(slots_, result, blocks_, share));
    }
  }

 private:
  Mbarrier* all_came_;
  Partial* slots_;  // `share` partials of each block, in the order of their ranks
  int blocks_;
};

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
