// Which tile of the result a block computes next, of the kernels whose clusters stay and take tile
// after tile.
#pragma once

#include "core/cuda.h"
#include "matmul/hopper/stages.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// Clusters take tiles of clusters, `group` rows of them down and then on to the right, so that
// those that run together share rows of a and columns of b in the L2 cache.
struct TileOrder {
  unsigned rows;  // of tiles of clusters
  unsigned cols;
  unsigned tiles;  // rows * cols * batch, less than 2^31
  unsigned group;
  int steps;           // stages a tile takes
  int a_batch_stride;  // 1, or 0 if the batch shares the factor
  int b_batch_stride;
};

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
  return {
      static_cast<int>(row * Config::kClusterRows + rank / Config::kClusterCols) * Config::kRows,
      static_cast<int>(col * Config::kClusterCols + rank % Config::kClusterCols) *
          Config::kResultCols,
      static_cast<int>(matrix)};
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
