// Algorithm `held`, for mean and variance: by distances from an origin (distances.cuh).
//
// The origin is the mean of four packs, from four places of the row. (Short rows that are read by
// elements: of four elements.) Of normally distributed float32, it is so far from the mean of the
// row that the distances are measured again in one row of 16000 (by elements, in one of 22). Then
// the threads load the row again, since packs that are kept until then would need more registers.
#pragma once

#include <type_traits>

#include "core/collectives.h"
#include "core/cuda.h"
#include "core/numeric.h"
#include "core/shared.h"
#include "core/vector.h"
#include "reduce/distances.cuh"
#include "reduce/held_rows.cuh"
#include "reduce/instance.cuh"
#include "reduce/moments.cuh"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

// ---- The sums of a thread ----

template <class Element, bool kEdges, int kPacks, class A>
__device__ __forceinline__ Distances<A> distances_in(
    const HeldPacks<Element, kEdges, kPacks>& share, const Measure<A>& by) {
  constexpr int kPack = kWidestPack<Element>;
  Distances<A> of_pack[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    A value[kPack];
    widen(share.held[i], value);
    auto all = Distances<A>::of(by.of(value[0]));
#pragma unroll
    for (int e = 1; e < kPack; ++e) all.add(by.of(value[e]));
    of_pack[i] = share.has(i) ? all : Distances<A>{};
  }
  Distances<A> of_thread = tree<AddDistances>(of_pack);
  if (share.has_edge) of_thread.add(by.of(widen(share.edge)));
  return of_thread;
}

template <class Element, class A>
__device__ __forceinline__ Distances<A> distances_in(const HeldElements<Element>& share,
                                                     const Measure<A>& by) {
  Distances<A> terms[kHeldElements];
#pragma unroll
  for (int i = 0; i < kHeldElements; ++i) {
    terms[i] = Distances<A>::of(share.has(i) ? by.of(widen(share.held[i])) : A(0));
  }
  return tree<AddDistances>(terms);
}

// ---- The origin ----

// The mean of a pack; exactly their value if all elements are equal.
template <class Element, int kPack>
__device__ __forceinline__ Accumulator<Element> mean_of(const RegisterPack<Element, kPack>& pack) {
  using A = Accumulator<Element>;
  A value[kPack];
  widen(pack, value);
#pragma unroll
  for (A& each : value) each *= A(1) / kPack;
  return tree<Add>(value);
}

// The mean of the samples of four of the `lanes` lanes from `first` on, or of all if there are no
// more; exactly their value if all are equal.
template <class A>
__device__ __forceinline__ A mean_of_lanes(A sample, int first, int lanes) {
  A value[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) value[i] = __shfl_sync(kFullWarp, sample / 4, first + i * lanes / 4);
  return tree<Add>(value);
}

template <class Element, bool kEdges, int kPacks>
__device__ __forceinline__ Accumulator<Element> origin_of(
    const HeldPacks<Element, kEdges, kPacks>& share, int first) {
  const int lanes = share.packs < share.threads ? share.packs : share.threads;
  return mean_of_lanes(mean_of(share.held[0]), first, lanes);
}

template <class Element>
__device__ __forceinline__ Accumulator<Element> origin_of(const HeldElements<Element>& share,
                                                          int first) {
  return mean_of_lanes(widen(share.held[0]), first, share.threads);
}

// The same for a row of several warps, which all read the four packs.
template <class Element, bool kEdges, int kPacks>
__device__ __forceinline__ Accumulator<Element> origin_of_warps(
    const HeldPacks<Element, kEdges, kPacks>& share) {
  constexpr int kPack = kWidestPack<Element>;
  const int pack = (share.thread % 4) * (share.packs / 4);
  const Element* const sample = share.begin + share.head + pack * kPack;
  return mean_of_lanes(mean_of(read_pack<kPack>(sample)), 0, 4);
}

// ---- The sums of a row ----

// Each group of up to kMost lanes has a row. All lanes of the warp call this; those of a row get
// its sums.
template <int kMost, class Share, class A>
__device__ __forceinline__ Measured<A> measure_by_lanes(const Share& share, A each) {
  const int first = threadIdx.y * share.threads % kWarpSize;
  const A origin = origin_of(share, first);
  const auto measure = [&](const auto& loaded, const Measure<A>& by) {
    Distances<A> all = distances_in(loaded, by);
    // Unlike group_reduce() for structs, not a loop, whose branches take as long as the shuffles.
#pragma unroll
    for (int distance = kMost / 2; distance > 0; distance /= 2) {
      if (distance < share.threads) all = AddDistances{}(all, shuffle_xor(all, distance));
    }
    return Measured<A>{by, all};
  };
  const Measured<A> found = measure(share, Measure<A>{1, origin, false});
  const bool is_off = is_far(found.all, A(1), each);
  if (!__any_sync(kFullWarp, is_off)) return found;
  const Measured<A> better = measure(share.again(), from_mean(found, each));
  return is_off ? better : found;
}

// The sums of the warps of a block, and those of the distances that they measure again.
template <class A>
struct HeldMomentsStorage {
  Distances<A> warps[kMaxWarpsPerBlock];
  Distances<A> again[kMaxWarpsPerBlock];
};

