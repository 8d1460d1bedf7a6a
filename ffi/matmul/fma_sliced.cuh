// matmul, algorithm `fma_sliced`: float32 products by FMAs, for results of so few elements that
// large tiles would leave most multiprocessors idle. Their time is latency, which is short here:
// tiles are small, and each warp of a block computes the whole tile over its own slice of the
// depth.
//
//     depth        | warp 0    | warp 1    | warp 2    | ..     | warp 7    |
//     steps        | 0 1 2 3   | 4 5 6 7   | 8 9 ..
//     sums         of the tile   of the tile ..                                 added in that order
//
// A warp copies steps, 16 elements of k each, by cp.async into its own ring of stages, several
// steps ahead, and does not wait for other warps until the sums of all warps are added. If the
// depth is too small, warps without a step add zeros.
//
// If there are fewer tiles than multiprocessors, the blocks of a cluster compute the same tile,
// each over a part of the depth, which its warps divide into slices. Each block finishes some of
// the tile's packs of four sums: all blocks send their sums of a pack to the shared memory of this
// block, which adds them in the order of the blocks. So results do not depend on which block is
// done first.
//
//     blocks of a cluster     0          1          2
//     depth               | 0 ..    | ..       | .. k |     sums of the whole tile each
//     results             packs 0, 3  1, 4       2, 5 ..
//
// The lanes of a warp form a grid in the tile, here 8 x 4, and a lane has every eighth row and
// every fourth column, or every such pack of four if these are contiguous in memory. It loads its
// operands four floats at a time. Shared memory serves such a load 8 lanes at a time, or 16 if
// lanes i and i ^ 1, or i and i ^ 2, read the same address: so lanes i and i ^ 1 have the same
// rows, and i and i ^ 2 the same columns.
//
//     lanes of a warp         a lane's rows, if the depth is contiguous (deep)    8 i + down
//       0  1  4  5                           else (wide), in packs of 4          32 i + 4 down
//       2  3  6  7            its columns, deep                                   4 j + across
//       8  9 12 13                       wide                                    16 j + 4 across
//      10 11 14 15
//       ..
//
// A stage holds a factor in its order in memory. If it is deep, a line is 16 k's of a row, whose
// four pieces are swizzled, so that the lanes of a load have no bank conflicts; if it is wide, a
// line is all rows at one k.
//
//     deep   row 0 | 0 1 2 3 | row 1 | 0 1 2 3 |      wide   k 0 | 0 1 2 .. |
//            row 2 | 1 0 3 2 | row 3 | 1 0 3 2 |             k 1 | 0 1 2 .. |
#pragma once

#include <cstdint>

#include "core/collectives.h"
#include "core/cuda.h"
#include "core/integer.h"
#include "core/ptx/async_copy.cuh"
#include "core/ptx/cluster.cuh"
#include "core/ptx/mbarrier.cuh"
#include "core/shared.h"
#include "core/vector.h"
#include "matmul/gemm.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template <bool kDeepA_, bool kDeepB_, int kVectorBytes_, int kTileIndex>
struct FmaSliced {
  static constexpr bool kDeepA = kDeepA_;
  static constexpr bool kDeepB = kDeepB_;
  static constexpr int kVectorBytes = kVectorBytes_;  // that a copy moves

  static constexpr SlicedTile kTable = kSlicedTiles[kTileIndex];
  static constexpr int kRows = kTable.rows;
  static constexpr int kCols = kTable.cols;
  static constexpr int kStages = kTable.stages;
  static constexpr int kResident = kTable.resident;
  static constexpr int kWarps = kSlicedThreads / kWarpSize;
  static constexpr int kDown = kTable.lanes_down;
  static constexpr int kAcross = kWarpSize / kDown;
  static constexpr int kLaneRows = kRows / kDown;
  static constexpr int kLaneCols = kCols / kAcross;
  // Floats from one row of the sums to the next, so that lanes that write at the same time, eight
  // packs or 32 floats, have no bank conflicts: packs of two neighbouring rows, or of rows four
  // apart, are 16 banks apart; if columns are written one by one, the padding is as many as lie
  // side by side.
  static constexpr int kSumStride = kDeepB   ? kCols + kAcross
                                    : kDeepA ? (kCols + 15) / 32 * 32 + 16
                                             : kCols + 4;
  static constexpr int kPerRow = kCols / kPack;
  static constexpr int kPacks = kRows * kPerRow;

