// matmul, algorithm `fma_skinny`: float32 products by FMAs, of which one factor, the skinny one,
// has at most 16 rows or columns. The time is that of reading the other factor, the large one,
// once, with many copies in flight; each of its elements meets a few FMAs on its way.
//
// As in `skinny`, rows are those of the large factor (rows of a or columns of b), and columns those
// of the skinny one. A block computes kRows rows and all columns, and its warps divide the depth:
//
//     large factor                   skinny factor                    sums
//     | kRows x depth |      x       | depth x kCols |        =       | kRows x kCols |
//       warp 0 1 .. 7                  warp 0 1 .. 7                    of each part, then added
//
// A warp copies steps of both factors by cp.async into its own ring of stages. A stage is refilled
// as soon as it is multiplied, so all others are in flight all the time, and no warp waits for
// another one before the sums are added. A step has a block of 4 rows x 4 k's for each lane. With
// 32 rows, 8 lanes lie side by side and 4 along the depth, 16 k's; with 64 rows 16 and 2, 8 k's.
//
// The rows of a lane are neighbours if these are neighbours in memory (the factor is wide), and
// kRows / 4 rows apart if the depth is contiguous (deep). So a piece of 16 bytes belongs to one
// lane, and a lane has four of them, here with kRows = 32, lane (along, across):
//
//     wide      rows 0 ..  4 ..   ..  28 ..        deep      k 0 .. 3   4 .. 7  8 .. 11  12 .. 15
//       k 0   | 0, 0 | 0, 1 | .. | 0, 7 |            row 0 |   0, 0   |  1, 0  |  2, 0  |  3, 0  |
//       ..                                           row 1 |   0, 1   |  1, 1  |  2, 1  |  3, 1  |
//       k 4   | 1, 0 | 1, 1 | .. | 1, 7 |            ..
//       ..                                           row 8 |   0, 0   |  1, 0  |  2, 0  |  3, 0  |
//
// For each column a lane loads four k's of the skinny factor, the same as all lanes with its number
// along the depth, and does 16 FMAs.
//
// In the end all partial sums of a block, one for each warp and each lane along the depth, are
// written to shared memory and added in this order. If there are few tiles, the blocks of a cluster
// divide the depth first. Each of them finishes some elements of the tile: all blocks send their
// sums of an element to the shared memory of this block, which adds them in the order of the
// blocks. So results do not depend on which warp or block is done first. The order of the additions
// depends on the sizes of the problem.
#pragma once

#include <cstdint>

#include "core/collectives.h"
#include "core/cuda.h"
#include "core/integer.h"
#include "core/ptx/async_copy.cuh"
#include "core/ptx/cluster.cuh"
#include "core/ptx/mbarrier.cuh"
#include "core/shared.h"
#include "matmul/gemm.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template <bool kDeep_, bool kPacked_, int kRows_, int kCols_>
struct FmaSkinny {
  static constexpr bool kDeep = kDeep_;  // the large factor's depth is contiguous
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  // Floats of the large factor that a copy moves.
  static constexpr int kElements = kPacked_ ? kPack : 1;

  static constexpr int kWarps = kFmaSkinnyThreads / kWarpSize;
  static constexpr int kAcross = kRows / kPack;  // lanes side by side
  static constexpr int kAlong = kWarpSize / kAcross;
  static constexpr int kStepDepth = fma_skinny_step_depth(kRows);
  static constexpr int kStages = fma_skinny_stages(kRows, kCols);
  static constexpr int kParts = kWarps * kAlong;  // sums of a block for each element
  static_assert(kStepDepth == kAlong * kPack);
};

template <class Config>
struct FmaSkinnyStage {
  float large[Config::kRows * Config::kStepDepth];  // see place_of_large()
  float skinny[Config::kCols][Config::kStepDepth];
};

template <class Config>
struct FmaSkinnyStorage {
  union {
    FmaSkinnyStage<Config> ring[Config::kWarps][Config::kStages];
    // After all products: [part][column][row], see place_of_sum().
    float sums[Config::kParts][Config::kCols][Config::kRows + kPack];
  };
  // Sums of this block's elements, from all blocks of the cluster: [element][block]. Other blocks
  // send when they are done, while this one may still need its ring. The number of elements is
  // rounded up.
  float received[Config::kRows * Config::kCols + kMostSlicedSplits];
  alignas(16) Mbarrier exchanged;
};

