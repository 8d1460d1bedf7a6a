// matmul, algorithm `split_k`: split-K for few tiles on Hopper's tensor cores. So that more
// multiprocessors have work, the blocks of a cluster compute the same tile, each over a part of the
// depth.
//
//     blocks of a cluster      0            1            2            3
//     depth                | 0 ..     | ..       | ..       | .. k |    sums of the whole tile each
//     results              cols 0 ..    32 ..        64 ..        96 ..
//
// Each block finishes a share of the tile's columns, in groups of eight: all blocks send it their
// sums of these columns through distributed shared memory, and it adds them in the order of the
// blocks. So results do not depend on which block is done first. A block computes one tile. A
// producer warp copies slices of the factors into a ring of stages, and consumer warpgroups, with
// 64 rows each, multiply them, as in persistent.cuh.
//
// With few rows the time is that of reading b, and depends on how many bytes are in flight. So the
// ring takes all of the shared memory, the sums are received in its place, and a stage is released
// as soon as it is multiplied, not when the next one is.
#pragma once

#include <cstdint>

#include "core/collectives.h"
#include "core/cuda.h"
#include "core/ptx/cluster.cuh"
#include "core/ptx/early_launch.cuh"
#include "core/ptx/warpgroup.cuh"
#include "core/shared.h"
#include "matmul/epilogue.cuh"
#include "matmul/hopper/depth_shares.cuh"
#include "matmul/hopper/stages.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template <class Factor_, bool kDeepA_, bool kDeepB_, int kRows_, int kCols_, int kResident_>
struct SplitK {
  using Factor = Factor_;
  static constexpr bool kDeepA = kDeepA_;
  static constexpr bool kDeepB = kDeepB_;
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kResident = kResident_;  // blocks on a multiprocessor, at most

  static constexpr int kConsumers = kRows / kProductRows;
  static constexpr int kWaves = 1;
  static constexpr int kSums = kCols / 2;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroupThreads;
  static constexpr int kThreads = kConsumerThreads + kWarpSize;
  static constexpr int kABytes = kRows * kLineBytes;
  static constexpr int kBBytes = kCols * kLineBytes;
  static constexpr int kStageBytes = kABytes + kBBytes;

  // Sums are exchanged in pieces: those of a warp in 16 rows and eight columns.
  static constexpr int kGroups = kCols / 8;
  static constexpr int kPieceRows = 16;
  static constexpr int kPiecesHigh = kRows / kPieceRows;
  static constexpr int kPieceBytes = kPieceRows * 8 * static_cast<int>(sizeof(float));
};

// Begins at a multiple of kAtomBytes in shared memory: the swizzle depends on the address. It is
// followed by the stages, each with a's slice and then b's, and later, in their place, by the sums
// that the block receives.
struct alignas(kAtomBytes) SplitKStorage {
  Mbarrier full[kMostSplitKStages];
  Mbarrier empty[kMostSplitKStages];
  Mbarrier exchanged;

  __device__ unsigned char* stages() { return reinterpret_cast<unsigned char*>(this + 1); }
  // One for each lane of a piece; see place().
  __device__ float4* received() { return reinterpret_cast<float4*>(this + 1); }
};
static_assert(sizeof(SplitKStorage) == kAtomBytes);

// The next stage of the ring, and the parity of its phase.
struct SplitKRing {
  int stages;
  int stage = 0;
  unsigned phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage < stages) return;
    stage = 0;
    phase ^= 1;
  }
};

struct SplitKOrder {
  unsigned rows;  // of tiles
  unsigned cols;
  int splits;
  int stages;
  Shares steps;        // stages of the whole depth, in a share for each block of a cluster
  Shares groups;       // of eight columns, which each block finishes
  int a_batch_stride;  // 1, or 0 if the batch shares the factor
  int b_batch_stride;
};

