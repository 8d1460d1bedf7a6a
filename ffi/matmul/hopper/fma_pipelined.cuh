// fma_pipelined: float32 products by FMAs, supplied by Hopper's tensor copies.
//
// double_buffered does not reach the rate of FMAs because its threads also load slices, write them
// to shared memory, and wait at barriers. Here a producer thread copies slices, 32 deep, into a
// ring of stages, as in the kernels on tensor cores. Eight warps multiply, each thread 8 rows by 16
// columns (8 in tiles of 128 columns). Operands for four elements of k take 24 loads for 512 FMAs:
//
//     warps of a block            lanes of a warp
//       0 1    32 rows each         0  1  2 ..  7
//       2 3                         8  9 ..
//       4 5                        16
//       6 7                        24         31
//
// Slices are swizzled in shared memory, in lines of 128 bytes, along k if the factor is deep, else
// along its rows. The rows and columns of a lane depend on this order, so that the lanes of each
// load read from different banks:
//
//     deep: row 4 i + lane / 8, by 4 of k         else: rows 16 i + 4 (lane / 8) .. + 3, of one k
//           col 8 j + lane % 8                          cols 32 j + 4 (lane % 8) .. + 3
//
// The products of an element are added one after the other, as in double_buffered: the results are
// the same.
#pragma once

#include <cstdint>

#include "core/cuda.h"
#include "core/ptx/mbarrier.cuh"
#include "core/ptx/tensor_copy.cuh"
#include "core/ptx/warpgroup.cuh"
#include "core/shared.h"
#include "core/vector.h"
#include "matmul/hopper/float_result.cuh"
#include "matmul/hopper/stages.cuh"
#include "matmul/hopper/tile_order.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template <bool kDeepA_, bool kDeepB_, int kCols_, int kStages_>
struct FmaPipelined {
  // Whether k is the contiguous dimension of a (stored m x k) and of b (stored n x k).
  static constexpr bool kDeepA = kDeepA_;
  static constexpr bool kDeepB = kDeepB_;
  // The tile of a block.
  static constexpr int kRows = kFmaRows;
  static constexpr int kCols = kCols_;
  static constexpr int kStages = kStages_;
  static constexpr int kClusterRows = 1;
  static constexpr int kResultCols = kCols;

  static constexpr int kConsumerWarps = 8;
  static constexpr int kThreads = kWarpgroupThreads + kConsumerWarps * 32;
  static constexpr int kThreadRows = 8;
  static constexpr int kThreadCols = kCols / 16;
  static constexpr int kABytes = kRows * kLineBytes;
  static constexpr int kBBytes = kCols * kLineBytes;

  // As in the persistent kernel: the producer's warpgroup leaves most of its registers to others.
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static_assert(kRows == 4 * 4 * kThreadRows, "four warps of four lanes down");
  static_assert(kThreadCols % kPack == 0 && kCols <= 256);
};

inline constexpr int kFloatsOfLine = kLineBytes / 4;
// A panel of a factor that is not deep: a line of 32 rows or columns for each k.
inline constexpr int kFloatPanelBytes = kFloatsOfLine * kLineBytes;

// ---- The producer ----

template <bool kDeep, int kExtent>
__device__ __forceinline__ void copy_floats(unsigned char* to, const TensorMap& map, int row, int k,
                                            int matrix, Mbarrier* full) {
  if constexpr (kDeep) {
    copy_tensor(to, map, k, row, matrix, full);
  } else {
#pragma unroll
    for (int panel = 0; panel < kExtent / kFloatsOfLine; ++panel) {
      copy_tensor(to + panel * kFloatPanelBytes, map, row + panel * kFloatsOfLine, k, matrix, full);
    }
  }
}

template <class Config>
__device__ __forceinline__ void produce_floats(RingStorage<Config>& storage, const TensorMap& a,
                                               const TensorMap& b, const TileOrder& order) {
  RingPlace<Config> ring;
  for (unsigned tile = blockIdx.x; tile < order.tiles; tile += gridDim.x) {
    const TilePosition at = locate<Config>(order, tile, 0);
    for (int step = 0; step < order.steps; ++step) {
      // The phase before the first counts as complete: the ring begins empty.
      wait(&storage.empty[ring.stage], ring.phase ^ 1);
      Mbarrier* const full = &storage.full[ring.stage];
      announce(full, Config::kABytes + Config::kBBytes);
      const int k = step * kFloatsOfLine;
      copy_floats<Config::kDeepA, Config::kRows>(storage.a[ring.stage], a, at.row, k,
                                                 at.matrix * order.a_batch_stride, full);
      copy_floats<Config::kDeepB, Config::kCols>(storage.b[ring.stage], b, at.col, k,
                                                 at.matrix * order.b_batch_stride, full);
      ring.advance();
    }
  }
}

