// matmul, algorithm `split_k`: few tiles on Hopper's tensor cores. Multiprocessors without a tile
// help the others: the blocks of a cluster take the same tile, and a part of the depth each.
//
//     blocks of a cluster      0            1            2            3
//     depth                | 0 ..     | ..       | ..       | .. k |    sums of the whole tile each
//     results              rows 0, 4   rows 1, 5   rows 2, 6   rows 3, 7 ...
//
// Row r belongs to block r % 4: all blocks send it their sums of that row, through the cluster's
// shared memory, and it adds them in the order of the blocks. So results do not depend on which
// block is done first. A block has one tile: a producer copies slices of the factors into a ring of
// stages, and consumers, warpgroups with 64 rows each, multiply them, as in persistent.cuh.
#pragma once

#include <cstdint>

#include "core/cuda.h"
#include "core/ptx/cluster.cuh"
#include "core/ptx/early_launch.cuh"
#include "core/ptx/warpgroup.cuh"
#include "core/shared.h"
#include "core/vector.h"
#include "matmul/epilogue.cuh"
#include "matmul/hopper/stages.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template <class Factor_, bool kDeepA_, bool kDeepB_, int kRows_, int kStages_, int kResident_>
struct SplitK {
  using Factor = Factor_;
  static constexpr bool kDeepA = kDeepA_;
  static constexpr bool kDeepB = kDeepB_;
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kSplitKCols;
  static constexpr int kStages = kStages_;
  static constexpr int kResident = kResident_;  // blocks on a multiprocessor

  static constexpr int kConsumers = kRows / kProductRows;
  static constexpr int kWaves = 1;
  static constexpr int kSums = kCols / 2;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroupThreads;
  static constexpr int kThreads = kWarpgroupThreads + kConsumerThreads;
  static constexpr int kABytes = kRows * kLineBytes;
  static constexpr int kBBytes = kCols * kLineBytes;
  static constexpr int kStageBytes = kABytes + kBBytes;
};

// In shared memory, from a multiple of kAtomBytes on: the swizzle goes by addresses.
template <class Config>
struct alignas(kAtomBytes) SplitKStorage {
  unsigned char a[Config::kStages][Config::kABytes];
  unsigned char b[Config::kStages][Config::kBBytes];
  // [blocks of the cluster][rows of this block][columns]. The others send when they are done, while
  // this one may still need its stages.
  float received[Config::kRows * Config::kCols];
  Mbarrier full[Config::kStages];
  Mbarrier empty[Config::kStages];
  Mbarrier exchanged;
};

struct SplitKOrder {
  unsigned rows;  // of tiles
  unsigned cols;
  int steps;  // stages of the whole depth
  int splits_log2;
  int a_batch_stride;  // 1, or 0 if the batch shares the factor
  int b_batch_stride;

  __device__ int splits() const { return 1 << splits_log2; }
  // Where the part of a block begins, and that of the next one.
  __device__ int first_step(int rank) const { return rank * steps >> splits_log2; }
};

struct SplitKResult {
  void* data;
  int rows;
  int cols;
  bool is_float;  // or of the factors' type
  bool packed;    // four columns begin at a multiple of their bytes
  bool finishes;  // with a bias or an activation
  Finish finish;
};

// Neighbouring clusters share columns of b in the L2 cache.
template <class Config>
__device__ __forceinline__ TilePosition locate(const SplitKOrder& order, unsigned tile) {
  const unsigned column = tile / order.rows;
  const unsigned matrix = column / order.cols;
  return {static_cast<int>(tile - column * order.rows) * Config::kRows,
          static_cast<int>(column - matrix * order.cols) * Config::kCols, static_cast<int>(matrix)};
}

// ---- The producer ----

