// The kernel of `column` for rows of few elements with the stride `inner`.
//
// A block reduces a tile of neighbouring rows. Its lanes take rows of the tile, and the threads
// that have the same lane number divide the columns of these rows, as in column.cuh. A lane's rows,
// kRows of them, lie a warp apart, so that a warp loads contiguous elements, wherever its rows
// begin:
//
//                 lanes 0 ... 31    the same lanes     lanes 32 ... 63    ...
//                 rows 0 ... 31     rows 32 ... 63     rows 64 ... 95
//     column 0:   depth 0           depth 0            depth 0
//     column 1:   depth 1           depth 1            depth 1
//     ...
//     column d:   depth 0           depth 0            depth 0        d = threads / lanes
//
// In a small array, the time is that of the instructions of one thread, one after the other, and of
// waiting for memory. So there is one block per tile, without a cluster or a second launch; a
// thread waits once for kShortColumnLoads columns; the depths of a warp are combined by shuffles,
// and then those of the block after one barrier. If rows are so many, or columns so few, that there
// would be one depth, whole_column.cuh takes the problem.
//
// The last tile ends with the last row, and so may have rows of the tile before it too.
#pragma once

#include <algorithm>

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

template <class Reducer, int kRows>
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
  const unsigned tile_rows = lanes * kRows;
  const unsigned inner = min(tile.remainder * tile_rows, shape.inner - tile_rows);
  // The lane's first row in the tile.
  const int own_row = kRows == 1 ? lane : lane / kWarpSize * kWarpSize * kRows + lane % kWarpSize;
  const Element* const own =
      x + std::uint64_t{tile.quotient} * shape.size + (depth * shape.inner + inner + own_row);

  // Fold the thread's columns.
  ShortFold<Reducer> fold[kRows];
  Element elements[kShortColumnLoads][kRows];
  const Element* from = own;
  int column = depth;
  const auto load = [&](int u) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) elements[u][i] = from[i * kWarpSize];
    from += shape.step;
  };
  const auto is_left = [&](int u) { return column + u * depths < shape.columns; };
  const auto fold_half = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      Accumulator<Element> of_row[kHalf];
#pragma unroll
      for (int u = 0; u < kHalf; ++u) {
        Accumulator<Element> value[1];
        read.widen(RegisterPack<Element, 1>{{elements[begin + u][i]}}, value);
        of_row[u] = value[0];
      }
      fold[i].add(of_row, column + begin * depths, depths);
    }
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
#pragma unroll
      for (int i = 0; i < kRows; ++i) elements[u][i] = absent_element<Reducer>();
      if (is_left(u)) load(u);
    }
  }
#pragma unroll
  for (int begin = 0; begin < kShortColumnLoads; begin += kHalf) {
    if (is_left(begin)) fold_half(begin);
  }
  if constexpr (kIsIndexed<Partial>) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      Partial& best = fold[i].partial;
      if (best.value == best.value) continue;
      best.index = depth;
      from = own + i * kWarpSize;
      for (; best.index + depths < shape.columns; best.index += depths, from += shape.step) {
        Accumulator<Element> value[1];
        read.widen(RegisterPack<Element, 1>{{*from}}, value);
        if (value[0] != value[0]) break;
      }
    }
  }

  const std::int64_t first_row = std::int64_t{tile.quotient} * shape.inner + inner;

  // Combine over the depths of a warp, and then over those of the block.
  int set = depth;  // of partials in shared memory, one for each row of the tile
  int sets = depths;
  bool has_set = true;
  if constexpr (kRows == 1) {
    if (lanes < kWarpSize) {
      set = thread / kWarpSize;
      sets = blockDim.x / kWarpSize;
      has_set = thread % kWarpSize < lanes;
      fold[0].partial = group_reduce(fold[0].partial, Combine{}, kWarpSize / lanes, lanes);
    }
  }
  if (has_set) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      partials[set * tile_rows + own_row + i * kWarpSize] = fold[i].partial;
    }
  }
  __syncthreads();
#pragma unroll 1
  for (unsigned row = thread; row < tile_rows; row += blockDim.x) {
    Partial all = combine_sets<Reducer>(partials + row, tile_rows);
#pragma unroll 1
    for (int i = kShortColumnSets; i < sets; i += kShortColumnSets) {
      all = Combine{}(all, combine_sets<Reducer>(partials + i * tile_rows + row, tile_rows));
    }
    Reducer::store(y, first_row + row, all);
  }
}

template <class Instance>
void launch_short_column(const Call& call) {
  using Reducer = typename Instance::OfShortRows;
  const Config& config = call.config;
  const Problem& problem = call.problem;
  dispatch_value<1, kShortColumnRows>(config.lane_rows, [&](auto rows) {
    constexpr int kRows = decltype(rows)::value;
    const std::int64_t tile_rows = config.lanes * kRows;
    const std::int64_t tiles = divide_up(problem.inner, tile_rows);
    const int depths = config.threads / config.lanes;
    const int sets = config.threads / std::max(config.lanes, kWarpSize);
    launch_kernel<short_column_kernel<Reducer, kRows>>(
        call.queue,
        {grid_extent(problem.outer * tiles), static_cast<unsigned>(config.threads),
         sets * tile_rows * sizeof(typename Reducer::Partial)},
        Instance::elements(call),
        ShortColumns{static_cast<unsigned>(problem.inner),
                     static_cast<unsigned>(problem.columns * problem.inner),
                     static_cast<unsigned>(depths * problem.inner),
                     static_cast<int>(problem.columns), depths, log2_of(config.lanes),
                     Divisor(tiles)},
        call.result());
  });
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
