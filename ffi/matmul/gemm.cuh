// Shared by kernels for all GPUs: where a factor's elements are, which tile a block computes, and
// how sums become results.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/cuda.h"
#include "core/integer.h"
#include "core/launch.h"
#include "core/vector.h"
#include "matmul/epilogue.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// A factor of the product, in the same form for op(a) and the transpose of op(b): `extent` rows (m
// or n) of `depth` elements (k). One of the strides is 1: that of the depth if `deep` (K-major).
//
//     deep:      row -> | k k k k |        not deep:  k -> | row row row row |
//                row -> | k k k k |                   k -> | row row row row |
template <class T>
struct Factor {
  const T* data;
  std::int64_t extent;
  std::int64_t row_stride;
  std::int64_t depth_stride;
  std::int64_t batch_stride;  // 0 if the whole batch shares the matrix
  bool deep;
  bool packed;  // packs of kPack start at aligned addresses and never straddle an edge
};

// The order of a factor in memory. Most matrices are aligned: they have separate kernels, in which
// both orders are constants and all accesses are packs.
enum class Order { kDeep, kWide, kAny };

// Sums become results: result = alpha activation(sum + bias) + beta c, rounded once.
template <class T>
struct Epilogue {
  using A = Accumulator<T>;
  void* result;
  const void* c;  // may be null, and is of the result's type
  A alpha;
  A beta;
  bool wide;      // the result is of type A rather than T
  bool packed;    // as in Factor
  bool finishes;  // with a bias or an activation
  Finish finish;
};

template <class T>
struct Gemm {
  Factor<T> a;
  Factor<T> b;
  Epilogue<T> epilogue;
  std::int64_t depth;
  std::int64_t first_tile;             // the tile of block 0
  const std::int32_t* flag = nullptr;  // may be null; if *flag is 0, double_buffered does nothing
};

// The tile of a block: its first row and column, and its matrix in the batch.
struct Tile {
  std::int64_t batch;
  std::int64_t row;
  std::int64_t col;
};

// Blocks that run at the same time should share rows of a and columns of b in the L2 cache. So
// consecutive tiles go down a strip of kStrip tiles, then to the next column:
//
//     0 2 4 6 |
//     1 3 5 7 |  kStrip = 2
//     8 ...
template <int kTileRows, int kTileCols, class T>
__device__ inline Tile locate_tile(const Gemm<T>& gemm) {
  constexpr std::int64_t kStrip = 8;
  const std::int64_t tile_rows = (gemm.a.extent + kTileRows - 1) / kTileRows;
  const std::int64_t tile_cols = (gemm.b.extent + kTileCols - 1) / kTileCols;
  const std::int64_t index = gemm.first_tile + blockIdx.x;
  const std::int64_t batch = index / (tile_rows * tile_cols);
  const std::int64_t in_matrix = index - batch * tile_rows * tile_cols;
  const std::int64_t strip = in_matrix / (kStrip * tile_cols);
  const std::int64_t in_strip = in_matrix - strip * kStrip * tile_cols;
  const std::int64_t rows_left = tile_rows - strip * kStrip;
  const std::int64_t strip_rows = rows_left < kStrip ? rows_left : kStrip;
  const std::int64_t col = in_strip / strip_rows;
  const std::int64_t row = strip * kStrip + in_strip - col * strip_rows;
  return {batch, row * kTileRows, col * kTileCols};
}

// For fewer than 2^31 tiles in all, which go down a column of tiles, then to the next: blocks that
// run at the same time share columns of b.
struct NumberedTiles {
  Divisor of_matrix;
  Divisor of_column;

  template <int kTileRows, int kTileCols>
  __device__ __forceinline__ Tile find(unsigned index) const {
    const Division in_batch = of_matrix.divide(index);
    const Division in_matrix = of_column.divide(in_batch.remainder);
    return {in_batch.quotient, std::int64_t{in_matrix.remainder} * kTileRows,
            std::int64_t{in_matrix.quotient} * kTileCols};
  }
};

inline NumberedTiles number_tiles(const Config& config, const Problem& problem) {
  const std::int64_t of_column = divide_up(problem.m, config.tile_rows);
  return {Divisor(of_column * divide_up(problem.n, config.tile_cols)), Divisor(of_column)};
}

