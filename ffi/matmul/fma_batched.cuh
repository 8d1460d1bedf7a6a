// matmul, algorithm `fma_batched`: float32 products by FMAs, for batches of products that are too
// small for large tiles.
//
// Such products read and write much for each multiplication. So tiles are small, a block computes
// one of them over the whole depth, and a multiprocessor has many blocks: while one waits for its
// factors, others multiply or write results.
//
//     batch        | product 0         | product 1         | ..
//     blocks       | tile 0, 1, 2, 3   | tile 4, 5, ..
//     its warps    side by side in the tile, each with all k's of its sums
//
// A block copies steps of the depth into a ring of stages, all but one of which are on their way.
// One barrier is enough for a step: after it, all threads see what was copied for this step, and no
// thread reads the stage of the step before, which takes the next copies.
//
//     stages         0       1       2       3
//     step 4     | step 4  step 5  step 6  step 7 |     multiply 4, copy 7
//     step 5     | step 8  step 5  step 6  step 7 |     multiply 5, copy 8
//
// The sums are added in the order of k. They go through shared memory, since those of a lane lie
// far apart: neighbouring threads write neighbours of a row.
//
// How steps lie in a stage, and which sums a lane has, is told in fma_steps.cuh.
#pragma once

#include <cstdint>

#include "core/collectives.h"
#include "core/cuda.h"
#include "core/ptx/async_copy.cuh"
#include "core/shared.h"
#include "matmul/fma_steps.cuh"
#include "matmul/gemm.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template <bool kDeepA, bool kDeepB, int kVectorBytes, int kTileIndex>
struct FmaBatched : FmaSteps<kFmaBatchedTiles, kTileIndex, kDeepA, kDeepB, kVectorBytes> {
  static constexpr FmaBatchedTile kTable = kFmaBatchedTiles[kTileIndex];
  static constexpr int kThreads = kTable.threads();
  static constexpr int kResident = kTable.resident;
};

template <class Config>
union FmaBatchedStorage {
  FmaStage<Config> ring[Config::kStages];
  float sums[Config::kRows][Config::kSumStride];  // after all products
};

struct FmaBatchedProduct {
  Gemm<float> gemm;
  NumberedTiles tiles;
};

// Writes the part of a tile that lies in the result, kSize elements at a time. A thread has the
// same columns in all of its rows.
template <class Config, int kSize>
__device__ __forceinline__ void write_tile(const Gemm<float>& gemm, const Tile& tile,
                                           const float (&sums)[Config::kRows][Config::kSumStride]) {
  constexpr int kPerRow = Config::kCols / kSize;
  constexpr int kRowsAtATime = Config::kThreads / kPerRow;
  const int first_row = threadIdx.x / kPerRow;
  const int tile_col = threadIdx.x % kPerRow * kSize;
  const std::int64_t col = tile.col + tile_col;
  const std::int64_t cols_left = gemm.b.extent - col;
  if (cols_left <= 0) return;
  const std::int64_t rows_left = gemm.a.extent - tile.row;
  const int rows = rows_left < Config::kRows ? static_cast<int>(rows_left) : Config::kRows;
  std::int64_t offset = (tile.batch * gemm.a.extent + tile.row + first_row) * gemm.b.extent + col;
#pragma unroll 4
  for (int row = first_row; row < rows; row += kRowsAtATime) {
    float values[kSize];
    load<kSize>(&sums[row][tile_col], values);
    store_results_at(gemm, tile.batch, offset, col, cols_left, values);
    offset += kRowsAtATime * gemm.b.extent;
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kResident)
    fma_batched_kernel(const __grid_constant__ FmaBatchedProduct product) {
  constexpr int kStages = Config::kStages;
  auto& storage = shared<FmaBatchedStorage<Config>>();
  const Gemm<float>& gemm = product.gemm;
  const Tile tile = product.tiles.find<Config::kRows, Config::kCols>(blockIdx.x);
  // The shuffle tells the compiler that the value is the same for all threads of a warp.
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const int warp_row = warp % Config::kTable.warps_down * Config::kTable.warp_rows();
  const int warp_col = warp / Config::kTable.warps_down * Config::kTable.warp_cols();

  // -- Copies: the first steps --
  const int steps = static_cast<int>((gemm.depth + kFmaStepDepth - 1) / kFmaStepDepth);
  StepCopier<Config, Config::kDeepA, Config::kRows> a_copier(gemm.a, tile.batch, tile.row, 0,
                                                             threadIdx.x);
  StepCopier<Config, Config::kDeepB, Config::kCols> b_copier(gemm.b, tile.batch, tile.col, 0,
                                                             threadIdx.x);
  const auto copy_step = [&](int step, int stage) {
    if (step < steps) {
      const int left = static_cast<int>(gemm.depth) - step * kFmaStepDepth;
      const int depth = left < kFmaStepDepth ? left : kFmaStepDepth;
      a_copier.copy(storage.ring[stage].a, depth);
      b_copier.copy(storage.ring[stage].b, depth);
    }
    end_copy_group();  // may be empty, so that the wait counts steps
  };
#pragma unroll 1
  for (int step = 0; step < kStages - 1; ++step) copy_step(step, step);

  // -- Products, while later steps are copied --
  const LanePlace<Config::kAcross> at(threadIdx.x % kWarpSize);
  LaneSums<Config> sum = {};
  int stage = 0;
  int free_stage = kStages - 1;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    wait_for_copy_groups<kStages - 2>();
    __syncthreads();
    copy_step(step + kStages - 1, free_stage);
    multiply_step<Config>(
        storage.ring[stage].a + place_in_stage<Config::kDeepA, Config::kRows>(warp_row, 0),
        storage.ring[stage].b + place_in_stage<Config::kDeepB, Config::kCols>(warp_col, 0), at,
        sum);
    free_stage = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  __syncthreads();  // no warp needs the ring any more

  // -- Results --
  put_sums<Config>(sum, at, &storage.sums[warp_row][warp_col]);
  __syncthreads();
  if (gemm.epilogue.packed) {
    write_tile<Config, kPack>(gemm, tile, storage.sums);
  } else {
    write_tile<Config, 1>(gemm, tile, storage.sums);
  }
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