struct FmaSkinnyProduct {
  Gemm<float> gemm;
  Factor<float> large;  // gemm's factors again
  Factor<float> skinny;
  bool large_is_a;
  Divisor splits;  // of the depth, among the blocks of a cluster
  Divisor tiles;   // of a matrix
};

// ---- Places in shared memory ----

// The piece of a lane among those that all lanes of a warp load at the same time. The lanes that
// copy four neighbouring pieces of a deep row would otherwise write to the same banks.
template <class Config>
__device__ __forceinline__ constexpr int piece_of_lane(int along, int across) {
  return along * Config::kAcross + (across ^ along * (8 / Config::kAlong));
}

// The index in a stage of a float of the large factor, and of a piece that begins there. A stage
// has a piece for each lane, then the next one for each lane, four times.
template <class Config>
__device__ __forceinline__ constexpr int place_of_large(int row, int k) {
  const int across = Config::kDeep ? row % Config::kAcross : row / kPack;
  const int number = Config::kDeep ? row / Config::kAcross : k % kPack;
  const int in_piece = Config::kDeep ? k % kPack : row % kPack;
  return (number * kWarpSize + piece_of_lane<Config>(k / kPack, across)) * kPack + in_piece;
}

// The index of a row's sum: the four rows of a lane are neighbours.
template <class Config>
__device__ __forceinline__ constexpr int place_of_sum(int row) {
  return Config::kDeep ? row % Config::kAcross * kPack + row / Config::kAcross : row;
}

// ---- Copies ----

// Copies a warp's steps of the large factor, one after the other. Elements beyond the factor's
// edges are 0.
template <class Config>
class LargeCopier {
 public:
  __device__ __forceinline__ LargeCopier(const Factor<float>& factor, std::int64_t matrix,
                                         std::int64_t first_row, std::int64_t first_k, int lane)
      : line_stride_(kDeep ? factor.row_stride : factor.depth_stride),
        line_(lane / kPerLine),
        element_(lane % kPerLine * Config::kElements) {
    const std::int64_t left = factor.extent - first_row;
    rows_ = left < Config::kRows ? static_cast<int>(left) : Config::kRows;
    next_ = factor.data + matrix * factor.batch_stride +
            (kDeep ? first_row * line_stride_ + first_k : first_k * line_stride_ + first_row) +
            line_ * line_stride_ + element_;
  }

  // Issues the copies of the next step, of which `depth` k's lie in the factor.
  __device__ __forceinline__ void copy(float* to, int depth) {
    const int lines = kDeep ? rows_ : depth;
    const int length = kDeep ? depth : rows_;
    const float* from = next_;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int line = line_ + i * kLinesAtATime;
      const int place =
          kDeep ? place_of_large<Config>(line, element_) : place_of_large<Config>(element_, line);
      copy_async<Config::kElements * 4>(to + place, from, line < lines && element_ < length);
      from += kLinesAtATime * line_stride_;
    }
    next_ += kDeep ? Config::kStepDepth : Config::kStepDepth * line_stride_;
  }

 private:
  static constexpr bool kDeep = Config::kDeep;
  // In memory a line is a step of one row if the factor is deep, else all rows at one k.
  static constexpr int kPerLine = (kDeep ? Config::kStepDepth : Config::kRows) / Config::kElements;
  static constexpr int kLinesAtATime = kWarpSize / kPerLine;
  static constexpr int kCopies = Config::kRows * Config::kStepDepth / Config::kElements / kWarpSize;
  static_assert(kPerLine <= kWarpSize);

  std::int64_t line_stride_;
  int line_;
  int element_;
  int rows_;  // that lie in the factor
  const float* next_;
};

// The same for the skinny factor, in pieces of 16 bytes along the depth or else, in any order,
// float by float.
template <class Config>
class SkinnyCopier {
 public:
  __device__ __forceinline__ SkinnyCopier(const Factor<float>& factor, std::int64_t matrix,
                                          std::int64_t first_k, int lane)
      : cols_(static_cast<int>(factor.extent)), packed_(factor.packed), deep_(factor.deep) {
    if (packed_) {
      col_ = lane / Config::kAlong;
      k_ = lane % Config::kAlong * kPack;
    } else if (deep_) {
      col_ = lane / Config::kStepDepth;
      k_ = lane % Config::kStepDepth;
    } else {
      col_ = lane % Config::kCols;
      k_ = lane / Config::kCols;
    }
    next_ = factor.data + matrix * factor.batch_stride + col_ * factor.row_stride +
            (first_k + k_) * factor.depth_stride;
    copy_stride_ = packed_ ? kColsPacked * factor.row_stride
                   : deep_ ? kColsDeep * factor.row_stride
                           : kDepthsWide * factor.depth_stride;
    step_stride_ = Config::kStepDepth * factor.depth_stride;
  }