struct SplitKResult {
  void* data;
  int rows;
  int cols;
  bool is_float;  // else of the factors' type
  bool packed;    // packs of four columns are aligned
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
__device__ __forceinline__ void produce(SplitKStorage& storage, const FactorMaps& a,
                                        const FactorMaps& b, const SplitKOrder& order,
                                        const TilePosition& at, int rank) {
  SplitKRing ring{order.stages};
  const int bytes = slice_bytes<Config::kDeepA, Config::kRows>(a, at.row) +
                    slice_bytes<Config::kDeepB, Config::kCols>(b, at.col);
  wait_for_kernel_before();  // the previous kernel may copy factors
  for (int step = order.steps.first(rank); step < order.steps.first(rank + 1); ++step) {
    // The phase before the first counts as complete: the ring begins empty.
    wait(&storage.empty[ring.stage], ring.phase ^ 1);
    Mbarrier* const full = &storage.full[ring.stage];
    announce(full, bytes);
    const int k = step * kStageDepth<typename Config::Factor>;
    unsigned char* const to = storage.stages() + ring.stage * Config::kStageBytes;
    copy_slice<Config::kDeepB, Config::kCols, 1>(to + Config::kABytes, b, at.col, k,
                                                 at.matrix * order.b_batch_stride, full, 0, 0);
    copy_slice<Config::kDeepA, Config::kRows, 1>(to, a, at.row, k, at.matrix * order.a_batch_stride,
                                                 full, 0, 0);
    ring.advance();
  }
}

// ---- A consumer ----

template <class Config>
__device__ __forceinline__ void multiply(SplitKStorage& storage, const SplitKOrder& order,
                                         int consumer, int rank, float (&sums)[1][Config::kSums]) {
  const std::uint64_t a =
      matrix_descriptor<Config::kDeepA>(storage.stages() + consumer * kPanelBytes);
  const std::uint64_t b = matrix_descriptor<Config::kDeepB>(storage.stages() + Config::kABytes);
  const int steps = order.steps.of(rank);
  const bool tells = threadIdx.x % 32 == 0;
  SplitKRing ring{order.stages};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    wait(&storage.full[ring.stage], ring.phase);
    const int at = ring.stage * (Config::kStageBytes / 16);
    multiply_stage<Config>(sums, a + at, b + at, step > 0);
    wait_for_products<0>();
    if (tells) arrive(&storage.empty[ring.stage]);
    ring.advance();
  }
  hold(sums[0]);
}

// How many pieces, one below the other, have rows of the result.
template <class Config>
__device__ __forceinline__ int pieces_high(int rows) {
  return (rows + Config::kPieceRows - 1) / Config::kPieceRows;
}

// The index in received() of the piece that block `rank` sends of a group of columns, counted from
// the receiver's first group, and of the 16 rows from 16 * `high` on.
template <class Config>
__device__ __forceinline__ int place(const SplitKOrder& order, int rank, int group, int high) {
  return ((rank * order.groups.of(0) + group) * Config::kPiecesHigh + high) * kWarpSize;
}

// Sends the sums of a warp, which has the 16 rows of pieces `high`, to the blocks that finish their
// columns.
template <class Config>
__device__ __forceinline__ void exchange(SplitKStorage& storage, const float (&sums)[Config::kSums],
                                         const SplitKOrder& order, int high, int rank) {
  const int lane = threadIdx.x % kWarpSize;
  int owner = 0, begin = 0, end = order.groups.first(1);
#pragma unroll
  for (int i = 0; i < Config::kGroups; ++i) {
    if (i == end) {
      begin = end;
      ++owner;
      end = order.groups.first(owner + 1);
    }
    const float4 four = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
    float4* const to = storage.received() + place<Config>(order, rank, i - begin, high) + lane;
    if (owner == rank) {
      *to = four;
    } else {
      send(four, to, &storage.exchanged, owner);
    }
  }
}