// ---- A consumer ----

// Where a thread's rows and columns lie, in the tile and in shared memory.
template <class Config>
struct FmaPlace {
  int warp_row;
  int warp_col;
  int down;    // 0 .. 3
  int across;  // 0 .. 7

  __device__ __forceinline__ FmaPlace() {
    const int lane = threadIdx.x % 32;
    const int warp = (threadIdx.x - kWarpgroupThreads) / 32;
    warp_row = warp / 2 * 32;
    warp_col = warp % 2 * (Config::kCols / 2);
    down = lane / 8;
    across = lane % 8;
  }

  __device__ __forceinline__ int row_of(int i) const {
    return warp_row + (Config::kDeepA ? 4 * i + down : i / kPack * 16 + down * kPack + i % kPack);
  }
  __device__ __forceinline__ int col_of(int j) const {
    return warp_col +
           (Config::kDeepB ? 8 * j + across : j / kPack * 32 + across * kPack + j % kPack);
  }
};

__device__ __forceinline__ Pack<float, kPack> piece_of_line(const unsigned char* line, int piece) {
  return *reinterpret_cast<const Pack<float, kPack>*>(line + piece * 16);
}

// a[i][e]: row i of the thread, at depth 4 k4 + e of the stage.
template <class Config>
__device__ __forceinline__ void load_rows(const unsigned char* stage, const FmaPlace<Config>& place,
                                          int k4, float (&a)[Config::kThreadRows][kPack]) {
  if constexpr (Config::kDeepA) {
#pragma unroll
    for (int i = 0; i < Config::kThreadRows; ++i) {
      const int swizzle = (4 * i + place.down) % 8;
      const auto pack = piece_of_line(stage + place.row_of(i) * kLineBytes, k4 ^ swizzle);
#pragma unroll
      for (int e = 0; e < kPack; ++e) a[i][e] = pack.element[e];
    }
  } else {
    const unsigned char* const panel = stage + place.warp_row / kFloatsOfLine * kFloatPanelBytes;
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      const int k = k4 * kPack + e;
#pragma unroll
      for (int half = 0; half < Config::kThreadRows / kPack; ++half) {
        const auto pack = piece_of_line(panel + k * kLineBytes, (half * 4 + place.down) ^ (k % 8));
#pragma unroll
        for (int i = 0; i < kPack; ++i) a[half * kPack + i][e] = pack.element[i];
      }
    }
  }
}

template <class Config>
__device__ __forceinline__ void multiply_floats(
    const unsigned char* stage, const FmaPlace<Config>& place, int k4,
    const float (&a)[Config::kThreadRows][kPack],
    float (&sum)[Config::kThreadRows][Config::kThreadCols]) {
  if constexpr (Config::kDeepB) {
    // Four columns at a time, at four k's.
#pragma unroll
    for (int first = 0; first < Config::kThreadCols; first += kPack) {
      Pack<float, kPack> b[kPack];
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        b[j] = piece_of_line(stage + place.col_of(first + j) * kLineBytes, k4 ^ place.across);
      }
#pragma unroll
      for (int e = 0; e < kPack; ++e) {
#pragma unroll
        for (int i = 0; i < Config::kThreadRows; ++i) {
#pragma unroll
          for (int j = 0; j < kPack; ++j) sum[i][first + j] += a[i][e] * b[j].element[e];
        }
      }
    }
  } else {
    const unsigned char* const panels = stage + place.warp_col / kFloatsOfLine * kFloatPanelBytes;
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      const int k = k4 * kPack + e;
      Pack<float, kPack> b[Config::kThreadCols / kPack];
#pragma unroll
      for (int j = 0; j < Config::kThreadCols / kPack; ++j) {
        b[j] =
            piece_of_line(panels + j * kFloatPanelBytes + k * kLineBytes, place.across ^ (k % 8));
      }
#pragma unroll
      for (int i = 0; i < Config::kThreadRows; ++i) {
#pragma unroll
        for (int j = 0; j < Config::kThreadCols; ++j) {
          sum[i][j] += a[i][e] * b[j / kPack].element[j % kPack];
        }
      }
    }
  }
}

