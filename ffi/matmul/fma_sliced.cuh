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
// How steps lie in a stage, and which sums a lane has, is told in fma_steps.cuh.
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
#include "matmul/fma_steps.cuh"
#include "matmul/gemm.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template <bool kDeepA, bool kDeepB, int kVectorBytes, int kTileIndex>
struct FmaSliced : FmaSteps<kSlicedTiles, kTileIndex, kDeepA, kDeepB, kVectorBytes> {
  static constexpr SlicedTile kTable = kSlicedTiles[kTileIndex];
  static constexpr int kResident = kTable.resident;
  static constexpr int kWarps = kSlicedThreads / kWarpSize;
  static constexpr int kPerRow = kTable.cols / kPack;
  static constexpr int kPacks = kTable.rows * kPerRow;
};

template <class Config>
struct SlicedStorage {
  union {
    FmaStage<Config> ring[Config::kWarps][Config::kStages];
    float sums[Config::kWarps][Config::kRows][Config::kSumStride];  // after all products
  };
  // Sums of this block's packs, from all blocks of the cluster: [pack][block]. Other blocks send
  // when they are done, while this one may still need its ring. The number of packs is rounded up.
  float4 received[Config::kPacks + kMostSlicedSplits - 1];
  alignas(16) Mbarrier exchanged;
};

struct SlicedProduct {
  Gemm<float> gemm;
  Divisor splits;  // of the depth, among the blocks of a cluster
  NumberedTiles tiles;
};

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
  const unsigned rank = in_cluster.remainder;
  const Tile tile = product.tiles.find<Config::kRows, Config::kCols>(in_cluster.quotient);
  // The shuffle tells the compiler that the value is the same for all threads of a warp.
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const int lane = threadIdx.x % kWarpSize;

  // -- Copies: the first steps of the warp's slice --
  const auto steps = static_cast<unsigned>((gemm.depth + kFmaStepDepth - 1) / kFmaStepDepth);
  const unsigned block_begin = product.splits.quotient(rank * steps);
  const unsigned block_steps = product.splits.quotient((rank + 1) * steps) - block_begin;
  const auto first_step = [&](int of) {
    return static_cast<int>(block_begin + static_cast<unsigned>(of) * block_steps / kWarps);
  };
  const int begin = first_step(warp);
  const int count = first_step(warp + 1) - begin;
  const std::int64_t first_k = std::int64_t{begin} * kFmaStepDepth;
  StepCopier<Config, Config::kDeepA, Config::kRows> a_copier(gemm.a, tile.batch, tile.row, first_k,
                                                             lane);
  StepCopier<Config, Config::kDeepB, Config::kCols> b_copier(gemm.b, tile.batch, tile.col, first_k,
                                                             lane);
  const auto copy_step = [&](int step, int stage) {
    if (step < count) {
      const std::int64_t left = gemm.depth - first_k - std::int64_t{step} * kFmaStepDepth;
      const int depth = left < kFmaStepDepth ? static_cast<int>(left) : kFmaStepDepth;
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
    multiply_step<Config>(storage.ring[warp][stage].a, storage.ring[warp][stage].b, at, sum);
    __syncwarp();  // all lanes have read the stage
    copy_step(step + kStages, stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  __syncthreads();  // no warp needs its ring any more

  // -- Sums of all warps --
  put_sums<Config>(sum, at, &storage.sums[warp][0][0]);
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
    store_results(gemm, tile.batch, tile.row + pack / Config::kPerRow,
                  tile.col + pack % Config::kPerRow * kPack, total);
  }
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