template <class Config>
__device__ __forceinline__ void produce(SplitKStorage<Config>& storage, const TensorMap& a,
                                        const TensorMap& b, const SplitKOrder& order,
                                        const TilePosition& at, int rank) {
  RingPlace<Config> ring;
  wait_for_kernel_before();  // which may copy factors
  for (int step = order.first_step(rank); step < order.first_step(rank + 1); ++step) {
    // The phase before the first counts as over: the ring begins empty.
    wait(&storage.empty[ring.stage], ring.phase ^ 1);
    Mbarrier* const full = &storage.full[ring.stage];
    announce(full, Config::kStageBytes);
    copy_slice<Config::kDeepA, Config::kRows, 1>(storage.a[ring.stage], a, at.row,
                                                 step * kStageDepth<typename Config::Factor>,
                                                 at.matrix * order.a_batch_stride, full, 0, 0);
    copy_slice<Config::kDeepB, Config::kCols, 1>(storage.b[ring.stage], b, at.col,
                                                 step * kStageDepth<typename Config::Factor>,
                                                 at.matrix * order.b_batch_stride, full, 0, 0);
    ring.advance();
  }
}

// ---- A consumer ----

template <class Config>
__device__ __forceinline__ void multiply(SplitKStorage<Config>& storage, int steps, int consumer,
                                         float (&sums)[1][Config::kSums]) {
  const std::uint64_t a =
      matrix_descriptor<Config::kDeepA>(storage.a[0] + consumer * kProductRows * kLineBytes);
  const std::uint64_t b = matrix_descriptor<Config::kDeepB>(storage.b[0]);
  const bool tells = threadIdx.x % 32 == 0;
  RingPlace<Config> ring;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    wait(&storage.full[ring.stage], ring.phase);
    multiply_stage<Config>(sums, a + ring.stage * (Config::kABytes / 16),
                           b + ring.stage * (Config::kBBytes / 16), step > 0);
    wait_for_products<1>();  // of the stage before
    if (tells && step > 0) arrive(&storage.empty[ring.previous()]);
    ring.advance();
  }
  wait_for_products<0>();
  hold(sums[0]);
}

// How many of a tile's rows belong to block `rank`.
__device__ __forceinline__ int own_rows(int rows, int rank, int splits_log2) {
  return rows > rank ? ((rows - rank - 1) >> splits_log2) + 1 : 0;
}

// Where row `row` of a tile lies among what block `rank` sends to the block that it belongs to.
template <class Config>
__device__ __forceinline__ int place(int rank, int row, int splits_log2) {
  return (rank * (Config::kRows >> splits_log2) + (row >> splits_log2)) * Config::kCols;
}

// Sends the sums of the tile's first `rows` rows to the blocks that they belong to.
template <class Config>
__device__ __forceinline__ void exchange(SplitKStorage<Config>& storage,
                                         const float (&sums)[Config::kSums], int rows, int consumer,
                                         int rank, int splits_log2) {
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int lane = thread % 32;
  const int first = consumer * kProductRows + thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + 8 * half;
    if (row >= rows) continue;
    const int owner = row & ((1 << splits_log2) - 1);
    float* const to = storage.received + place<Config>(rank, row, splits_log2) + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < Config::kSums / 4; ++i) {
      const float2 pair = make_float2(sums[4 * i + 2 * half], sums[4 * i + 2 * half + 1]);
      auto* const pair_to = reinterpret_cast<float2*>(to + 8 * i);
      if (owner == rank) {
        *pair_to = pair;
      } else {
        send(pair, pair_to, &storage.exchanged, owner);
      }
    }
  }
}

template <class Result>
__device__ __forceinline__ void write_four(const float4& sum, const SplitKResult& result,
                                           std::int64_t at, int left) {
  const Pack<Result, 4> pack{
      {narrow<Result>(sum.x), narrow<Result>(sum.y), narrow<Result>(sum.z), narrow<Result>(sum.w)}};
  Result* const to = static_cast<Result*>(result.data) + at;
  if (result.packed) {
    *reinterpret_cast<Pack<Result, 4>*>(to) = pack;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < left) to[i] = pack.element[i];
  }
}

