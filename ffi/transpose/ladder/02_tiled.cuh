// Ladder, step 2: `tiled`.
//
// A block reads a tile in the order of the operand and writes it in the order of the result, so that
// both sides are coalesced; between the two the tile lies in shared memory. It is stored in the order
// of the result, and each column of it begins one bank further than the one before:
//
//     shared memory, 64 x 64       column 0   bank  0  1  2 ... 31  0 ... 31   pad
//                                  column 1   bank  1  2  3 ...  0  1 ...  0   pad
//                                  column 2   bank  2  3  4 ...  1  2 ...  1   pad
//
// A warp that writes one element to each of 32 columns hits 32 banks; without the pad, one bank.
//
// Matrices narrower than a tile take a tile of as many elements in another shape: Box.
#pragma once

#include "core/shared.h"
#include "transpose/matrices.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {

inline constexpr int kTiledThreads = 256;

// 64 x 64, or for elements of which so many exceed 48 KiB of shared memory, 32 x 32.
template <class Word>
inline constexpr int kTileSideLog2 = sizeof(Word) <= 4 ? 6 : 5;

// The shape of a tile, in powers of two. An index over its elements, in the order of the operand
// or of the result, holds the coordinates as fields of bits; the first field, column or row, is the
// lowest.
struct Box {
  int log2_rows;
  int log2_columns;
  int log2_depth;
  int in_row_shift;
  int in_depth_shift;
  int out_column_shift;
  int out_depth_shift;
  int pad_shift;  // a pad follows each run of 2^pad_shift elements
};

// The common shape, as constants.
template <int kLog2Side>
struct Square {
  static constexpr int log2_rows = kLog2Side;
  static constexpr int log2_columns = kLog2Side;
  static constexpr int log2_depth = 0;
  static constexpr int in_row_shift = kLog2Side;
  static constexpr int in_depth_shift = 2 * kLog2Side;
  static constexpr int out_column_shift = kLog2Side;
  static constexpr int out_depth_shift = 2 * kLog2Side;
  static constexpr int pad_shift = kLog2Side;
};

// Elements a bank wide or wider are padded by one, narrower ones by a bank.
template <class Word>
inline constexpr int kTilePad = sizeof(Word) < 4 ? 4 / sizeof(Word) : 1;

inline constexpr int kMinPadShift = 5;

template <class Word>
struct TileStorage {
  static constexpr int kElements = 1 << (2 * kTileSideLog2<Word>);
  Word element[kElements + (kElements >> kMinPadShift) * kTilePad<Word>];
};

// Moves one tile. Where it is whole, nothing needs a check and offsets grow by constant steps.
template <bool kWhole, class Word, class Shape>
__device__ inline void turn_tile(const Word* __restrict__ x, Word* __restrict__ y,
                                 const Matrices& matrices, const Tile& tile, const Shape& box) {
  constexpr int kPerThread = TileStorage<Word>::kElements / kTiledThreads;
  auto& storage = shared<TileStorage<Word>>();
  const std::uint32_t first_row = tile.row << box.log2_rows;
  const std::uint32_t first_column = tile.column << box.log2_columns;
  const std::uint32_t first_depth = tile.depth << box.log2_depth;
  x += tile.matrix.in + first_row * matrices.in_row_stride + first_column +
       first_depth * matrices.in_depth_stride;
  y += tile.matrix.out + first_column * matrices.out_column_stride + first_row +
       first_depth * matrices.out_depth_stride;

  const auto field = [](int index, int shift, int log2_size) {
    return static_cast<std::uint32_t>(index >> shift & ((1 << log2_size) - 1));
  };
  const auto exists = [&](std::uint32_t row, std::uint32_t column, std::uint32_t depth) {
    return kWhole || (row < matrices.rows - first_row && column < matrices.columns - first_column &&
                      depth < matrices.depth - first_depth);
  };
  const auto slot = [&](std::uint32_t row, std::uint32_t column, std::uint32_t depth) {
    const std::uint32_t index =
        row + (column << box.out_column_shift) + (depth << box.out_depth_shift);
    return index + (index >> box.pad_shift) * kTilePad<Word>;
  };

  // Load all, then put all into shared memory, for the loads to be in flight together.
  Word element[kPerThread] = {};
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int index = i * kTiledThreads + threadIdx.x;
    const std::uint32_t row = field(index, box.in_row_shift, box.log2_rows);
    const std::uint32_t column = field(index, 0, box.log2_columns);
    const std::uint32_t depth = field(index, box.in_depth_shift, box.log2_depth);
    if (exists(row, column, depth)) {
      element[i] = x[row * matrices.in_row_stride + column + depth * matrices.in_depth_stride];
    }
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int index = i * kTiledThreads + threadIdx.x;
    const std::uint32_t row = field(index, box.in_row_shift, box.log2_rows);
    const std::uint32_t column = field(index, 0, box.log2_columns);
    const std::uint32_t depth = field(index, box.in_depth_shift, box.log2_depth);
    storage.element[slot(row, column, depth)] = element[i];
  }
  __syncthreads();

  // Store.
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int index = i * kTiledThreads + threadIdx.x;
    const std::uint32_t row = field(index, 0, box.log2_rows);
    const std::uint32_t column = field(index, box.out_column_shift, box.log2_columns);
    const std::uint32_t depth = field(index, box.out_depth_shift, box.log2_depth);
    if (exists(row, column, depth)) {
      y[row + column * matrices.out_column_stride + depth * matrices.out_depth_stride] =
          storage.element[slot(row, column, depth)];
    }
  }
}

template <class Word, class Shape>
__global__ void __launch_bounds__(kTiledThreads)
    tiled_kernel(const Word* __restrict__ x, Word* __restrict__ y, Matrices matrices, Shape box) {
  const Tile tile = block_tile(matrices);
  const bool whole = (tile.row + 1) << box.log2_rows <= matrices.rows &&
                     (tile.column + 1) << box.log2_columns <= matrices.columns &&
                     (tile.depth + 1) << box.log2_depth <= matrices.depth;
  if (whole) {
    turn_tile<true>(x, y, matrices, tile, box);
  } else {
    turn_tile<false>(x, y, matrices, tile, box);
  }
}

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
