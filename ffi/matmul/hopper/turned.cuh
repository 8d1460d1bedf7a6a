// matmul of floats on Hopper's tensor cores, in TF32, for b stored as k x n: computes the
// transposed product, result^T = b^T a^T.
//
// wgmma takes floats from shared memory only in K-major order, which a has and b has not. But its
// left operand may come from registers, and threads can read shared memory in any order. So b is
// the left operand, columns of the result are rows of the wgmmas, and b need not be transposed
// before. Each thread reads two neighbours of a line of b, which are two rows of a wgmma, and so
// has two neighbours of a row of the result among its sums:
//
//     stage of b   k 0 | n 0  n 1  n 2 ... |         sums     m 0  m 1  m 2 ...
//                  k 1 | n 0  n 1  n 2 ... |           n 0     x    x
//                  ...    left[0], left[1]             n 1     x    x
//
// The rest is as in persistent.cuh, except that the tile of a block is tall rather than wide, and
// the other block of the cluster, if there is one, has the tile to the right, which needs the same
// slices of a.
//
// Tiles of fewer rows are for few rows, or few tiles. While one consumer reads its slice of b, the
// tensor cores multiply that of the other, which takes long enough with 128 rows; with 64 rows they
// wait, but then the time is that of reading b from memory.
#pragma once

#include <cstdint>

#include "core/cuda.h"
#include "core/ptx/bulk_copy.cuh"
#include "core/ptx/cluster.cuh"
#include "core/ptx/early_launch.cuh"
#include "core/ptx/mbarrier.cuh"
#include "core/ptx/tensor_copy.cuh"
#include "core/ptx/warpgroup.cuh"
#include "core/ptx/wgmma.cuh"
#include "core/shared.h"
#include "matmul/epilogue.cuh"
#include "matmul/hopper/addend.cuh"
#include "matmul/hopper/persistent.cuh"
#include "matmul/hopper/stages.cuh"
#include "matmul/hopper/tile_order.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template <int kRows_, int kStages_, int kBlocks_, bool kFinishes_>
struct Turned {
  using Factor = float;
  // Whether sums get a bias, an activation or beta c.
  static constexpr bool kFinishes = kFinishes_;
  // The tile of a block. Each consumer has all rows of one half of the columns.
  static constexpr int kRows = kRows_;
  static constexpr int kCols = 128;
  static constexpr int kConsumers = 2;
  static constexpr int kStages = kStages_;
  // The tiles of a cluster's blocks lie side by side; TileOrder sees them as one tile.
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kClusterRows = 1;
  static constexpr int kResultCols = kBlocks * kCols;

  // Whether the depth may be split: then the results are partial sums, as of persistent.cuh.
  static constexpr bool kSplits = !kFinishes;

  static constexpr int kSums = kRows / 2;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroupThreads;
  static constexpr int kABytes = kRows * kLineBytes;
  static constexpr int kBBytes = kCols * kLineBytes;
  static constexpr int kDepth = kStageDepth<Factor>;
  static constexpr int kDepthSteps = kLineBytes / kProductBytes;  // of a stage
  // A stage of b consists of panels of 32 columns, with a line for each k.
  static constexpr int kPanelCols = kLineBytes / static_cast<int>(sizeof(Factor));
  static constexpr int kBPanelBytes = kDepth * kLineBytes;

  // A consumer writes 32 rows of its two panels at a time. Each panel has a buffer: the threads
  // fill one half while the copy engine reads the other.
  static constexpr int kPanelBuffers = kCols / kConsumers / kPanelCols;
  static constexpr int kPanelRows = kProductRows;
  static constexpr int kWrittenRows = kPanelRows / 2;
  static constexpr int kEmptyArrivals = kConsumers * 4 * kBlocks;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static_assert(kCols == kConsumers * kProductRows, "a consumer has one row of wgmmas");
  static_assert(kPanelBuffers == 2);
};

// ---- The producer ----

template <class Config>
__device__ __forceinline__ TilePosition locate_turned(const TileOrder& order, unsigned tile,
                                                      int rank) {
  TilePosition at = locate<Config>(order, tile, 0);
  at.col += rank * Config::kCols;
  return at;
}

