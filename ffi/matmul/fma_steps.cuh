// Shared by fma_sliced and fma_batched: how factors of float32 lie in shared memory, and how a warp
// multiplies them by FMAs.
//
// Warps multiply one step, 16 elements of k, after the other. Steps are copied by cp.async, several
// ahead, into a ring of stages. A stage holds both factors of a tile, each in its order in global
// memory. If it is deep, a line is 16 k's of a row, whose four pieces are swizzled, so that the
// lanes of a load have no bank conflicts; if it is wide, a line is all rows at one k.
//
//     deep   row 0 | 0 1 2 3 | row 1 | 0 1 2 3 |      wide   k 0 | 0 1 2 .. |
//            row 2 | 1 0 3 2 | row 3 | 1 0 3 2 |             k 1 | 0 1 2 .. |
//
// The lanes of a warp form a grid in its part of the tile, here 8 x 4, and a lane has every eighth
// row and every fourth column, or every such pack of four if these are contiguous in memory. It
// loads its operands four floats at a time. Shared memory serves such a load 8 lanes at a time, or
// 16 if lanes i and i ^ 1, or i and i ^ 2, read the same address: so lanes i and i ^ 1 have the
// same rows, and i and i ^ 2 the same columns.
//
//     lanes of a warp         a lane's rows, if the depth is contiguous (deep)    8 i + down
//       0  1  4  5                           else (wide), in packs of 4          32 i + 4 down
//       2  3  6  7            its columns, deep                                   4 j + across
//       8  9 12 13                       wide                                    16 j + 4 across
//      10 11 14 15
//       ..
#pragma once

#include <cstdint>

#include "core/collectives.h"
#include "core/cuda.h"
#include "core/ptx/async_copy.cuh"
#include "core/vector.h"
#include "matmul/gemm.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// What the code below is compiled for: a tile of the table kTiles, the orders of the factors, and
// the bytes that a copy moves.
template <const auto& kTiles, int kTileIndex, bool kDeepA_, bool kDeepB_, int kVectorBytes_>
struct FmaSteps {
  static constexpr auto kTable = kTiles[kTileIndex];
  static constexpr bool kDeepA = kDeepA_;
  static constexpr bool kDeepB = kDeepB_;
  static constexpr int kVectorBytes = kVectorBytes_;
  static constexpr int kRows = kTable.rows;
  static constexpr int kCols = kTable.cols;
  static constexpr int kStages = kTable.stages;
  static constexpr int kCopiers = kTable.copiers();
  static constexpr int kDown = kTable.lanes_down;
  static constexpr int kAcross = kWarpSize / kDown;
  static constexpr int kLaneRows = kTable.warp_rows() / kDown;
  static constexpr int kLaneCols = kTable.warp_cols() / kAcross;
  // Floats from one row of the sums to the next, so that lanes that write at the same time, eight
  // packs or 32 floats, have no bank conflicts: packs of two neighbouring rows, or of rows four
  // apart, are 16 banks apart; if columns are written one by one, the padding is as many as lie
  // side by side.
  static constexpr int kSumStride = kDeepB   ? kCols + kAcross
                                    : kDeepA ? (kCols + 15) / 32 * 32 + 16
                                             : kCols + 4;

  static_assert(kLaneRows % kPack == 0 && kLaneCols % kPack == 0);
  static_assert(kDown >= 2 && kAcross >= 2, "see LanePlace");
};

template <class Config>
struct FmaStage {
  float a[Config::kRows * kFmaStepDepth];
  float b[Config::kCols * kFmaStepDepth];
};

// The index in a stage of float `k` of row `row`, and of a pack that begins there.
template <bool kDeep, int kExtent>
__device__ __forceinline__ constexpr int place_in_stage(int row, int k) {
  if (!kDeep) return k * kExtent + row;
  return row * kFmaStepDepth + ((k / kPack) ^ (row / 2 % 4)) * kPack + k % kPack;
}

// ---- Copies ----

// Copies the steps of a tile's factor, one after the other, by kCopiers threads. Elements beyond
// the factor's edges are 0.
template <class Config, bool kDeep, int kExtent>
class StepCopier {
 public:
  __device__ __forceinline__ StepCopier(const Factor<float>& factor, std::int64_t matrix,
                                        std::int64_t first_row, std::int64_t first_k, int thread)
      : line_stride_(kDeep ? factor.row_stride : factor.depth_stride),
        thread_line_(thread / kPerLine),
        thread_element_(thread % kPerLine * kElements) {
    const std::int64_t left = factor.extent - first_row;
    rows_ = left < kExtent ? static_cast<int>(left) : kExtent;
    next_ = factor.data + matrix * factor.batch_stride +
            (kDeep ? first_row * line_stride_ + first_k : first_k * line_stride_ + first_row) +
            thread_line_ * line_stride_ + thread_element_;
  }

