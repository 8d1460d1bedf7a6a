// Transposes matrices to rows that begin at multiples of 128 bytes: factors of floats, which the
// tensor cores take only with k as the contiguous dimension.
//
//     from   | m 0 .. 31 |            to   | k 0 .. 63 . |     . : not written
//     k 0    |x0 x1 x2 ..|            m 0  |x0 y0 ..     |
//     k 1    |y0 y1 y2 ..|            m 1  |x1 y1 ..     |
//
// A block takes one such tile after the other through shared memory, whose lines are padded by one
// element, so that a warp reads a column of it from 32 banks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/integer.h"
#include "core/launch.h"
#include "core/ptx/early_launch.cuh"
#include "core/shared.h"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

inline constexpr int kTransposeThreads = 256;
// The tile of `from`. Each thread has eight loads in flight, which hides the latency of memory.
inline constexpr int kTransposeRows = 64;
inline constexpr int kTransposeCols = 32;

template <class T>
struct RowTransposition {
  const T* from;
  T* to;
  std::int64_t rows;  // of a matrix of `from`
  std::int64_t cols;
  std::int64_t to_length;  // of a row of the result
  std::int64_t tiles_down;
  std::int64_t tiles_across;
  std::int64_t tiles;  // of all matrices
};

template <class T>
struct TransposeStorage {
  T tile[kTransposeRows][kTransposeCols + 1];
};

template <class T>
__global__ void __launch_bounds__(kTransposeThreads)
    transpose_rows_kernel(const __grid_constant__ RowTransposition<T> all) {
  constexpr int kWarps = kTransposeThreads / 32;
  let_next_kernel_start();
  auto& storage = shared<TransposeStorage<T>>();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  for (std::int64_t number = blockIdx.x; number < all.tiles; number += gridDim.x) {
    const std::int64_t line = number / all.tiles_across;
    const std::int64_t matrix = line / all.tiles_down;
    const std::int64_t row = (line - matrix * all.tiles_down) * kTransposeRows;
    const std::int64_t col = (number - line * all.tiles_across) * kTransposeCols;
    const int rows = static_cast<int>(std::min<std::int64_t>(kTransposeRows, all.rows - row));
    const int cols = static_cast<int>(std::min<std::int64_t>(kTransposeCols, all.cols - col));

    // Load: the lanes of a warp read neighbours of a row.
    const T* const from = all.from + (matrix * all.rows + row) * all.cols + col;
    T values[kTransposeRows / kWarps];
#pragma unroll
    for (int i = 0; i < kTransposeRows / kWarps; ++i) {
      const int r = warp + i * kWarps;
      if (r < rows && lane < cols) values[i] = from[r * all.cols + lane];
    }
#pragma unroll
    for (int i = 0; i < kTransposeRows / kWarps; ++i) {
      const int r = warp + i * kWarps;
      if (r < rows && lane < cols) storage.tile[r][lane] = values[i];
    }
    __syncthreads();

    // Store: they write neighbours of a column.
    T* const to = all.to + (matrix * all.cols + col) * all.to_length + row;
#pragma unroll
    for (int i = 0; i < kTransposeCols / kWarps; ++i) {
      const int c = warp + i * kWarps;
#pragma unroll
      for (int r = lane; r < kTransposeRows; r += 32) {
        if (c < cols && r < rows) to[c * all.to_length + r] = storage.tile[r][c];
      }
    }
    __syncthreads();  // the next tile is written where this one is read
  }
}

template <class T>
void launch_transpose_rows(const Queue& queue, const void* from, void* to,
                           const StoredFactor& factor) {
  const std::int64_t down = divide_up(factor.rows, kTransposeRows);
  const std::int64_t across = divide_up(factor.length, kTransposeCols);
  const std::int64_t tiles = factor.batch * down * across;
  launch_kernel<transpose_rows_kernel<T>>(
      queue, {dim3(grid_extent(tiles)), kTransposeThreads, sizeof(TransposeStorage<T>)},
      RowTransposition<T>{static_cast<const T*>(from), static_cast<T*>(to), factor.rows,
                          factor.length, pitch_of_copy(factor), down, across, tiles});
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
