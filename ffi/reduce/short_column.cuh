// The kernel of `column` for rows of few elements with the stride `inner`.
//
// A block reduces a tile of neighbouring rows, one for each lane, and the threads that have the
// same lane number divide the columns of their row, as in column.cuh. A warp loads single elements,
// which are contiguous, wherever its rows begin:
//
//                 lane 0     lane 1     ...     lane 31
//     column 0:   depth 0    depth 0            depth 0
//     column 1:   depth 1    depth 1            depth 1
//     ...
//     column d:   depth 0    depth 0            depth 0        d = threads / lanes
//
// In a small array, the time is that of the instructions of one thread, one after the other, and of
// waiting for memory. So there is one block per tile, without a cluster or a second launch; a
// thread waits once for kShortColumnLoads columns; the depths of a warp are combined by shuffles,
// and then those of the block after one barrier. If rows are many, or columns few, whole_column.cuh
// takes the problem.
//
// The last tile ends with the last row, and so may have rows of the tile before it too.
#pragma once

#include "core/integer.h"
#include "core/shared.h"
#include "reduce/few_elements.cuh"
#include "reduce/instance.cuh"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

// The host computes what it can, since a small array would wait for it.
struct ShortColumns {
  unsigned inner;
  unsigned size;  // elements per outer
  unsigned step;  // elements from a column of a thread to its next one
  int columns;
  int depths;
  int lanes_log2;
  Divisor tiles;  // per outer
};

// Combines the partials from[0], from[apart], ... in shared memory, kShortColumnSets of them.
template <class Reducer>
__device__ inline typename Reducer::Partial combine_sets(const typename Reducer::Partial* from,
                                                         int apart) {
  typename Reducer::Partial terms[kShortColumnSets];
#pragma unroll
  for (int i = 0; i < kShortColumnSets; ++i) terms[i] = from[i * apart];
  return tree<typename Reducer::Combine>(terms);
}

template <class Reducer>
__global__ void __launch_bounds__(kMostShortColumnThreads)
    short_column_kernel(const typename Reducer::Element* __restrict__ x, ShortColumns shape,
                        Target y) {
  using Element = typename Reducer::Element;
  using Partial = typename Reducer::Partial;
  using Combine = typename Reducer::Combine;
  constexpr int kHalf = kShortColumnLoads / 2;
  Partial* const partials = shared_array<Partial>();
  const typename Reducer::Reader read(y);
  const int lanes = 1 << shape.lanes_log2;
  const int thread = threadIdx.x;
  const int lane = thread & (lanes - 1);
  const int depth = thread >> shape.lanes_log2;
  const int depths = shape.depths;

  const Division tile = shape.tiles.divide(blockIdx.x);
  const unsigned inner = min(tile.remainder * lanes, shape.inner - lanes);
  const Element* const own =
      x + std::uint64_t{tile.quotient} * shape.size + (depth * shape.inner + inner + lane);

  // Fold the thread's columns.
  ShortFold<Reducer> fold;
  Element elements[kShortColumnLoads];
  const Element* from = own;
  int column = depth;
  const auto load = [&](int u) {
    elements[u] = *from;
    from += shape.step;
  };
  const auto is_left = [&](int u) { return column + u * depths < shape.columns; };
  const auto fold_half = [&](int begin) {
    Accumulator<Element> values[kHalf];
#pragma unroll
    for (int u = 0; u < kHalf; ++u) {
      Accumulator<Element> value[1];
      read.widen(RegisterPack<Element, 1>{{elements[begin + u]}}, value);
      values[u] = value[0];
    }
    fold.add(values, column + begin * depths, depths);
  };
#pragma unroll 1
  for (; is_left(kShortColumnLoads - 1); column += kShortColumnLoads * depths) {
#pragma unroll
    for (int u = 0; u < kShortColumnLoads; ++u) load(u);
    fold_half(0);
    fold_half(kHalf);
  }
#pragma unroll
  for (int begin = 0; begin < kShortColumnLoads; begin += kHalf) {
    if (!is_left(begin)) break;
#pragma unroll
    for (int u = begin; u < begin + kHalf; ++u) {
      elements[u] = absent_element<Reducer>();
      if (is_left(u)) load(u);
    }
  }
#pragma unroll
  for (int begin = 0; begin < kShortColumnLoads; begin += kHalf) {
    if (is_left(begin)) fold_half(begin);
  }
  if constexpr (kIsIndexed<Partial>) {
    Partial& best = fold.partial;
    if (best.value != best.value) {  // find the thread's first NaN
      best.index = depth;
      for (from = own; best.index + depths < shape.columns; best.index += depths) {
        Accumulator<Element> value[1];
        read.widen(RegisterPack<Element, 1>{{*from}}, value);
        if (value[0] != value[0]) break;
        from += shape.step;
      }
    }
  }

  const std::int64_t first_row = std::int64_t{tile.quotient} * shape.inner + inner;

  // Combine over the depths of a warp, and then over those of the block.
  int set = depth;  // of partials in shared memory, one for each lane
  int sets = depths;
  bool has_set = true;
  if (lanes < kWarpSize) {
    set = thread / kWarpSize;
    sets = blockDim.x / kWarpSize;
    has_set = thread % kWarpSize < lanes;
    fold.partial = group_reduce(fold.partial, Combine{}, kWarpSize / lanes, lanes);
  }
  if (has_set) partials[set * lanes + lane] = fold.partial;
  __syncthreads();
  if (thread >= lanes) return;
  Partial all = combine_sets<Reducer>(partials + thread, lanes);
#pragma unroll 1
  for (int i = kShortColumnSets; i < sets; i += kShortColumnSets) {
    all = Combine{}(all, combine_sets<Reducer>(partials + i * lanes + thread, lanes));
  }
  Reducer::store(y, first_row + thread, all);
}

template <class Instance>
void launch_short_column(const Call& call) {
  using Reducer = typename Instance::OfShortRows;
  const Config& config = call.config;
  const Problem& problem = call.problem;
  const std::int64_t tiles = divide_up(problem.inner, config.lanes);
  const int depths = config.threads / config.lanes;
  const std::size_t partials = config.threads / kWarpSize * config.lanes;
  launch_kernel<short_column_kernel<Reducer>>(
      call.queue,
      {grid_extent(problem.outer * tiles), static_cast<unsigned>(config.threads),
       partials * sizeof(typename Reducer::Partial)},
      Instance::elements(call),
      ShortColumns{static_cast<unsigned>(problem.inner),
                   static_cast<unsigned>(problem.columns * problem.inner),
                   static_cast<unsigned>(depths * problem.inner), static_cast<int>(problem.columns),
                   depths, log2_of(config.lanes), Divisor(tiles)},
      call.result());
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