// Adds what all blocks have sent, in their order, and writes this block's rows.
template <class Config>
__device__ __forceinline__ void finish(const SplitKStorage<Config>& storage,
                                       const SplitKResult& result, const TilePosition& at, int rows,
                                       int rank, int splits_log2) {
  constexpr int kPerRow = Config::kCols / 4;
  const int count = own_rows(rows, rank, splits_log2) * kPerRow;
  for (int i = static_cast<int>(threadIdx.x) - kWarpgroupThreads; i < count;
       i += Config::kConsumerThreads) {
    const int row = (i / kPerRow << splits_log2) + rank;
    const int col = i % kPerRow * 4;
    const int left = result.cols - at.col - col;
    if (left <= 0) continue;
    float4 sum{};
    for (int block = 0; block < 1 << splits_log2; ++block) {
      const float4 part = *reinterpret_cast<const float4*>(
          storage.received + place<Config>(block, row, splits_log2) + col);
      sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
    }
    if (result.finishes) {
      const auto finish = [&](float& x, int i) {
        const std::int64_t at_col = std::int64_t{at.col} + col + i;
        x += result.is_float ? bias_of<float>(result.finish, at.matrix, at_col)
                             : bias_of<typename Config::Factor>(result.finish, at.matrix, at_col);
        dispatch_activation(result.finish.op, [&](auto op) {
          x = activated<decltype(op)::value, /*kFast=*/false>(x);
        });
      };
      finish(sum.x, 0);
      finish(sum.y, 1);
      finish(sum.z, 2);
      finish(sum.w, 3);
    }
    const std::int64_t to =
        (std::int64_t{at.matrix} * result.rows + at.row + row) * result.cols + at.col + col;
    if (result.is_float) {
      write_four<float>(sum, result, to, left);
    } else {
      write_four<typename Config::Factor>(sum, result, to, left);
    }
  }
}

// ---- The kernel ----

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kResident)
    split_k_kernel(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                   const __grid_constant__ SplitKResult result, const SplitKOrder order) {
#if JAX_GPUOPS_HAS_WGMMA
  unsigned char* const memory = shared_array<unsigned char>();
  const unsigned past_atom = shared_address(memory) % kAtomBytes;
  auto& storage =
      *reinterpret_cast<SplitKStorage<Config>*>(memory + (kAtomBytes - past_atom) % kAtomBytes);
  // From a shuffle the compiler learns that a warp's threads have it in common.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroupThreads, 0);
  const int rank = cluster_rank();
  const TilePosition at = locate<Config>(order, blockIdx.x >> order.splits_log2);
  const int rows = min(Config::kRows, result.rows - at.row);

  // -- Set up --
  if (threadIdx.x == 0) {
    prefetch_tensor_map(a);
    prefetch_tensor_map(b);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      initialise(&storage.full[stage]);
      initialise(&storage.empty[stage], Config::kConsumers * 4);
    }
    initialise(&storage.exchanged);
    const int bytes_of_row = Config::kCols * static_cast<int>(sizeof(float));
    announce(&storage.exchanged,
             (order.splits() - 1) * own_rows(rows, rank, order.splits_log2) * bytes_of_row);
  }
  __syncthreads();
  cluster_arrive();  // who sends must know that the other's barrier is there: see the waits

  // -- Roles: warpgroup 0 produces, by one thread; the others consume --
  if (warpgroup == 0) {
    if (threadIdx.x == 0) produce(storage, a, b, order, at, rank);
    __syncwarp();
    cluster_wait();
  } else {
    const int consumer = warpgroup - 1;
    float sums[1][Config::kSums];
    multiply(storage, order.first_step(rank + 1) - order.first_step(rank), consumer, sums);
    cluster_wait();
    exchange(storage, sums[0], rows, consumer, rank, order.splits_log2);
    meet(1, Config::kConsumerThreads);  // for the sums that the block keeps for itself
    // No block ends before all have sent to it; what it sent itself needs it no more.
    wait(&storage.exchanged, 0);
    finish(storage, result, at, rows, rank, order.splits_log2);
  }
#else
  __trap();
#endif
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
