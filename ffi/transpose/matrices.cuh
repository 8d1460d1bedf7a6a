// What the tiled transpose kernels share: the matrices to turn, and which tile a block takes.
#pragma once

#include "transpose/index.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {

// The matrices that a movement turns. Columns are the nearest neighbours in the operand, rows in
// the result:
//
//     operand   ... row ... column          result   ... column ... row
//
// The other dimensions are an index over matrices, except one, `depth`, which belongs to the tiles:
// a short run of words that stay together, or a dimension that lends its steps where matrices are
// too small to fill a tile.
struct Matrices {
  std::uint32_t rows;
  std::uint32_t columns;
  std::uint32_t depth;
  std::int64_t in_row_stride;
  std::int64_t in_column_stride;
  std::int64_t in_depth_stride;
  std::int64_t out_row_stride;
  std::int64_t out_column_stride;
  std::int64_t out_depth_stride;
  Walk others;
  // How many tiles there are of each.
  std::uint32_t row_tiles;
  Divisor depth_tiles;
  Divisor band_tiles;
  Divisor matrix_tiles;

  __host__ __device__ std::int64_t in_offset(std::int64_t row, std::int64_t column,
                                             std::int64_t depth) const {
    return row * in_row_stride + column * in_column_stride + depth * in_depth_stride;
  }
  __host__ __device__ std::int64_t out_offset(std::int64_t row, std::int64_t column,
                                              std::int64_t depth) const {
    return row * out_row_stride + column * out_column_stride + depth * out_depth_stride;
  }
};

// Within a matrix, tiles are counted in bands of this many rows of tiles, down the columns of a
// band. The blocks that run at one time then share pages of operand and result alike.
inline constexpr std::uint32_t kBandHeight = 8;

// A block's tile: which one it is along each dimension, and where its matrix begins.
struct Tile {
  std::uint32_t row;
  std::uint32_t column;
  std::uint32_t depth;
  Offsets matrix;
};

__device__ inline Tile block_tile(const Matrices& matrices) {
  const Division matrix = matrices.matrix_tiles.divide(blockIdx.x);
  const Division band = matrices.band_tiles.divide(matrix.remainder);
  const Division depth = matrices.depth_tiles.divide(matrix.quotient);
  const std::uint32_t first_row = band.quotient * kBandHeight;
  const std::uint32_t rows_left = matrices.row_tiles - first_row;
  const std::uint32_t height = rows_left < kBandHeight ? rows_left : kBandHeight;
  const std::uint32_t column = band.remainder / height;
  return {first_row + band.remainder - column * height, column, depth.remainder,
          matrices.others.offsets(depth.quotient)};
}

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