// Writes kSize neighbours of one row, of which `left` lie in the matrix: `offset` is where in the
// result they begin, `col` their first column.
template <class T, int kSize>
__device__ inline void store_results_at(const Gemm<T>& gemm, std::int64_t batch,
                                        std::int64_t offset, std::int64_t col, std::int64_t left,
                                        const Accumulator<T> (&sum)[kSize]) {
  using A = Accumulator<T>;
  const Epilogue<T>& epilogue = gemm.epilogue;

  A finished[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) finished[i] = sum[i];
  if (epilogue.finishes) {  // then alpha is 1
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const A bias = epilogue.wide ? bias_of<A>(epilogue.finish, batch, col + i)
                                   : bias_of<T>(epilogue.finish, batch, col + i);
      finished[i] = activated(epilogue.finish.op, sum[i] + bias);
    }
  }

  const auto store_to = [&](auto* result, const auto* c) {
    A value[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) value[i] = epilogue.alpha * finished[i];
    if (epilogue.packed) {
      if (c != nullptr) {
        A added[kSize];
        load<kSize>(c + offset, added);
#pragma unroll
        for (int i = 0; i < kSize; ++i) value[i] += epilogue.beta * added[i];
      }
      store<kSize>(value, result + offset);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (i < left) {
          if (c != nullptr) value[i] += epilogue.beta * widen(c[offset + i]);
          result[offset + i] = narrow<std::remove_reference_t<decltype(*result)>>(value[i]);
        }
      }
    }
  };
  if constexpr (!std::is_same_v<T, A>) {
    if (epilogue.wide) {
      store_to(static_cast<A*>(epilogue.result), static_cast<const A*>(epilogue.c));
      return;
    }
  }
  store_to(static_cast<T*>(epilogue.result), static_cast<const T*>(epilogue.c));
}

// Writes kSize neighbours of one row, as far as they lie in the matrix.
template <class T, int kSize>
__device__ inline void store_results(const Gemm<T>& gemm, std::int64_t batch, std::int64_t row,
                                     std::int64_t col, const Accumulator<T> (&sum)[kSize]) {
  if (row >= gemm.a.extent || col >= gemm.b.extent) return;
  const std::int64_t offset = (batch * gemm.a.extent + row) * gemm.b.extent + col;
  store_results_at(gemm, batch, offset, col, gemm.b.extent - col, sum);
}

// `rows_first`: a step along the rows is a step of one element in memory.
template <class T>
Factor<T> make_factor(const void* data, std::int64_t extent, std::int64_t depth, bool rows_first,
                      bool is_shared, bool packed) {
  return {static_cast<const T*>(data),
          extent,
          rows_first ? 1 : depth,
          rows_first ? extent : 1,
          is_shared ? 0 : extent * depth,
          !rows_first,
          packed};
}

template <class T>
Gemm<T> make_gemm(const Config& config, const Problem& problem, const Buffers& buffers) {
  using A = Accumulator<T>;
  return {make_factor<T>(buffers.a, problem.m, problem.k, problem.transpose_a, problem.share_a,
                         config.pack_a),
          make_factor<T>(buffers.b, problem.n, problem.k, !problem.transpose_b, problem.share_b,
                         config.pack_b),
          Epilogue<T>{buffers.result, buffers.c, static_cast<A>(buffers.alpha),
                      static_cast<A>(buffers.beta), problem.result_dtype != problem.dtype,
                      config.pack_result, has_epilogue(problem), finish_of(problem, buffers)},
          problem.k, /*first_tile=*/0};
}

// A product to be launched.
template <class T>
struct Call {
  const Queue& queue;
  const Config& config;
  std::int64_t batch;
  Gemm<T> gemm;
};

// One block a tile. A grid has 2^31 - 1 blocks at most; further tiles take another launch.
template <auto kKernel, class T>
void launch_tiles(const Call<T>& call, std::size_t shared_bytes) {
  Gemm<T> gemm = call.gemm;
  const std::int64_t tiles = call.batch * divide_up(gemm.a.extent, call.config.tile_rows) *
                             divide_up(gemm.b.extent, call.config.tile_cols);
  const auto threads = static_cast<unsigned>(call.config.threads);
  for (; gemm.first_tile < tiles; gemm.first_tile += std::numeric_limits<std::int32_t>::max()) {
    launch_kernel<kKernel>(call.queue,
                           {grid_extent(tiles - gemm.first_tile), threads, shared_bytes}, gemm);
  }
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
