// Algorithm `held`: a group of threads holds a whole row in registers.
//
// For small arrays, and for those in the L2 cache, instructions take most of the time. So there is
// no loop here: a thread loads its whole share of a row before it folds any of it, and uses few
// registers, so that the most threads are resident. The elements before a row's first whole pack of
// 16 bytes and after its last one are its edges; a thread has at most one of them, so no pack is
// masked:
//
//     addresses         |0              |16             |32             |48
//     row (4 bytes)             x0  x1  x2  x3  x4  x5  x6  x7  x8  x9  x10
//     8 threads                 t0  t1  |----- t0 ------|----- t1 ------| t2
//
// In rows with edges, threads without a pack load the row's last pack again: a conditional load
// would need more registers, and the compiler would fold one pack before it loads the next. argmax
// and argmin also fold that pack again: it does not change the result, and with a branch around it
// the compiler would move the load into the branch. If threads have one pack at most, these two
// have a kernel for that.
//
// Short rows that are not whole packs are read element by element, by a separate kernel, if the
// array has no more elements than the GPU has resident threads: then no load depends on the
// alignment of a row, and there are no edges.
//
// Lanes combine by shuffles, and the warps of a row in shared memory; all of it in a tree.
//
// The kernel parameters that a small array needs are within 64 bytes, which are fetched at once:
// `x`, `rows` and the first members of `y`.
#pragma once

#include "core/ptx/memory.cuh"
#include "core/shared.h"
#include "core/vector.h"
#include "reduce/instance.cuh"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

// If a row has no more warps than this, each thread reads the partials of all of them.
inline constexpr int kFewWarps = 4;

struct HeldRows {
  unsigned count;
  unsigned columns;
  unsigned bytes;  // of a row
};

template <class Element>
struct HeldRow {
  unsigned row;
  bool exists;  // else it is the last row again, whose result another thread stores
  const Element* begin;
};

// The row of the calling thread, in blocks of (threads per row) x (rows) threads.
template <class Element>
__device__ __forceinline__ HeldRow<Element> row_of_thread(const Element* x, const HeldRows& rows) {
  const unsigned own = blockIdx.x * blockDim.y + threadIdx.y;
  const bool exists = own < rows.count;
  const unsigned row = exists ? own : rows.count - 1;
  return {row, exists,
          reinterpret_cast<const Element*>(reinterpret_cast<const unsigned char*>(x) +
                                           std::uint64_t{row} * rows.bytes)};
}

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
  constexpr unsigned kEach = sizeof(Element);
  constexpr unsigned kBytes = kPack * kEach;
  const typename Reducer::Reader read(y);
  const int threads = blockDim.x;
  const int thread = threadIdx.x;
  const auto [row, has_row, begin] = row_of_thread(x, rows);

  // -- Load, then fold --
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const unsigned head = kEdges ? -(static_cast<unsigned>(address) / kEach) % kPack : 0;
  const int packs = static_cast<int>((rows.columns - head) / kPack);
  const auto from = address + head * kEach;
  const auto at = [&](int i) { return thread + i * threads; };
  RegisterPack<Element, kPack> held[kPacks] = {};  // g++ does not see that all used are loaded
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if constexpr (kEdges) {
      const auto pack = static_cast<unsigned>(at(i) < packs ? at(i) : packs - 1);
      // An integer address: with pointers, the compiler would compute each one from all terms.
      std::uint32_t words[kBytes / 4];
      read_once(reinterpret_cast<const void*>(from + std::uint64_t{pack} * kBytes), words);
      std::memcpy(&held[i], words, kBytes);
    } else if (at(i) < packs) {
      held[i] = read_pack<kPack>(begin + at(i) * kPack);
    }
  }
  const int edge_column = thread < static_cast<int>(head) ? thread : thread + packs * kPack;
  const bool has_edge = kEdges && static_cast<unsigned>(edge_column) < rows.columns;
  const Element edge = has_edge ? begin[static_cast<unsigned>(edge_column)] : Element{};

  Partial of_thread;
  if constexpr (std::is_floating_point_v<Partial>) {  // in trees, since sums are rounded
    Partial of_pack[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      Accumulator<Element> value[kPack];
      read.widen(held[i], value);
      of_pack[i] = at(i) < packs ? tree<Combine>(value) : Reducer::identity();
    }
    of_thread = tree<Combine>(of_pack);
    if (has_edge) of_thread = Combine{}(of_thread, read(edge));
  } else {
    typename Reducer::Fold fold;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (!kEdges && at(i) >= packs) break;
      const int pack = at(i) < packs ? at(i) : packs - 1;
      Accumulator<Element> value[kPack];
      read.widen(held[i], value);
      fold.add(value, head + pack * kPack, 1);
    }
    of_thread = fold.value();
    if (has_edge) {
      typename Reducer::Fold of_edge;
      const Accumulator<Element> value[1] = {read(edge)};
      of_edge.add(value, edge_column, 1);
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
  Partial of_row;
  if (row_warps <= kFewWarps && std::is_arithmetic_v<Partial>) {
    Partial terms[kFewWarps];  // of all warps, in each thread: faster than shuffles
#pragma unroll
    for (int i = 0; i < kFewWarps; ++i) terms[i] = i < row_warps ? warps[i] : Reducer::identity();
    of_row = tree<Combine>(terms);
  } else {
    of_row = group_reduce<kWarpSize>(thread < row_warps ? warps[thread] : Reducer::identity(),
                                     Combine{});
  }
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

  const auto at = [&](int i) { return thread + i * threads; };
  const auto has = [&](int i) { return at(i) < static_cast<int>(rows.columns); };
  Element held[kHeldElements] = {};
#pragma unroll
  for (int i = 0; i < kHeldElements; ++i) {
    if (has(i)) held[i] = begin[at(i)];
  }
  Partial of_thread;
  if constexpr (std::is_floating_point_v<Partial>) {
    Partial terms[kHeldElements];
#pragma unroll
    for (int i = 0; i < kHeldElements; ++i) terms[i] = has(i) ? read(held[i]) : Reducer::identity();
    of_thread = tree<Combine>(terms);
  } else {
    Accumulator<Element> value[kHeldElements];
    unsigned kept = 0;
#pragma unroll
    for (int i = 0; i < kHeldElements; ++i) {
      value[i] = read(held[i]);
      if (has(i)) kept |= 1u << i;
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
  using Element = typename Instance::Element;
  using Reducer = typename Instance::OfShortRows;
  const Config& config = call.config;
  const int rows_per_block = config.threads / config.lanes;
  const LaunchShape shape{grid_extent(divide_up(call.problem.rows(), rows_per_block)),
                          dim3(config.lanes, rows_per_block), sizeof(BlockStorage<Reducer>)};
  const HeldRows rows{static_cast<unsigned>(call.problem.rows()),
                      static_cast<unsigned>(call.problem.columns),
                      static_cast<unsigned>(call.problem.columns * sizeof(Element))};
  const auto launch_with = [&](auto edges, auto packs) {
    launch_kernel<held_kernel<Reducer, decltype(edges)::value, decltype(packs)::value>>(
        call.queue, shape, Instance::elements(call), rows, call.result());
  };
  const std::integral_constant<int, kHeldPacks> most;
  if constexpr (holds_edges(kDTypeOf<Element>)) {
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