  __device__ __forceinline__ void copy(float (&to)[Config::kCols][Config::kStepDepth], int depth) {
    const float* from = next_;
    if (packed_) {
#pragma unroll
      for (int i = 0; i < divided_up(kFloats, kWarpSize * kPack); ++i) {
        const int col = col_ + i * kColsPacked;
        if (col < Config::kCols) {
          copy_async<16, true>(&to[col][k_], from, col < cols_ && k_ < depth);
        }
        from += copy_stride_;
      }
    } else {
      int col = col_;
      int k = k_;
#pragma unroll 1  // the addresses of all copies would take too many registers
      for (int i = 0; i < divided_up(kFloats, kWarpSize); ++i) {
        if (col < Config::kCols && k < Config::kStepDepth) {
          copy_async<4>(&to[col][k], from, col < cols_ && k < depth);
        }
        from += copy_stride_;
        if (deep_) {
          col += kColsDeep;
        } else {
          k += kDepthsWide;
        }
      }
    }
    next_ += step_stride_;
  }

 private:
  static constexpr int kFloats = Config::kCols * Config::kStepDepth;  // of a step
  // How far the warp's next copy lies from the last one.
  static constexpr int kColsPacked = kWarpSize / Config::kAlong;
  static constexpr int kColsDeep = kWarpSize / Config::kStepDepth;
  static constexpr int kDepthsWide = kWarpSize / Config::kCols;

  static constexpr int divided_up(int a, int b) { return (a + b - 1) / b; }

  int cols_;  // of the factor
  bool packed_;
  bool deep_;
  int col_;
  int k_;
  const float* next_;
  std::int64_t copy_stride_;
  std::int64_t step_stride_;
};

// ---- Products ----

template <class Config>
using FmaSkinnySums = float[Config::kCols][kPack];

// Adds a lane's products of a step: those of four rows, at four k's, with each column.
template <class Config>
__device__ __forceinline__ void multiply_lane(const FmaSkinnyStage<Config>& stage, int along,
                                              int across, FmaSkinnySums<Config>& sum) {
  const int piece = piece_of_lane<Config>(along, across);
  float large[kPack][kPack];  // [piece][element]
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    load<kPack>(&stage.large[(i * kWarpSize + piece) * kPack], large[i]);
  }
#pragma unroll
  for (int col = 0; col < Config::kCols; ++col) {
    float skinny[kPack];
    load<kPack>(&stage.skinny[col][along * kPack], skinny);
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
#pragma unroll
      for (int row = 0; row < kPack; ++row) {
        sum[col][row] += skinny[k] * (Config::kDeep ? large[row][k] : large[k][row]);
      }
    }
  }
}

// ---- Results ----

// An element of the tile by its number. Neighbouring numbers are neighbours in the result.
template <class Config>
struct FmaSkinnyElement {
  __device__ __forceinline__ FmaSkinnyElement(unsigned number, bool large_is_a)
      : row(large_is_a ? number / Config::kCols : number % Config::kRows),
        col(large_is_a ? number % Config::kCols : number / Config::kRows) {}

  unsigned row;
  unsigned col;
};

// ---- The kernel ----

