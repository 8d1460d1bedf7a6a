// Shared by the ladder's steps before `multiple`: a block reduces a tile of a row, with one or two
// elements per thread, to one partial. The steps differ in how they reduce the tile.
//
//     row ->  | tile 0: block 0 | tile 1: block 1 | ... | tile n - 1, shorter |
#pragma once

#include "core/shared.h"
#include "reduce/instance.cuh"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

template <class Reducer>
struct TreeStorage {
  typename Reducer::Partial tree[kLadderThreads];
};

// A tile: tile[column] is the value of an element, or the identity beyond the end of the row.
template <class Reducer>
struct RowTile {
  const typename Reducer::Element* elements;
  std::int64_t columns;  // up to the end of the row
  typename Reducer::Reader read;

  __device__ typename Reducer::Partial operator[](int column) const {
    using Partial = typename Reducer::Partial;
    return column < columns ? static_cast<Partial>(read(elements[column])) : Reducer::identity();
  }
};

// Calls reduce_tile(tile), which returns the tile's partial in thread 0, for each tile of each row:
// blockIdx.x counts tiles and blockIdx.y rows.
template <class Reducer, int kTileColumns, class ReduceTile>
__device__ inline void for_each_tile(const typename Reducer::Element* x, const Target& y,
                                     ContiguousRows rows, ReduceTile&& reduce_tile) {
  const std::int64_t tiles = (rows.columns + kTileColumns - 1) / kTileColumns;
  const typename Reducer::Reader read(y);
  for (std::int64_t row = blockIdx.y; row < rows.count; row += gridDim.y) {
    for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const std::int64_t first = tile * kTileColumns;
      const auto partial =
          reduce_tile(RowTile<Reducer>{x + row * rows.columns + first, rows.columns - first, read});
      if (threadIdx.x == 0) Reducer::store(y, row * tiles + tile, partial);
      __syncthreads();  // before the next tile overwrites the tree
    }
  }
}

// Launches a step on an array of rows.
template <auto kKernel, class Reducer>
void launch_step(const Queue& queue, Algorithm algorithm, const typename Reducer::Element* x,
                 const Target& y, ContiguousRows rows) {
  const std::int64_t tiles = divide_up(rows.columns, step_columns(algorithm));
  launch_kernel<kKernel>(queue,
                         {dim3(grid_extent(tiles), grid_extent_beyond_x(rows.count)),
                          kLadderThreads, sizeof(TreeStorage<Reducer>)},
                         x, y, rows);
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