// Writes a thread's sums, in packs if its columns are neighbours.
template <class Config>
__device__ __forceinline__ void write_floats(
    const float (&sum)[Config::kThreadRows][Config::kThreadCols], const FmaPlace<Config>& place,
    const FloatResult& result, const TilePosition& at) {
#pragma unroll
  for (int i = 0; i < Config::kThreadRows; ++i) {
    const int row = at.row + place.row_of(i);
    if (row >= result.rows) continue;
    const std::int64_t line = (std::int64_t{at.matrix} * result.rows + row) * result.cols;
#pragma unroll
    for (int first = 0; first < Config::kThreadCols; first += kPack) {
      if (!Config::kDeepB && result.packed) {
        const int col = at.col + place.col_of(first);
        if (col >= result.cols) continue;
        Pack<float, kPack> values;
#pragma unroll
        for (int j = 0; j < kPack; ++j) values.element[j] = result.alpha * sum[i][first + j];
        if (result.c != nullptr) {
          const auto c = *reinterpret_cast<const Pack<float, kPack>*>(result.c + line + col);
#pragma unroll
          for (int j = 0; j < kPack; ++j) values.element[j] += result.beta * c.element[j];
        }
        *reinterpret_cast<Pack<float, kPack>*>(result.data + line + col) = values;
      } else {
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          const int col = at.col + place.col_of(first + j);
          if (col >= result.cols) continue;
          float value = result.alpha * sum[i][first + j];
          if (result.c != nullptr) value += result.beta * result.c[line + col];
          result.data[line + col] = value;
        }
      }
    }
  }
}

template <class Config>
__device__ __forceinline__ void consume_floats(RingStorage<Config>& storage,
                                               const FloatResult& result, const TileOrder& order) {
  const FmaPlace<Config> place;
  RingPlace<Config> ring;
  for (unsigned tile = blockIdx.x; tile < order.tiles; tile += gridDim.x) {
    float sum[Config::kThreadRows][Config::kThreadCols] = {};
#pragma unroll 1
    for (int step = 0; step < order.steps; ++step) {
      wait(&storage.full[ring.stage], ring.phase);
      const unsigned char* const a_stage = storage.a[ring.stage];
      const unsigned char* const b_stage = storage.b[ring.stage];
#pragma unroll 2
      for (int k4 = 0; k4 < kFloatsOfLine / kPack; ++k4) {
        float a[Config::kThreadRows][kPack];
        load_rows(a_stage, place, k4, a);
        multiply_floats(b_stage, place, k4, a, sum);
      }
      __syncwarp();  // all lanes have read
      if (threadIdx.x % 32 == 0) arrive(&storage.empty[ring.stage]);
      ring.advance();
    }
    write_floats(sum, place, result, locate<Config>(order, tile, 0));
  }
}

// ---- The kernel ----

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fma_pipelined_kernel(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                         const __grid_constant__ FloatResult result, const TileOrder order) {
#if JAX_GPUOPS_HAS_WGMMA
  unsigned char* const memory = shared_array<unsigned char>();
  const unsigned past_atom = shared_address(memory) % kAtomBytes;
  auto& storage =
      *reinterpret_cast<RingStorage<Config>*>(memory + (kAtomBytes - past_atom) % kAtomBytes);
  // The shuffle tells the compiler that the value is the same for all threads of a warp.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroupThreads, 0);

  // -- Set up --
  if (threadIdx.x == 0) {
    prefetch_tensor_map(a);
    prefetch_tensor_map(b);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      initialise(&storage.full[stage]);
      initialise(&storage.empty[stage], Config::kConsumerWarps);
    }
  }
  __syncthreads();

  // -- Roles: one thread of warpgroup 0 is the producer; the other warpgroups are consumers --
  if (warpgroup == 0) {
    give_up_registers<Config::kProducerRegisters>();
    if (threadIdx.x == 0) produce_floats(storage, a, b, order);
  } else {
    take_registers<Config::kConsumerRegisters>();
    consume_floats(storage, result, order);
  }
#else
  __trap();
#endif
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
