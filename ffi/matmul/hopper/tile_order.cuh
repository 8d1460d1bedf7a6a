// Which tile of the result a block computes next in a persistent kernel.
#pragma once

#include "core/cuda.h"
#include "core/integer.h"
#include "matmul/hopper/depth_shares.cuh"
#include "matmul/hopper/stages.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// The order of cluster tiles, each made of the tiles of a cluster's blocks: down the `group` rows
// of a group, then to the next column, so that clusters that run at the same time share rows of a
// and columns of b in the L2 cache.
//
// If the depth is split, each split has its own tiles, after those of the split before: clusters
// that run at the same time also read the same part of the depth. TilePosition::matrix then counts
// the matrices of all splits.
struct TileOrder {
  unsigned rows;  // of cluster tiles
  unsigned cols;
  unsigned first;  // tile of the launch
  unsigned tiles;  // end of the launch's tiles: rows * cols * batch * splits, less than 2^31, or a
                   // second launch's first
  unsigned group;
  int steps;           // stages per tile
  Shares split_steps;  // the same, in a share for each split
  int batch;
  int a_batch_stride;  // 1, or 0 if the batch shares the factor
  int b_batch_stride;
};

// The order of a launch whose stages are `stage_depth` deep.
template <class Kernel>
TileOrder order_of_tiles(const Problem& problem, const Config& config, int stage_depth) {
  TileOrder order{};
  order.rows = static_cast<unsigned>(divide_up(problem.m, Kernel::kRows * Kernel::kClusterRows));
  order.cols = static_cast<unsigned>(divide_up(problem.n, Kernel::kResultCols));
  order.tiles = order.rows * order.cols * static_cast<unsigned>(problem.batch * config.splits);
  order.group = static_cast<unsigned>(config.group);
  order.steps = static_cast<int>(divide_up(problem.k, stage_depth));
  order.split_steps = shares_of(order.steps, config.splits);
  order.batch = static_cast<int>(problem.batch);
  order.a_batch_stride = problem.share_a ? 0 : 1;
  order.b_batch_stride = problem.share_b ? 0 : 1;
  return order;
}

template <class Config>
__device__ __forceinline__ TilePosition locate(const TileOrder& order, unsigned tile, int rank) {
  const unsigned in_matrix = order.rows * order.cols;
  const unsigned matrix = tile / in_matrix;
  const unsigned number = tile - matrix * in_matrix;
  const unsigned in_group = order.group * order.cols;
  const unsigned group = number / in_group;
  const unsigned first = group * order.group;
  const unsigned rows = min(order.group, order.rows - first);
  const unsigned in_rows = number - group * in_group;
  const unsigned col = in_rows / rows;
  const unsigned row = first + in_rows - col * rows;
  return {(static_cast<int>(row) * Config::kClusterRows + rank) * Config::kRows,
          static_cast<int>(col) * Config::kResultCols, static_cast<int>(matrix)};
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
