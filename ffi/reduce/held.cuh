// Algorithm `held`, for rows that a group of threads holds whole, in registers.
//
// Of small arrays, and of those that the L2 cache holds, instructions take the time. So there is no
// loop here: a thread loads all that falls to it before it folds any of it, few registers leave
// room for the most threads, and rows begin and end with a pack, the widest that they consist of:
//
//     row of 202 floats     101 packs of 8 bytes
//     32 threads            packs 0 .. 31 | 32 .. 63 | 64 .. 95 | 96 .. 100    four each at most
//
// Lanes combine by shuffles, and the warps of a row in shared memory; all of it in a tree.
#pragma once

#include "core/shared.h"
#include "core/vector.h"
#include "reduce/instance.cuh"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

struct HeldRows {
  unsigned count;
  unsigned bytes;    // of a row
  int packs;         // of a row
  int threads_log2;  // of a row
};

// Two of the largest blocks, so that a multiprocessor has the most threads.
template <class Reducer, int kPack>
__global__ void __launch_bounds__(kMostHeldThreads, 2)
    held_kernel(const typename Reducer::Element* __restrict__ x, Target y, HeldRows rows) {
  using Element = typename Reducer::Element;
  using Partial = typename Reducer::Partial;
  using Combine = typename Reducer::Combine;
  constexpr unsigned kBytes = kPack * sizeof(Element);
  constexpr int kHeld = held_packs(kBytes);
  const typename Reducer::Reader read(y);
  const int threads = 1 << rows.threads_log2;
  const int thread = threadIdx.x & (threads - 1);
  const int rows_per_block = blockDim.x >> rows.threads_log2;
  const unsigned row = blockIdx.x * rows_per_block + (threadIdx.x >> rows.threads_log2);
  const bool has_row = row < rows.count;
  const int packs = has_row ? rows.packs : 0;
  const auto at = [&](int i) { return thread + i * threads; };

  // -- Load, then fold --
  const unsigned step = threads * kBytes;
  const auto* const from =
      reinterpret_cast<const unsigned char*>(x) + std::uint64_t{row} * rows.bytes + thread * kBytes;
  RegisterPack<Element, kPack> held[kHeld] = {};  // g++ does not see that it is not read unset
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (at(i) < packs) {
      held[i] = read_pack<kPack>(reinterpret_cast<const Element*>(from + i * step));
    }
  }
  Partial of_thread;
  if constexpr (std::is_floating_point_v<Partial>) {  // sums are rounded
    Partial of_pack[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      Accumulator<Element> value[kPack];
      read.widen(held[i], value);
      of_pack[i] = at(i) < packs ? tree<Combine>(value) : Reducer::identity();
    }
    of_thread = tree<Combine>(of_pack);
  } else {
    typename Reducer::Fold fold;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (at(i) >= packs) break;
      Accumulator<Element> value[kPack];
      read.widen(held[i], value);
      fold.add(value, at(i) * kPack, 1);
    }
    of_thread = fold.value();
  }

  // -- Combine --
  const int lanes = threads < kWarpSize ? threads : kWarpSize;
  const Partial of_warp = group_reduce(of_thread, Combine{}, lanes);
  if (threads <= kWarpSize) {
    if (has_row && thread == 0) Reducer::store(y, row, of_warp);
    return;
  }
  const auto warps = shared<BlockStorage<Reducer>>().warps;
  const int warp = threadIdx.x / kWarpSize;
  if (thread % kWarpSize == 0) warps[warp] = of_warp;
  __syncthreads();
  if (thread >= kWarpSize) return;
  const int row_warps = threads / kWarpSize;
  const Partial of_row_warp = thread < row_warps ? warps[warp + thread] : Reducer::identity();
  const Partial of_row = group_reduce(of_row_warp, Combine{}, row_warps);
  if (has_row && thread == 0) Reducer::store(y, row, of_row);
}

// Of the packs that rows consist of, the kernel for those of the plan.
template <class Instance, int kPack = kWidestPack<typename Instance::Element>>
void launch_held(const Call& call) {
  using Element = typename Instance::Element;
  const Config& config = call.config;
  if constexpr (kPack * sizeof(Element) > kLeastHeldBytes &&
                holds_narrow_packs(kDTypeOf<Element>)) {
    if (config.pack < kPack) return launch_held<Instance, kPack / 2>(call);
  }
  const auto columns = static_cast<unsigned>(call.problem.columns);
  const int rows_per_block = config.threads / config.lanes;
  using Reducer = typename Instance::OfShortRows;
  launch_kernel<held_kernel<Reducer, kPack>>(
      call.queue,
      {grid_extent(divide_up(call.problem.rows(), rows_per_block)),
       static_cast<unsigned>(config.threads), sizeof(BlockStorage<Reducer>)},
      Instance::elements(call), call.result(),
      HeldRows{static_cast<unsigned>(call.problem.rows()),
               columns * static_cast<unsigned>(sizeof(Element)), static_cast<int>(columns / kPack),
               __builtin_ctz(static_cast<unsigned>(config.lanes))});
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