// Adds the sums that all blocks have sent, in the order of the blocks, and writes this block's
// columns. Each warp takes piece after piece.
template <class Config>
__device__ __forceinline__ void finish(SplitKStorage& storage, const SplitKResult& result,
                                       const TilePosition& at, const SplitKOrder& order, int rows,
                                       int rank) {
  const int lane = threadIdx.x % kWarpSize;
  const int first_group = order.groups.first(rank);
  const int high = pieces_high<Config>(rows);
  const int pieces = order.groups.of(rank) * high;
  for (int i = static_cast<int>(threadIdx.x) / kWarpSize; i < pieces;
       i += Config::kConsumerThreads / kWarpSize) {
    const int group = i / high;
    const int col = (first_group + group) * 8 + lane % 4 / 2 * 4;
    // Loads of the bias go on while the sums are added.
    float bias[4] = {};
    if (result.finishes) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::int64_t at_col = std::int64_t{at.col} + col + j;
        bias[j] = result.is_float
                      ? bias_of<float>(result.finish, at.matrix, at_col)
                      : bias_of<typename Config::Factor>(result.finish, at.matrix, at_col);
      }
    }
    float4 sum{};
    for (int block = 0; block < order.splits; ++block) {
      const float4 part =
          storage.received()[place<Config>(order, block, group, i - group * high) + lane];
      sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
    }
    // A lane has two columns of one row and of the row eight below. Neighbouring lanes exchange two
    // sums: one gets four columns of the upper row, the other four of the lower.
    const bool lower = lane % 2 == 1;
    const float2 given = lower ? make_float2(sum.x, sum.y) : make_float2(sum.z, sum.w);
    const float2 got = make_float2(__shfl_xor_sync(0xffffffff, given.x, 1),
                                   __shfl_xor_sync(0xffffffff, given.y, 1));
    sum = lower ? make_float4(got.x, got.y, sum.z, sum.w) : make_float4(sum.x, sum.y, got.x, got.y);
    const int row = (i - group * high) * Config::kPieceRows + lane / 4 + (lower ? 8 : 0);
    const int left = result.cols - at.col - col;
    if (row >= rows || left <= 0) continue;
    if (result.finishes) sum = finished</*kFast=*/false>(result.finish.op, sum, bias);
    const std::int64_t to =
        (std::int64_t{at.matrix} * result.rows + at.row + row) * result.cols + at.col + col;
    if (result.is_float) {
      write_four(sum, static_cast<float*>(result.data) + to, left, result.packed);
    } else {
      using T = typename Config::Factor;
      write_four(sum, static_cast<T*>(result.data) + to, left, result.packed);
    }
  }
}

// ---- The kernel ----

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kResident)
    split_k_kernel(const __grid_constant__ FactorMaps a, const __grid_constant__ FactorMaps b,
                   const __grid_constant__ SplitKResult result, const SplitKOrder order) {
#if JAX_GPUOPS_HAS_WGMMA
  unsigned char* const memory = shared_array<unsigned char>();
  const unsigned past_atom = shared_address(memory) % kAtomBytes;
  auto& storage = *reinterpret_cast<SplitKStorage*>(memory + (kAtomBytes - past_atom) % kAtomBytes);
  // The shuffle tells the compiler that the value is the same for all threads of a warp.
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const int rank = cluster_rank();
  const TilePosition at = locate<Config>(order, blockIdx.x / order.splits);
  const int rows = min(Config::kRows, result.rows - at.row);

  // -- Set up --
  if (threadIdx.x == 0) {
    prefetch_tensor_map(a.within);
    prefetch_tensor_map(b.within);
    for (int stage = 0; stage < order.stages; ++stage) {
      initialise(&storage.full[stage]);
      initialise(&storage.empty[stage], Config::kConsumers * 4);
    }
    initialise(&storage.exchanged);
    announce(&storage.exchanged, (order.splits - 1) * order.groups.of(rank) *
                                     pieces_high<Config>(rows) * Config::kPieceBytes);
  }
  __syncthreads();

  // -- Roles: one thread of the last warp is the producer; the other warps are consumers --
  if (warp == Config::kConsumerThreads / kWarpSize) {
    if (threadIdx.x % kWarpSize == 0) produce<Config>(storage, a, b, order, at, rank);
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  } else {
    float sums[1][Config::kSums];
    multiply<Config>(storage, order, warp / 4, rank, sums);
    // No block of the cluster needs its ring any more, and all have initialised their mbarriers.
    cluster_arrive();
    cluster_wait();
    if (warp * Config::kPieceRows < rows) exchange<Config>(storage, sums[0], order, warp, rank);
    meet(1, Config::kConsumerThreads);  // for the sums that the block keeps for itself
    // A block exits only after all blocks have sent to it. Its own sums need it no longer once
    // sent.
    wait(&storage.exchanged, 0);
    finish<Config>(storage, result, at, order, rows, rank);
  }
#else
  __trap();
#endif
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