template <class Config>
__device__ __forceinline__ void produce_turned(PersistentStorage<Config>& storage,
                                               const FactorMaps& a, const TensorMap& b,
                                               const TileOrder& order, int rank) {
  constexpr auto kAll = static_cast<std::uint16_t>((1u << Config::kBlocks) - 1);
  RingPlace<Config> ring;
  wait_for_kernel_before();  // the previous kernel may copy a
  for (unsigned tile = blockIdx.x / Config::kBlocks; tile < order.tiles;
       tile += gridDim.x / Config::kBlocks) {
    const TilePosition at = locate_turned<Config>(order, tile, rank);
    const DepthPart depth = depth_of<Config>(order, at);
    const int bytes = slice_bytes</*kDeep=*/true, Config::kRows>(a, at.row) + Config::kBBytes;
    for (int step = 0; step < depth.steps; ++step) {
      wait(&storage.empty[ring.stage], ring.phase ^ 1);
      Mbarrier* const full = &storage.full[ring.stage];
      announce(full, bytes);
      const int k = (depth.first + step) * Config::kDepth;
      copy_slice</*kDeep=*/true, Config::kRows, Config::kBlocks>(
          storage.a[ring.stage], a, at.row, k, depth.matrix * order.a_batch_stride, full, rank,
          kAll);
#pragma unroll
      for (int panel = 0; panel < Config::kCols / Config::kPanelCols; ++panel) {
        copy_tensor(storage.b[ring.stage] + panel * Config::kBPanelBytes, b,
                    at.col + panel * Config::kPanelCols, k, depth.matrix * order.b_batch_stride,
                    full);
      }
      ring.advance();
    }
  }
  drain(storage, ring);
}

// ---- A consumer ----

// Which columns a thread has: two neighbours, which are rows r and r + 8 of the wgmmas, with r =
// lane / 4. Any assignment of columns to rows will do. Shared memory serves 16 lanes, 128 bytes, at
// a time: four rows r at four k's. Piece p of line k lies at p ^ k % 8, and the four k's do not
// change bit 2 of it. So, to be free of bank conflicts, four rows r take pieces that differ in bit
// 2, and both halves of these:
//
//     r % 4       0        1           2        3               panel r / 4 of the consumer's two
//     piece       w, left  w + 4, left w, right w + 4, right    w: the warp
struct OwnColumns {
  int panel;
  int piece;
  int byte;  // in the piece

  __device__ __forceinline__ OwnColumns() {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
    const int row = thread % 32 / 4;
    panel = row / 4;
    piece = thread / 32 + row % 2 * 4;
    byte = row / 2 % 2 * 8;
  }
  // The first of them, counted from the consumer's first column.
  __device__ __forceinline__ int first() const { return panel * 32 + piece * 4 + byte / 4; }
};

// Writes a consumer's columns of a tile from (row, col) on.
template <class Config>
__device__ __forceinline__ void write_turned(unsigned char* buffers, const TensorMap& result,
                                             const float (&sums)[Config::kSums],
                                             const OwnColumns& own, int row, int col, int matrix,
                                             int barrier) {
  constexpr int kRows = Config::kWrittenRows;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
#pragma unroll
  for (int first = 0; first < Config::kRows; first += kRows) {
    unsigned char* const half = buffers + first / kRows % 2 * kRows * kLineBytes;
    if (thread == 0) wait_until_read<Config::kPanelBuffers>();
    meet(barrier, kWarpgroupThreads);
    // Sums 4 i and 4 i + 2 are neighbours in a row, 4 i + 1 and 4 i + 3 in the row below.
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int line = 8 * i + thread % 4 * 2 + j;
        const int s = first / 2 + 4 * i + j;
        *reinterpret_cast<float2*>(half + own.panel * kPanelBytes + line * kLineBytes +
                                   (own.piece ^ line % 8) * 16 + own.byte) =
            make_float2(sums[s], sums[s + 2]);
      }
    }
    finish_writes_before_copies();
    meet(barrier, kWarpgroupThreads);
    if (thread == 0) {
#pragma unroll
      for (int panel = 0; panel < Config::kPanelBuffers; ++panel) {
        write_tensor(result, col + panel * Config::kPanelCols, row + first, matrix,
                     half + panel * kPanelBytes);
      }
    }
  }
}

// Adds beta c to a thread's sums of two columns, `col` and the next, of the tile that begins in row
// `row`. The number of columns is even.
template <class Config>
__device__ __forceinline__ void add_rows_of_c(float (&sums)[Config::kSums],
                                              const FinishAndAdd& finish, int matrix, int row,
                                              int col) {
  row += static_cast<int>(threadIdx.x) % 4 * 2;
  const float* const from = static_cast<const float*>(finish.c) +
                            (std::int64_t{matrix} * finish.rows + row) * finish.cols + col;
#pragma unroll
  for (int i = 0; i < Config::kSums / 4; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int line = 8 * i + j;
      if (row + line >= finish.rows) continue;
      const float2 c = *reinterpret_cast<const float2*>(from + line * finish.cols);
      sums[4 * i + j] = fmaf(finish.beta, c.x, sums[4 * i + j]);
      sums[4 * i + 2 + j] = fmaf(finish.beta, c.y, sums[4 * i + 2 + j]);
    }
  }
}

