// What the tiled transpose kernels share: the matrices to transpose, and the tile of a block.
#pragma once

#include "transpose/index.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {

// The matrices that a movement transposes. The column index is contiguous in the operand, the row
// index in the result:
//
//     operand   ... row ... column          result   ... column ... row
//
// The other dimensions index the matrices, except one, `depth`, which belongs to the tiles: a short
// run of words that stay together, or a dimension that fills up tiles where matrices are too small.
struct Matrices {
  // The numbers of tiles.
  Divisor matrix_tiles;
  Divisor band_tiles;
  Divisor depth_tiles;
  Divisor last_band_height;
  std::uint32_t row_tiles;
  // Of a matrix.
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

  __host__ __device__ std::int64_t in_offset(std::int64_t row, std::int64_t column,
                                             std::int64_t depth) const {
    return row * in_row_stride + column * in_column_stride + depth * in_depth_stride;
  }
  __host__ __device__ std::int64_t out_offset(std::int64_t row, std::int64_t column,
                                              std::int64_t depth) const {
    return row * out_row_stride + column * out_column_stride + depth * out_depth_stride;
  }
};

// For matrices without other dimensions. Its strides are larger than any other.
inline const Dim kNoDepth{1, std::int64_t{1} << 48, std::int64_t{1} << 48};

// Within a matrix, tiles are numbered in bands of this many rows of tiles, column by column within
// a band. Blocks that run at the same time then share pages of both the operand and the result.
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
  const Division place = first_row + kBandHeight <= matrices.row_tiles
                             ? Division{band.remainder / kBandHeight, band.remainder % kBandHeight}
                             : matrices.last_band_height.divide(band.remainder);
  return {first_row + place.remainder, place.quotient, depth.remainder,
          matrices.others.offsets(depth.quotient)};
}

// The matrices of a movement, in tiles of the configuration.
inline Matrices matrices_of(const Movement& movement, const Dim& row, const Dim& column,
                            const Dim& depth, const Config& config) {
  Matrices result;
  result.rows = static_cast<std::uint32_t>(row.size);
  result.columns = static_cast<std::uint32_t>(column.size);
  result.depth = static_cast<std::uint32_t>(depth.size);
  result.in_row_stride = row.in_stride;
  result.in_column_stride = column.in_stride;
  result.in_depth_stride = depth.in_stride;
  result.out_row_stride = row.out_stride;
  result.out_column_stride = column.out_stride;
  result.out_depth_stride = depth.out_stride;
  result.others = walk(movement, {&row, &column, &depth});
  const std::int64_t row_tiles = divide_up(row.size, config.tile_rows);
  const std::int64_t column_tiles = divide_up(column.size, config.tile_columns);
  result.row_tiles = static_cast<std::uint32_t>(row_tiles);
  result.last_band_height = Divisor(row_tiles % kBandHeight);
  result.depth_tiles = Divisor(divide_up(depth.size, config.tile_depth));
  result.band_tiles = Divisor(kBandHeight * column_tiles);
  result.matrix_tiles = Divisor(row_tiles * column_tiles);
  return result;
}

// The blocks of a grid: one for each tile.
inline unsigned tile_count(const Matrices& matrices) {
  std::uint32_t count = matrices.matrix_tiles.divisor * matrices.depth_tiles.divisor;
  for (int i = 0; i < matrices.others.rank; ++i) count *= matrices.others.step[i].size.divisor;
  return count;
}

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