  static_assert(kLaneRows % kPack == 0 && kLaneCols % kPack == 0);
  static_assert(kDown >= 2 && kAcross >= 2, "see LanePlace");
};

template <class Config>
struct SlicedStage {
  float a[Config::kRows * kSlicedDepth];
  float b[Config::kCols * kSlicedDepth];
};

template <class Config>
struct SlicedStorage {
  union {
    SlicedStage<Config> ring[Config::kWarps][Config::kStages];
    float sums[Config::kWarps][Config::kRows][Config::kSumStride];  // after all products
  };
  // Sums of this block's packs, from all blocks of the cluster: [pack][block]. Other blocks send
  // when they are done, while this one may still need its ring. The number of packs is rounded up.
  float4 received[Config::kPacks + kMostSlicedSplits - 1];
  alignas(16) Mbarrier exchanged;
};

struct SlicedProduct {
  Gemm<float> gemm;
  Divisor splits;     // of the depth, among the blocks of a cluster
  Divisor tiles;      // of a matrix
  Divisor row_tiles;  // likewise; neighbouring blocks share columns of b
};

// The index in a stage of float `k` of row `row`, and of a pack that begins there.
template <bool kDeep, int kExtent>
__device__ __forceinline__ constexpr int place_in_stage(int row, int k) {
  if (!kDeep) return k * kExtent + row;
  return row * kSlicedDepth + ((k / kPack) ^ (row / 2 % 4)) * kPack + k % kPack;
}

// ---- Copies ----

// Copies the steps of a warp's slice of a factor, one after the other. Elements beyond the factor's
// edges are 0.
template <class Config, bool kDeep, int kExtent>
class StepCopier {
 public:
  __device__ __forceinline__ StepCopier(const Factor<float>& factor, std::int64_t matrix,
                                        std::int64_t first_row, std::int64_t first_k, int lane)
      : line_stride_(kDeep ? factor.row_stride : factor.depth_stride),
        lane_line_(lane / kPerLine),
        lane_element_(lane % kPerLine * kElements) {
    const std::int64_t left = factor.extent - first_row;
    rows_ = left < kExtent ? static_cast<int>(left) : kExtent;
    next_ = factor.data + matrix * factor.batch_stride +
            (kDeep ? first_row * line_stride_ + first_k : first_k * line_stride_ + first_row) +
            lane_line_ * line_stride_ + lane_element_;
  }

  // Issues the copies of the next step, of which `depth` k's lie in the factor.
  __device__ __forceinline__ void copy(float* to, int depth) {
    const int lines = kDeep ? rows_ : depth;
    const int length = kDeep ? depth : rows_;
    const float* from = next_;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int line = lane_line_ + i / kPasses * kLinesAtATime;
      const int element = lane_element_ + i % kPasses * kWarpSize * kElements;
      const int row = kDeep ? line : element;
      const int k = kDeep ? element : line;
      copy_async<Config::kVectorBytes>(to + place_in_stage<kDeep, kExtent>(row, k),
                                       from + i % kPasses * kWarpSize * kElements,
                                       line < lines && element < length);
      if (i % kPasses == kPasses - 1) from += kLinesAtATime * line_stride_;
    }
    next_ += kDeep ? kSlicedDepth : kSlicedDepth * line_stride_;
  }

 private:
  static constexpr int kElements = Config::kVectorBytes / static_cast<int>(sizeof(float));
  static constexpr int kLineVectors = (kDeep ? kSlicedDepth : kExtent) / kElements;
  // A warp copies several lines at a time, or a line in several passes.
  static constexpr int kPerLine = kLineVectors < kWarpSize ? kLineVectors : kWarpSize;
  static constexpr int kPasses = kLineVectors / kPerLine;
  static constexpr int kLinesAtATime = kWarpSize / kPerLine;
  static constexpr int kCopies = kExtent * kSlicedDepth / kElements / kWarpSize;
  static_assert(kCopies * kElements * kWarpSize == kExtent * kSlicedDepth);

  std::int64_t line_stride_;
  int lane_line_;
  int lane_element_;
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
  const auto pack_at = [&](int row, int depth) {
    return *reinterpret_cast<const Pack<float, kPack>*>(stage +
                                                        place_in_stage<kDeep, kExtent>(row, depth));
  };
  if constexpr (kDeep) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto pack = pack_at(row_of_lane<true, kLanes>(lane_row, i), k);