template <class Config>
__device__ __forceinline__ void consume_turned(PersistentStorage<Config>& storage,
                                               const TensorMap& result, const FinishAndAdd& finish,
                                               const TileOrder& order, int rank, int consumer) {
  constexpr int kOwnCols = Config::kCols / Config::kConsumers;
  float sums[Config::kSums];
  RingPlace<Config> ring;
  const std::uint64_t a_first = matrix_descriptor</*kDeep=*/true>(storage.a[0]);
  const OwnColumns own;
  const int lane = threadIdx.x % 32;
  // A lane reads lines lane % 4 and lane % 4 + 4 of each eight lines of b.
  const int k = lane % 4;
  const unsigned char* const lines =
      storage.b[0] + (consumer * Config::kPanelBuffers + own.panel) * Config::kBPanelBytes +
      k * kLineBytes + own.byte;
  const unsigned char* const upper = lines + (own.piece ^ k) * 16;
  const unsigned char* const lower = lines + 4 * kLineBytes + (own.piece ^ (k + 4)) * 16;

  const auto release = stage_release<Config>(storage, rank);

  for (unsigned tile = blockIdx.x / Config::kBlocks; tile < order.tiles;
       tile += gridDim.x / Config::kBlocks) {
    // -- Multiply --
    const TilePosition at = locate_turned<Config>(order, tile, rank);
    const int steps = depth_of<Config>(order, at).steps;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait(&storage.full[ring.stage], ring.phase);
      std::uint32_t left[Config::kDepthSteps][4];
      const int stage = ring.stage * Config::kBBytes;
#pragma unroll
      for (int i = 0; i < Config::kDepthSteps; ++i) {
        const int offset = stage + i * 8 * kLineBytes;
        const uint2 first = *reinterpret_cast<const uint2*>(upper + offset);
        const uint2 second = *reinterpret_cast<const uint2*>(lower + offset);
        left[i][0] = first.x;
        left[i][1] = first.y;
        left[i][2] = second.x;
        left[i][3] = second.y;
      }
      const std::uint64_t a = a_first + ring.stage * (Config::kABytes / 16);
      begin_products();
#pragma unroll
      for (int i = 0; i < Config::kDepthSteps; ++i) {
        multiply_add(sums, left[i], a + i * kDepthStepBytes<true> / 16, step > 0 || i > 0);
      }
      end_products();
      // The other consumer's products keep the tensor cores busy until this one has read its next
      // stage.
      wait_for_products<0>();
#pragma unroll
      for (int i = 0; i < Config::kDepthSteps; ++i) hold(left[i]);
      release(ring.stage);
      ring.advance();
    }
    hold(sums);

    // -- Write --
    const int col = at.col + consumer * kOwnCols;
    if constexpr (Config::kFinishes) {
      const int own_col = col + own.first();
      const float left = bias_of<float>(finish, at.matrix, own_col);
      const float right = bias_of<float>(finish, at.matrix, own_col + 1);
#pragma unroll
      for (int i = 0; i < Config::kSums; ++i) sums[i] += i % 4 < 2 ? left : right;
      dispatch_activation(finish.op, [&](auto op) {
#pragma unroll
        for (float& sum : sums) sum = activated<decltype(op)::value, /*kFast=*/false>(sum);
      });
      if (finish.c != nullptr && own_col < finish.cols) {
        add_rows_of_c<Config>(sums, finish, at.matrix, at.row, own_col);
      }
    }
    write_turned<Config>(storage.panels[consumer][0], result, sums, own, at.row, col, at.matrix,
                         1 + consumer);
  }
  if (threadIdx.x % kWarpgroupThreads == 0) wait_until_read<0>();
}

// ---- The kernel ----

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    turned_kernel(const __grid_constant__ FactorMaps a, const __grid_constant__ TensorMap b,
                  const __grid_constant__ TensorMap result, const TileOrder order,
                  const __grid_constant__ FinishAndAdd finish) {
#if JAX_GPUOPS_HAS_WGMMA
  unsigned char* const memory = shared_array<unsigned char>();
  const unsigned past_atom = shared_address(memory) % kAtomBytes;
  auto& storage =
      *reinterpret_cast<PersistentStorage<Config>*>(memory + (kAtomBytes - past_atom) % kAtomBytes);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroupThreads, 0);
  const int rank = Config::kBlocks > 1 ? cluster_rank() : 0;

  // -- Set up --
  if (threadIdx.x == 0) {
    prefetch_tensor_map(a.within);
    prefetch_tensor_map(b);
    prefetch_tensor_map(result);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      initialise(&storage.full[stage]);
      initialise(&storage.empty[stage], Config::kEmptyArrivals);
    }
  }
  __syncthreads();
  if constexpr (Config::kBlocks > 1) {
    cluster_arrive();
    cluster_wait();
  }

  // -- Roles: one thread of warpgroup 0 is the producer; the other warpgroups are consumers --
  if (warpgroup == 0) {
    give_up_registers<Config::kProducerRegisters>();
    if (threadIdx.x == 0) produce_turned(storage, a, b, order, rank);
  } else {
    take_registers<Config::kConsumerRegisters>();
    consume_turned(storage, result, finish, order, rank, warpgroup - 1);
  }
#else
  __trap();
#endif
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