// Several warps have a row. All threads of the block call this; the first warp of a row gets its
// sums.
template <class Share, class A>
__device__ __forceinline__ Measured<A> measure_by_warps(const Share& share, A each) {
  auto& storage = shared<HeldMomentsStorage<A>>();
  const int row_warps = share.threads / kWarpSize;
  const int first = threadIdx.y * row_warps;
  const int warp = share.thread / kWarpSize;
  const int lane = share.thread % kWarpSize;
  const A parts = static_cast<A>(row_warps);
  const auto sum = [&](const Distances<A>* warps) {
    return combine_warps<AddDistances>(warps, row_warps, lane, Distances<A>{});
  };

  Measured<A> found{{1, origin_of_warps(share), false}, {}};
  const Distances<A> own = group_reduce<kWarpSize>(distances_in(share, found.by), AddDistances{});
  Distances<A>* const warps = storage.warps + first;
  if (lane == 0) warps[warp] = own;
  const bool is_any_far = __syncthreads_or(is_far(own, parts, each));
  if (!is_any_far && warp > 0) return found;
  found.all = sum(warps);
  if (!is_any_far) return found;

  // The parts of the row decide, not those of other rows of the block.
  const bool again = __any_sync(kFullWarp, lane < row_warps && is_far(warps[lane], parts, each));
  Measured<A> better{from_mean(found, each), {}};
  const Distances<A> own_again =
      group_reduce<kWarpSize>(distances_in(share.again(), better.by), AddDistances{});
  if (lane == 0) storage.again[first + warp] = own_again;
  __syncthreads();
  better.all = sum(storage.again + first);
  return again ? better : found;
}

// ---- The kernels ----

// Where the kernels write, in few enough bytes that all parameters are within 64: see held.cuh.
struct MomentsTarget {
  void* mean;
  void* variance;
  void* low;
  double correction;
  DType dtype;

  explicit MomentsTarget(const Target& y)
      : mean(y.data), variance(y.variance), low(y.low), correction(y.correction), dtype(y.dtype) {}

  template <class Element, class A>
  __device__ __forceinline__ void store(unsigned row, const Moments<A>& moments) const {
    Target y{mean, std::is_same_v<Element, float> ? DType::kFloat32 : dtype, false, {}};
    y.variance = variance;
    y.low = low;
    y.correction = correction;
    MomentsReducer<Element, A>::store(y, row, moments);
  }
};

// How many of the largest blocks fit a multiprocessor: two, if there are registers for it.
template <class Element, bool kEdges>
constexpr int least_held_moments_blocks() {
  return kEdges || sizeof(Element) == 8 ? 1 : 2;
}

// A block has (threads per row) x (rows) threads. kEdges: rows may begin and end inside packs.
template <class Element, bool kEdges>
__global__ void __launch_bounds__(kMostHeldThreads, (least_held_moments_blocks<Element, kEdges>()))
    held_moments_kernel(const Element* __restrict__ x, HeldRows rows, MomentsTarget y) {
  using A = Accumulator<Element>;
  const auto [row, has_row, begin] = row_of_thread(x, rows);
  const HeldPacks<Element, kEdges, kHeldPacks> share(begin, rows.columns);
  const A count = static_cast<A>(rows.columns);
  const A each = fast_reciprocal(count);
  const Measured<A> found = share.threads <= kWarpSize ? measure_by_lanes<kWarpSize>(share, each)
                                                       : measure_by_warps(share, each);
  if (has_row && share.thread == 0) y.store<Element>(row, moments_of(found, count, each));
}

// A block has (threads per row) x (rows) threads.
template <class Element>
__global__ void __launch_bounds__(kMostHeldThreads, 2)
    held_moments_elements_kernel(const Element* __restrict__ x, HeldRows rows, MomentsTarget y) {
  using A = Accumulator<Element>;
  const auto [row, has_row, begin] = row_of_thread(x, rows);
  const HeldElements<Element> share(begin, rows.columns);
  const A count = static_cast<A>(rows.columns);
  const A each = fast_reciprocal(count);
  const Measured<A> found = measure_by_lanes<kMostElementLanes>(share, each);
  if (has_row && share.thread == 0) y.store<Element>(row, moments_of(found, count, each));
}

template <class Instance>
void launch_held_moments(const Call& call) {
  using Element = typename Instance::Element;
  const LaunchShape shape = held_shape(call, sizeof(HeldMomentsStorage<typename Instance::Value>));
  const HeldRows rows(call.problem);
  const MomentsTarget y(call.result());
  if constexpr (holds_edges(kDTypeOf<Element>)) {
    if (call.config.pack == 1) {
      return launch_kernel<held_moments_elements_kernel<Element>>(
          call.queue, shape, Instance::elements(call), rows, y);
    }
    if (call.config.edges) {
      return launch_kernel<held_moments_kernel<Element, true>>(call.queue, shape,
                                                               Instance::elements(call), rows, y);
    }
  }
  launch_kernel<held_moments_kernel<Element, false>>(call.queue, shape, Instance::elements(call),
                                                     rows, y);
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