#pragma unroll
      for (int e = 0; e < kPack; ++e) x[i][e] = pack.element[e];
    }
  } else {
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
#pragma unroll
      for (int i = 0; i < kCount; i += kPack) {
        const auto pack = pack_at(row_of_lane<false, kLanes>(lane_row, i), k + e);
#pragma unroll
        for (int j = 0; j < kPack; ++j) x[i + j][e] = pack.element[j];
      }
    }
  }
}

template <class Config>
using LaneSums = float[Config::kLaneRows][Config::kLaneCols];

template <class Config>
__device__ __forceinline__ void multiply_step(const SlicedStage<Config>& stage,
                                              const LanePlace<Config::kAcross>& at,
                                              LaneSums<Config>& sum) {
#pragma unroll Config::kTable.packs
  for (int k = 0; k < kSlicedDepth; k += kPack) {
    float a[Config::kLaneRows][kPack];
    float b[Config::kLaneCols][kPack];
    load_rows<Config::kDeepA, Config::kRows, Config::kDown>(stage.a, at.down, k, a);
    load_rows<Config::kDeepB, Config::kCols, Config::kAcross>(stage.b, at.across, k, b);
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
#pragma unroll
      for (int i = 0; i < Config::kLaneRows; ++i) {
#pragma unroll
        for (int j = 0; j < Config::kLaneCols; ++j) sum[i][j] += a[i][e] * b[j][e];
      }
    }
  }
}

// ---- Results ----

// Adds float4s that lie `stride` apart, in their order.
__device__ __forceinline__ void add_parts(const float4* part, int count, int stride,
                                          float (&total)[kPack]) {
#pragma unroll
  for (int e = 0; e < kPack; ++e) total[e] = 0;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const float4 more = part[i * stride];
    total[0] += more.x;
    total[1] += more.y;
    total[2] += more.z;
    total[3] += more.w;
  }
}

// ---- The kernel ----