template <class Config>
__global__ void __launch_bounds__(kFmaSkinnyThreads, 2)
    fma_skinny_kernel(const __grid_constant__ FmaSkinnyProduct product) {
  constexpr int kStages = Config::kStages;
  constexpr unsigned kTileElements = Config::kRows * Config::kCols;
  auto& storage = shared<FmaSkinnyStorage<Config>>();
  const Gemm<float>& gemm = product.gemm;
  const unsigned splits = product.splits.divisor;
  const Division in_cluster = product.splits.divide(blockIdx.x);
  const Division in_batch = product.tiles.divide(in_cluster.quotient);
  const unsigned rank = in_cluster.remainder;
  const std::int64_t matrix = in_batch.quotient;
  const std::int64_t first_row = std::int64_t{in_batch.remainder} * Config::kRows;
  // The shuffle tells the compiler that the value is the same for all threads of a warp.
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const int lane = threadIdx.x % kWarpSize;
  const int along = lane / Config::kAcross;
  const int across = lane % Config::kAcross;

  // -- Copies: the first steps of the warp --
  const auto depth = static_cast<unsigned>(gemm.depth);
  const unsigned steps = (depth + Config::kStepDepth - 1) / Config::kStepDepth;
  const unsigned block_begin = product.splits.quotient(rank * steps);
  const unsigned block_steps = product.splits.quotient((rank + 1) * steps) - block_begin;
  const auto first_step = [&](int of) {
    return static_cast<int>(block_begin + static_cast<unsigned>(of) * block_steps / Config::kWarps);
  };
  const int begin = first_step(warp);
  const int count = first_step(warp + 1) - begin;
  const int first_k = begin * Config::kStepDepth;
  LargeCopier<Config> large(product.large, matrix, first_row, first_k, lane);
  SkinnyCopier<Config> skinny(product.skinny, matrix, first_k, lane);
  const auto copy_step = [&](int step, int stage) {
    if (step < count) {
      const int left = static_cast<int>(depth) - first_k - step * Config::kStepDepth;
      large.copy(storage.ring[warp][stage].large, left);
      skinny.copy(storage.ring[warp][stage].skinny, left);
    }
    end_copy_group();  // may be empty, so that the wait counts steps
  };
#pragma unroll 1
  for (int stage = 0; stage < kStages; ++stage) copy_step(stage, stage);

  // -- Set up the mbarrier for the sums that the blocks send --
  const unsigned own_elements = product.splits.quotient(kTileElements - rank + splits - 1);
  if (splits > 1) {
    if (threadIdx.x == 0) {
      initialise(&storage.exchanged);
      announce(&storage.exchanged, own_elements * splits * static_cast<unsigned>(sizeof(float)));
    }
    __syncthreads();
    cluster_arrive();
  }

  // -- Products, while later steps are copied --
  FmaSkinnySums<Config> sum = {};
  int stage = 0;
#pragma unroll 1
  for (int step = 0; step < count; ++step) {
    wait_for_copy_groups<kStages - 1>();
    __syncwarp();  // for the copies of the other lanes
    multiply_lane<Config>(storage.ring[warp][stage], along, across, sum);
    __syncwarp();  // all lanes have read the stage
    copy_step(step + kStages, stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  __syncthreads();  // no warp needs its ring any more

  // -- Sums of all parts --
#pragma unroll
  for (int col = 0; col < Config::kCols; ++col) {
    store<kPack>(sum[col], &storage.sums[warp * Config::kAlong + along][col][across * kPack]);
  }
  __syncthreads();
  const auto add_parts = [&](const FmaSkinnyElement<Config>& element) {
    const float* const part =
        &storage.sums[0][element.col][place_of_sum<Config>(static_cast<int>(element.row))];
    float total = 0;
#pragma unroll
    for (int i = 0; i < Config::kParts; ++i) {
      total += part[i * Config::kCols * (Config::kRows + kPack)];
    }
    return total;
  };

  // -- Sums of all blocks --
  if (splits > 1) {
    cluster_wait();  // the blocks that it sends to have set up
    for (unsigned i = threadIdx.x; i < kTileElements; i += kFmaSkinnyThreads) {
      const Division of = product.splits.divide(i);
      send(add_parts({i, product.large_is_a}), &storage.received[of.quotient * splits + rank],
           &storage.exchanged, static_cast<int>(of.remainder));
    }
    // A block exits only after all blocks have sent to it. Its own sums need it no longer once
    // sent.
    wait(&storage.exchanged, 0);
  }

  // -- Results: neighbouring threads write neighbours --
  for (unsigned i = threadIdx.x; i < own_elements; i += kFmaSkinnyThreads) {
    const FmaSkinnyElement<Config> element(i * splits + rank, product.large_is_a);
    float total[1] = {0};
    if (splits == 1) {
      total[0] = add_parts(element);
    } else {
      for (unsigned block = 0; block < splits; ++block) {
        total[0] += storage.received[i * splits + block];
      }
    }
    const std::int64_t row = first_row + element.row;
    const std::int64_t col = element.col;
    store_results(gemm, matrix, product.large_is_a ? row : col, product.large_is_a ? col : row,
                  total);
  }
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