  // Issues the copies of the next step, of which `depth` k's lie in the factor.
  __device__ __forceinline__ void copy(float* to, int depth) {
    const int lines = kDeep ? rows_ : depth;
    const int length = kDeep ? depth : rows_;
    const float* from = next_;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int line = thread_line_ + i / kPasses * kLinesAtATime;
      const int element = thread_element_ + i % kPasses * Config::kCopiers * kElements;
      const int row = kDeep ? line : element;
      const int k = kDeep ? element : line;
      copy_async<Config::kVectorBytes>(to + place_in_stage<kDeep, kExtent>(row, k),
                                       from + i % kPasses * Config::kCopiers * kElements,
                                       line < lines && element < length);
      if (i % kPasses == kPasses - 1) from += kLinesAtATime * line_stride_;
    }
    next_ += kDeep ? kFmaStepDepth : kFmaStepDepth * line_stride_;
  }

 private:
  static constexpr int kElements = Config::kVectorBytes / static_cast<int>(sizeof(float));
  static constexpr int kLineVectors = (kDeep ? kFmaStepDepth : kExtent) / kElements;
  // The threads copy several lines at a time, or a line in several passes.
  static constexpr int kPerLine = kLineVectors < Config::kCopiers ? kLineVectors : Config::kCopiers;
  static constexpr int kPasses = kLineVectors / kPerLine;
  static constexpr int kLinesAtATime = Config::kCopiers / kPerLine;
  static constexpr int kCopies = kExtent * kFmaStepDepth / kElements / Config::kCopiers;
  static_assert(kCopies * kElements * Config::kCopiers == kExtent * kFmaStepDepth);

  std::int64_t line_stride_;
  int thread_line_;
  int thread_element_;
  int rows_;  // that lie in the factor
  const float* next_;
};

// ---- Products ----

// The place of a lane in its warp's grid, which has kAcross lanes side by side. Bit 0 of a lane's
// number is bit 0 of `across`, bit 1 is bit 0 of `down`.
template <int kAcross>
struct LanePlace {
  __device__ __forceinline__ explicit LanePlace(int lane)
      : down(lane / 2 % 2 + lane / 4 / (kAcross / 2) * 2),
        across(lane % 2 + lane / 4 % (kAcross / 2) * 2) {}

  int down;
  int across;
};

// The row of the tile that is row i of a lane, with kLanes lanes one below the other; likewise for
// columns.
template <bool kDeep, int kLanes>
__device__ __forceinline__ constexpr int row_of_lane(int lane_row, int i) {
  return kDeep ? kLanes * i + lane_row : i / kPack * kLanes * kPack + lane_row * kPack + i % kPack;
}

// Loads a lane's rows at four k's: x[i][e] is row i at k + e.
template <bool kDeep, int kExtent, int kLanes, int kCount>
__device__ __forceinline__ void load_rows(const float* stage, int lane_row, int k,
                                          float (&x)[kCount][kPack]) {
  using Floats = Pack<float, kPack>;
  if constexpr (kDeep) {
    // Rows that lie 8 apart are swizzled alike: their addresses differ by a constant.
    constexpr int kUnlike = kLanes < 8 ? 8 / kLanes : 1;
    const float* first[kUnlike];
#pragma unroll
    for (int i = 0; i < kUnlike; ++i) {
      first[i] = stage + place_in_stage<true, kExtent>(row_of_lane<true, kLanes>(lane_row, i), k);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int further = i / kUnlike * kUnlike * kLanes * kFmaStepDepth;
      const auto pack = *reinterpret_cast<const Floats*>(first[i % kUnlike] + further);
#pragma unroll
      for (int e = 0; e < kPack; ++e) x[i][e] = pack.element[e];
    }
  } else {
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
#pragma unroll
      for (int i = 0; i < kCount; i += kPack) {
        const int row = row_of_lane<false, kLanes>(lane_row, i);
        const auto pack =
            *reinterpret_cast<const Floats*>(stage + place_in_stage<false, kExtent>(row, k + e));
#pragma unroll
        for (int j = 0; j < kPack; ++j) x[i + j][e] = pack.element[j];
      }
    }
  }
}

template <class Config>
using LaneSums = float[Config::kLaneRows][Config::kLaneCols];

// Adds the products of a step. `a` and `b` are where the warp's rows and columns begin in a stage.
template <class Config>
__device__ __forceinline__ void multiply_step(const float* a, const float* b,
                                              const LanePlace<Config::kAcross>& at,
                                              LaneSums<Config>& sum) {
#pragma unroll Config::kTable.packs
  for (int k = 0; k < kFmaStepDepth; k += kPack) {
    float x[Config::kLaneRows][kPack];
    float y[Config::kLaneCols][kPack];
    load_rows<Config::kDeepA, Config::kRows, Config::kDown>(a, at.down, k, x);
    load_rows<Config::kDeepB, Config::kCols, Config::kAcross>(b, at.across, k, y);
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
#pragma unroll
      for (int i = 0; i < Config::kLaneRows; ++i) {
#pragma unroll
        for (int j = 0; j < Config::kLaneCols; ++j) sum[i][j] += x[i][e] * y[j][e];
      }
    }
  }
}

// ---- Sums ----

// Writes a warp's sums to shared memory, to rows of kSumStride floats.
template <class Config>
__device__ __forceinline__ void put_sums(const LaneSums<Config>& sum,
                                         const LanePlace<Config::kAcross>& at, float* to) {
#pragma unroll
  for (int i = 0; i < Config::kLaneRows; ++i) {
    float* const row =
        to + row_of_lane<Config::kDeepA, Config::kDown>(at.down, i) * Config::kSumStride;
#pragma unroll
    for (int j = 0; j < Config::kLaneCols; j += kPack) {
      if constexpr (Config::kDeepB) {
#pragma unroll
        for (int e = 0; e < kPack; ++e) {
          row[row_of_lane<true, Config::kAcross>(at.across, j + e)] = sum[i][j + e];
        }
      } else {
        *reinterpret_cast<float4*>(row + row_of_lane<false, Config::kAcross>(at.across, j)) =
            make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]);
      }
    }
  }
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
