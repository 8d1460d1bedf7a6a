// Algorithm `held`: a group of threads holds a whole row in registers.
//
// For small arrays, and for those in the L2 cache, instructions take most of the time. So there is
// no loop here: a thread loads its whole share of a row before it folds any of it, and uses few
// registers, so that the most threads are resident. held_rows.cuh has the loads, and
// held_moments.cuh the kernels for mean and variance.
//
// In rows with edges, argmax and argmin also fold the last pack that threads without a pack load
// again: it does not change the result, and with a branch around it the compiler would move the
// load into the branch. If threads have one pack at most, these two have a kernel for that.
//
// Lanes combine by shuffles, and the warps of a row in shared memory; all of it in a tree.
//
// The kernel parameters that a small array needs are within 64 bytes, which are fetched at once:
// `x`, `rows` and the first members of `y`.
#pragma once

#include "core/shared.h"
#include "core/vector.h"
#include "reduce/held_rows.cuh"
#include "reduce/instance.cuh"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

// How many of the largest blocks fit a multiprocessor: two, for the most resident threads. But
// argmax and argmin of rows with edges would then lack registers for all packs that they load.
template <class Reducer, bool kEdges>
constexpr int least_held_blocks() {
  return kEdges && kIsIndexed<typename Reducer::Partial> ? 1 : 2;
}

// A block has (threads per row) x (rows) threads. kEdges: rows may begin and end inside packs.
// kPacks: the most packs per thread.
template <class Reducer, bool kEdges, int kPacks>
__global__ void __launch_bounds__(kMostHeldThreads, (least_held_blocks<Reducer, kEdges>()))
    held_kernel(const typename Reducer::Element* __restrict__ x, HeldRows rows, Target y) {
  using Element = typename Reducer::Element;
  using Partial = typename Reducer::Partial;
  using Combine = typename Reducer::Combine;
  constexpr int kPack = kWidestPack<Element>;
  const typename Reducer::Reader read(y);
  const int threads = blockDim.x;
  const int thread = threadIdx.x;
  const auto [row, has_row, begin] = row_of_thread(x, rows);

  // -- Load, then fold --
  const HeldPacks<Element, kEdges, kPacks> share(begin, rows.columns);
  Partial of_thread;
  if constexpr (std::is_floating_point_v<Partial>) {  // in trees, since sums are rounded
    Partial of_pack[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      Accumulator<Element> value[kPack];
      read.widen(share.held[i], value);
      of_pack[i] = share.has(i) ? tree<Combine>(value) : Reducer::identity();
    }
    of_thread = tree<Combine>(of_pack);
    if (share.has_edge) of_thread = Combine{}(of_thread, read(share.edge));
  } else {
    typename Reducer::Fold fold;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (!kEdges && !share.has(i)) break;
      const int pack = share.has(i) ? share.at(i) : share.packs - 1;
      Accumulator<Element> value[kPack];
      read.widen(share.held[i], value);
      fold.add(value, share.head + pack * kPack, 1);
    }
    of_thread = fold.value();
    if (share.has_edge) {
      typename Reducer::Fold of_edge;
      const Accumulator<Element> value[1] = {read(share.edge)};
      of_edge.add(value, share.edge_column, 1);
      of_thread = Combine{}(of_thread, of_edge.value());
    }
  }

  // -- Combine --
  if (threads <= kWarpSize) {
    const Partial of_row = group_reduce(of_thread, Combine{}, threads);
    if (has_row && thread == 0) Reducer::store(y, row, of_row);
    return;
  }
  const Partial of_warp = group_reduce<kWarpSize>(of_thread, Combine{});
  const int row_warps = threads / kWarpSize;
  const auto warps = shared<BlockStorage<Reducer>>().warps + threadIdx.y * row_warps;
  if (thread % kWarpSize == 0) warps[thread / kWarpSize] = of_warp;
  __syncthreads();
  if (thread >= kWarpSize) return;
  const Partial of_row = combine_warps<Combine>(warps, row_warps, thread, Reducer::identity());
  if (has_row && thread == 0) Reducer::store(y, row, of_row);
}

// A block has (threads per row) x (rows) threads.
template <class Reducer>
__global__ void __launch_bounds__(kMostHeldThreads, 2)
    held_elements_kernel(const typename Reducer::Element* __restrict__ x, HeldRows rows, Target y) {
  using Element = typename Reducer::Element;
  using Partial = typename Reducer::Partial;
  using Combine = typename Reducer::Combine;
  const typename Reducer::Reader read(y);
  const int threads = blockDim.x;
  const int thread = threadIdx.x;
  const auto [row, has_row, begin] = row_of_thread(x, rows);

  const HeldElements<Element> share(begin, rows.columns);
  Partial of_thread;
  if constexpr (std::is_floating_point_v<Partial>) {
    Partial terms[kHeldElements];
#pragma unroll
    for (int i = 0; i < kHeldElements; ++i)
      terms[i] = share.has(i) ? read(share.held[i]) : Reducer::identity();
    of_thread = tree<Combine>(terms);
  } else {
    Accumulator<Element> value[kHeldElements];
    unsigned kept = 0;
#pragma unroll
    for (int i = 0; i < kHeldElements; ++i) {
      value[i] = read(share.held[i]);
      if (share.has(i)) kept |= 1u << i;
    }
    typename Reducer::Fold fold;
    fold.add_kept(value, kept, thread, threads);
    of_thread = fold.value();
  }

  const Partial of_row = group_reduce<kMostElementLanes>(of_thread, Combine{}, threads);
  if (has_row && thread == 0) Reducer::store(y, row, of_row);
}

template <class Instance>
void launch_held(const Call& call) {
  using Reducer = typename Instance::OfShortRows;
  const Config& config = call.config;
  const LaunchShape shape = held_shape(call, sizeof(BlockStorage<Reducer>));
  const HeldRows rows(call.problem);
  const auto launch_with = [&](auto edges, auto packs) {
    launch_kernel<held_kernel<Reducer, decltype(edges)::value, decltype(packs)::value>>(
        call.queue, shape, Instance::elements(call), rows, call.result());
  };
  const std::integral_constant<int, kHeldPacks> most;
  if constexpr (holds_edges(kDTypeOf<typename Instance::Element>)) {
    if (config.pack == 1) {
      return launch_kernel<held_elements_kernel<Reducer>>(
          call.queue, shape, Instance::elements(call), rows, call.result());
    }
    if constexpr (is_arg(Instance::kFunction)) {
      if (config.packs == 1) {
        return launch_with(std::true_type{}, std::integral_constant<int, 1>{});
      }
    }
    if (config.edges) return launch_with(std::true_type{}, most);
  }
  launch_with(std::false_type{}, most);
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
