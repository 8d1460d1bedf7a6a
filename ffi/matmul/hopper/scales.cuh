// Scales of 8-bit factors, by which tensor_core multiplies its sums in float32.
//
//     of rows of a and columns of b      result = (sum * a[row]) * b[col], before it is rounded
//     of blocks, 128 deep                sum += part * (a[row][block] * b[block][col / 128]), where
//                                        part is the sum of the products of a stage, as deep
#pragma once

#include <cstdint>

#include "core/cuda.h"
#include "core/integer.h"
#include "core/ptx/wgmma.cuh"
#include "matmul/hopper/stages.cuh"
#include "matmul/hopper/tile_columns.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// Which sums a kernel scales.
enum class Scaling {
  kNone,
  kOuter,   // sums that are complete, by the scales of their row and column
  kBlocks,  // sums of each stage
};

// The scales of a factor. Steps are distances between neighbours, and 0 if these share one scale.
struct FactorScales {
  const float* data;
  std::int64_t matrix_step;
  std::int64_t step;        // of rows of a; of columns of b, or of blocks of them
  std::int64_t depth_step;  // of blocks of the depth
  int last;                 // row, column, or block of columns

  // The index is clamped to the last one, so that threads beyond the edge can load, too.
  __device__ __forceinline__ const float* of(int matrix, int index) const {
    return data + matrix * matrix_step + min(index, last) * step;
  }
};

struct Scales {
  FactorScales a;
  FactorScales b;
};

// The scales of matrices with `extent` rows or columns, or blocks of them, and `depth` blocks along
// k. `deep`: the blocks of a row or column are neighbours.
inline FactorScales factor_scales(const void* data, ScaleKind kind, bool shared,
                                  std::int64_t extent, std::int64_t depth, bool deep) {
  FactorScales scales{static_cast<const float*>(data), 1, 0, 0, static_cast<int>(extent - 1)};
  if (kind == ScaleKind::kVector) {
    scales.matrix_step = extent;
    scales.step = 1;
  }
  if (kind == ScaleKind::kBlocks) {
    scales.matrix_step = extent * depth;
    scales.step = deep ? depth : 1;
    scales.depth_step = deep ? 1 : extent;
  }
  if (shared) scales.matrix_step = 0;
  return scales;
}

inline Scales scales_of(const Problem& problem, const Buffers& buffers) {
  const std::int64_t depth = divide_up(problem.k, kScaleBlock);
  const std::int64_t cols =
      problem.b_scale == ScaleKind::kBlocks ? divide_up(problem.n, kScaleBlock) : problem.n;
  return {factor_scales(buffers.a_scale, problem.a_scale, problem.share_a_scale, problem.m, depth,
                        !problem.transpose_a),
          factor_scales(buffers.b_scale, problem.b_scale, problem.share_b_scale, cols, depth,
                        problem.transpose_b)};
}

// The scales of a tile's rows and columns. They are loaded before the products, so that no thread
// waits for them.
template <class Config>
struct OuterScales {
  float rows[Config::kWaves][2];
  TileColumns<float, Config::kResultCols> cols;

  __device__ __forceinline__ void load(const Scales& scales, const TilePosition& at, int consumer) {
#pragma unroll
    for (int wave = 0; wave < Config::kWaves; ++wave) {
      const int row = at.row + row_of_sums<Config>(consumer, wave);
#pragma unroll
      for (int j = 0; j < 2; ++j) rows[wave][j] = *scales.a.of(at.matrix, row + 8 * j);
    }
    cols.load(scales.b.of(at.matrix, 0), scales.b.last + 1, at.col,
              static_cast<int>(scales.b.step));
  }

  // In place: an int sum is replaced by the bits of a float.
  template <class Sum>
  __device__ __forceinline__ void apply(Sum (&sums)[Config::kWaves][Config::kSums]) const {
#pragma unroll
    for (int i = 0; i < Config::kSums / 4; ++i) {
      float of_cols[2];
      cols.columns(i, of_cols);
#pragma unroll
      for (int wave = 0; wave < Config::kWaves; ++wave) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          Sum& sum = sums[wave][4 * i + j];
          sum =
              __builtin_bit_cast(Sum, static_cast<float>(sum) * rows[wave][j / 2] * of_cols[j % 2]);
        }
      }
    }
  }
};

// The scales of a stage's blocks. They are loaded while the stage is multiplied.
template <class Config>
struct BlockScales {
  static constexpr int kBlocks = Config::kCols / kScaleBlock;

  float rows[Config::kWaves][2];
  float cols[kBlocks];

  __device__ __forceinline__ void load(const Scales& scales, const TilePosition& at, int consumer,
                                       int step) {
#pragma unroll
    for (int wave = 0; wave < Config::kWaves; ++wave) {
      const int row = at.row + row_of_sums<Config>(consumer, wave);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        rows[wave][j] = scales.a.of(at.matrix, row + 8 * j)[step * scales.a.depth_step];
      }
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      cols[block] =
          scales.b.of(at.matrix, at.col / kScaleBlock + block)[step * scales.b.depth_step];
    }
  }

  // `part` is sum i of the 128 columns of a block.
  __device__ __forceinline__ void add(float& sum, float part, int wave, int block, int i) const {
    sum = fmaf(part, rows[wave][i / 2 % 2] * cols[block], sum);
  }
};

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