template <class Config>
__global__ void __launch_bounds__(kSlicedThreads, Config::kResident)
    fma_sliced_kernel(const __grid_constant__ SlicedProduct product) {
  constexpr int kStages = Config::kStages;
  constexpr int kWarps = Config::kWarps;
  auto& storage = shared<SlicedStorage<Config>>();
  const Gemm<float>& gemm = product.gemm;
  const unsigned splits = product.splits.divisor;
  const Division in_cluster = product.splits.divide(blockIdx.x);
  const Division in_batch = product.tiles.divide(in_cluster.quotient);
  const Division in_matrix = product.row_tiles.divide(in_batch.remainder);
  const unsigned rank = in_cluster.remainder;
  const std::int64_t matrix = in_batch.quotient;
  const std::int64_t tile_row = std::int64_t{in_matrix.remainder} * Config::kRows;
  const std::int64_t tile_col = std::int64_t{in_matrix.quotient} * Config::kCols;
  // The shuffle tells the compiler that the value is the same for all threads of a warp.
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const int lane = threadIdx.x % kWarpSize;

  // -- Copies: the first steps of the warp's slice --
  const auto steps = static_cast<unsigned>((gemm.depth + kSlicedDepth - 1) / kSlicedDepth);
  const unsigned block_begin = product.splits.quotient(rank * steps);
  const unsigned block_steps = product.splits.quotient((rank + 1) * steps) - block_begin;
  const auto first_step = [&](int of) {
    return static_cast<int>(block_begin + static_cast<unsigned>(of) * block_steps / kWarps);
  };
  const int begin = first_step(warp);
  const int count = first_step(warp + 1) - begin;
  const std::int64_t first_k = std::int64_t{begin} * kSlicedDepth;
  StepCopier<Config, Config::kDeepA, Config::kRows> a_copier(gemm.a, matrix, tile_row, first_k,
                                                             lane);
  StepCopier<Config, Config::kDeepB, Config::kCols> b_copier(gemm.b, matrix, tile_col, first_k,
                                                             lane);
  const auto copy_step = [&](int step, int stage) {
    if (step < count) {
      const std::int64_t left = gemm.depth - first_k - std::int64_t{step} * kSlicedDepth;
      const int depth = left < kSlicedDepth ? static_cast<int>(left) : kSlicedDepth;
      a_copier.copy(storage.ring[warp][stage].a, depth);
      b_copier.copy(storage.ring[warp][stage].b, depth);
    }
    end_copy_group();  // may be empty, so that the wait counts steps
  };
#pragma unroll 1
  for (int stage = 0; stage < kStages; ++stage) copy_step(stage, stage);

  // -- Set up the mbarrier for the sums that the blocks send --
  const unsigned own_packs = (Config::kPacks - rank + splits - 1) / splits;
  if (splits > 1) {
    if (threadIdx.x == 0) {
      initialise(&storage.exchanged);
      announce(&storage.exchanged,
               own_packs * splits * static_cast<unsigned>(sizeof(storage.received[0])));
    }
    __syncthreads();
    cluster_arrive();
  }

  // -- Products, while later steps are copied --
  const LanePlace<Config::kAcross> at(lane);
  LaneSums<Config> sum = {};
  int stage = 0;
#pragma unroll 1
  for (int step = 0; step < count; ++step) {
    wait_for_copy_groups<kStages - 1>();
    __syncwarp();  // for the copies of the other lanes
    multiply_step<Config>(storage.ring[warp][stage], at, sum);
    __syncwarp();  // all lanes have read the stage
    copy_step(step + kStages, stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  __syncthreads();  // no warp needs its ring any more

  // -- Sums of all warps --
#pragma unroll
  for (int i = 0; i < Config::kLaneRows; ++i) {
    float* const row = storage.sums[warp][row_of_lane<Config::kDeepA, Config::kDown>(at.down, i)];
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
  __syncthreads();

  const auto add_warps = [&](unsigned pack, float (&total)[kPack]) {
    const unsigned row = pack / Config::kPerRow;
    const unsigned col = pack % Config::kPerRow * kPack;
    add_parts(reinterpret_cast<const float4*>(&storage.sums[0][row][col]), kWarps,
              Config::kRows * Config::kSumStride / kPack, total);
  };

  // -- Sums of all blocks --
  if (splits > 1) {
    cluster_wait();  // the blocks that it sends to have set up
    for (unsigned pack = threadIdx.x; pack < Config::kPacks; pack += kSlicedThreads) {
      float total[kPack];
      add_warps(pack, total);
      const Division of = product.splits.divide(pack);
      send(make_float4(total[0], total[1], total[2], total[3]),
           &storage.received[of.quotient * splits + rank], &storage.exchanged,
           static_cast<int>(of.remainder));
    }
    // A block exits only after all blocks have sent to it. Its own sums need it no longer once
    // sent.
    wait(&storage.exchanged, 0);
  }

  // -- Results: neighbouring threads write neighbours --
  for (unsigned i = threadIdx.x; i < own_packs; i += kSlicedThreads) {
    const unsigned pack = i * splits + rank;
    float total[kPack];
    if (splits == 1) {
      add_warps(pack, total);
    } else {
      add_parts(&storage.received[i * splits], static_cast<int>(splits), 1, total);
    }
    store_results(gemm, matrix, tile_row + pack / Config::kPerRow,
                  tile_col + pack % Config::kPerRow * kPack, total);
  }
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
