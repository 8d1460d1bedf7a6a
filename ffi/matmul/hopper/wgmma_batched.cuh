// matmul, algorithm `wgmma_batched`: batches of small products on Hopper's tensor cores.
//
// A small product takes little longer than its factors and its result are on their way. So a block
// computes one tile of 64 x 64 and ends, and a multiprocessor has several blocks, which wait at
// different times:
//
//     block 0    copy | multiply | write
//     block 1      copy | multiply | write
//     block 2        copy | multiply | write
//
// A block is one warpgroup. One of its threads copies slices of the factors, 128 bytes deep, into
// stages: at the beginning as many as there are stages, and then each of the others when a stage
// has been multiplied.
//
// Results pass through shared memory, to be written by the threads in whole lines, the 64 columns
// of a row, by words of 16, 4 or 2 bytes. Tensor copies of results would first have to fetch their
// map.
//
// A bias and an activation are chosen at run time: a block branches once.
//
// The leading dimensions of the factors are multiples of 16 bytes, as tensor copies require, and
// the depth is at least 1.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/collectives.h"
#include "core/cuda.h"
#include "core/integer.h"
#include "core/ptx/math.cuh"
#include "core/ptx/mbarrier.cuh"
#include "core/ptx/tensor_copy.cuh"
#include "core/ptx/warpgroup.cuh"
#include "core/ptx/wgmma.cuh"
#include "core/shared.h"
#include "matmul/epilogue.cuh"
#include "matmul/hopper/stages.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template <class Factor_, bool kDeepA_, bool kDeepB_>
struct WgmmaBatched {
  using Factor = Factor_;
  // Whether k is the contiguous dimension of a (stored m x k) and of b (stored n x k).
  static constexpr bool kDeepA = kDeepA_;
  static constexpr bool kDeepB = kDeepB_;
  static constexpr int kTile = kWgmmaBatchedTile;
  static constexpr int kWaves = kTile / kProductRows;
  static constexpr int kSums = kTile / 2;
  static constexpr int kABytes = kTile * kLineBytes;
  static constexpr int kStageBytes = 2 * kABytes;
  static_assert(kWaves == 1 && sizeof(Factor) == 2);
  static_assert(kTile * kTile * sizeof(float) <= kStageBytes, "a stage has room for the results");
};

// Begins at a multiple of kAtomBytes in shared memory: the swizzle depends on the address. It is
// followed by the stages, each with a's slice and then b's, and later, in their place, by the
// results.
struct alignas(kAtomBytes) WgmmaBatchedStorage {
  Mbarrier full[kMostWgmmaBatchedStages];
  float bias[kWgmmaBatchedTile];  // of the tile's columns

  __device__ unsigned char* stages() { return reinterpret_cast<unsigned char*>(this + 1); }
};
static_assert(sizeof(WgmmaBatchedStorage) == kAtomBytes);

struct WgmmaBatchedTiles {
  Divisor rows;  // of tiles
  Divisor cols;
  int steps;
  int stages;
  int a_batch_stride;  // 1, or 0 if the batch shares the factor
  int b_batch_stride;
};

struct WgmmaBatchedResult {
  void* data;
  bool is_float;  // else of the factors' type
  int rows;
  int cols;
  int word_bytes;  // 16, 4 or 2, of which all rows are multiples
};

// Neighbouring blocks share columns of b in the L2 cache.
__device__ __forceinline__ TilePosition locate(const WgmmaBatchedTiles& tiles, unsigned tile) {
  const Division row = tiles.rows.divide(tile);
  const Division col = tiles.cols.divide(row.quotient);
  return {static_cast<int>(row.remainder) * kWgmmaBatchedTile,
          static_cast<int>(col.remainder) * kWgmmaBatchedTile, static_cast<int>(col.quotient)};
}

// ---- Results ----

// Adds the bias of the tile's columns to the sums, and applies the activation, exactly enough for
// results of 16 bits.
template <class Config>
__device__ __forceinline__ void finish_tile(float (&sums)[Config::kSums], const float* bias,
                                            EpilogueOp op) {
  const int col = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int i = 0; i < Config::kSums; i += 4) {
    const float2 pair = *reinterpret_cast<const float2*>(bias + i * 2 + col);
    sums[i] += pair.x;
    sums[i + 1] += pair.y;
    sums[i + 2] += pair.x;
    sums[i + 3] += pair.y;
  }
  dispatch_activation(op, [&](auto constant) {
#pragma unroll
    for (float& sum : sums) sum = activated<decltype(constant)::value, /*kFast=*/true>(sum);
  });
}

// The place of a byte in line `line` of the results. Pieces of 16 bytes are swizzled: those of
// eight lines are in different banks.
template <int kBytes>
__device__ __forceinline__ unsigned char* place_in_line(unsigned char* lines, int line, int byte) {
  return lines + line * kBytes + (byte / 16 ^ line % 8) * 16 + byte % 16;
}

// Fills the warp's rows of the results in shared memory with its sums.
template <class Config>
__device__ __forceinline__ void fill_floats(const float (&sums)[Config::kSums],
                                            unsigned char* lines) {
  constexpr int kBytes = Config::kTile * static_cast<int>(sizeof(float));
  const int row = row_of_sums<Config>(0, 0);
  const int col = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int i = 0; i < Config::kSums; i += 2) {
    const int byte = (i / 4 * 8 + col) * static_cast<int>(sizeof(float));
    *reinterpret_cast<float2*>(place_in_line<kBytes>(lines, row + i % 4 / 2 * 8, byte)) =
        make_float2(sums[i], sums[i + 1]);
  }
}

// The same, rounded to 16 bits.
template <class Config>
__device__ __forceinline__ void fill_rounded(const float (&sums)[Config::kSums],
                                             unsigned char* lines) {
  using T = typename Config::Factor;
  // Lane i gives the address of row i % 8 of matrix i / 8. The matrices are rows 0 to 7 and 8 to 15
  // of eight columns, then of the next eight.
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int row = static_cast<int>(threadIdx.x) / kWarpSize * 16 + lane % 16;
  const unsigned line = shared_address(lines + row * kLineBytes);
#pragma unroll
  for (int piece = 0; piece < 8; piece += 2) {
    const auto word = [&](int i) {
      const int s = 4 * piece + 2 * i;
      return round_to_pair<T>(sums[s], sums[s + 1]);
    };
    store_matrices</*kTransposed=*/false>(line + ((piece + lane / 16) ^ (row % 8)) * 16, word(0),
                                          word(1), word(2), word(3));
  }
}

// Writes the warp's rows of results of kBytes bytes, by words of kWordBytes. Single results of 16
// bits are read in pairs.
template <int kBytes, int kWordBytes>
__device__ __forceinline__ void write_lines(unsigned char* lines, const WgmmaBatchedResult& result,
                                            const TilePosition& at) {
  using Word = std::conditional_t<kWordBytes == 16, uint4, std::uint32_t>;
  constexpr int kRowBytes = kWgmmaBatchedTile * kBytes;
  constexpr int kReadBytes = sizeof(Word);
  constexpr int kLanes = kRowBytes / kReadBytes < kWarpSize ? kRowBytes / kReadBytes : kWarpSize;
  constexpr int kRowsAtOnce = kWarpSize / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int first_row = static_cast<int>(threadIdx.x) / kWarpSize * 16;
  const int end = min(first_row + 16, result.rows - at.row);
  const int left = (result.cols - at.col) * kBytes;
  int row = first_row + lane / kLanes;
  const std::int64_t step = std::int64_t{result.cols} * kBytes;
  unsigned char* to = static_cast<unsigned char*>(result.data) +
                      (std::int64_t{at.matrix} * result.rows + at.row + row) * step +
                      at.col * kBytes;
#pragma unroll 4
  for (; row < end; row += kRowsAtOnce, to += kRowsAtOnce * step) {
#pragma unroll
    for (int first = 0; first < kRowBytes; first += kLanes * kReadBytes) {
      const int byte = first + lane % kLanes * kReadBytes;
      const Word word = *reinterpret_cast<const Word*>(place_in_line<kRowBytes>(lines, row, byte));
      if constexpr (kWordBytes > 2) {
        if (byte < left) *reinterpret_cast<Word*>(to + byte) = word;
      } else {
        auto* const pair = reinterpret_cast<std::uint16_t*>(to + byte);
        if (byte < left) pair[0] = static_cast<std::uint16_t>(word);
        if (byte + 2 < left) pair[1] = static_cast<std::uint16_t>(word >> 16);
      }
    }
  }
}

// ---- The kernel ----

template <class Config>
__global__ void __launch_bounds__(kWarpgroupThreads, kResidentWgmmaBatched)
    wgmma_batched_kernel(const __grid_constant__ FactorMaps a, const __grid_constant__ FactorMaps b,
                         const __grid_constant__ WgmmaBatchedResult result,
                         const __grid_constant__ WgmmaBatchedTiles tiles,
                         const __grid_constant__ Finish finish) {
#if JAX_GPUOPS_HAS_WGMMA
  constexpr bool kDeepA = Config::kDeepA;
  constexpr bool kDeepB = Config::kDeepB;
  constexpr int kTile = Config::kTile;
  unsigned char* const memory = shared_array<unsigned char>();
  const unsigned past_atom = shared_address(memory) % kAtomBytes;
  auto& storage =
      *reinterpret_cast<WgmmaBatchedStorage*>(memory + (kAtomBytes - past_atom) % kAtomBytes);
  unsigned char* const stages = storage.stages();
  const TilePosition at = locate(tiles, blockIdx.x);
  const bool finishes = finish.bias != nullptr || finish.op != EpilogueOp::kNone;

  // -- Copies --
  const auto copy = [&](int step, int stage) {
    Mbarrier* const full = &storage.full[stage];
    unsigned char* const to = stages + stage * Config::kStageBytes;
    const int k = step * kStageDepth<typename Config::Factor>;
    announce(full, slice_bytes<kDeepA, kTile>(a, at.row) + slice_bytes<kDeepB, kTile>(b, at.col));
    copy_slice<kDeepA, kTile, 1>(to, a, at.row, k, at.matrix * tiles.a_batch_stride, full, 0, 0);
    copy_slice<kDeepB, kTile, 1>(to + Config::kABytes, b, at.col, k,
                                 at.matrix * tiles.b_batch_stride, full, 0, 0);
  };
  // The other threads use the mbarriers only after the barrier.
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < tiles.stages; ++stage) {
      initialise(&storage.full[stage]);
      copy(stage, stage);
    }
  } else if (finishes && threadIdx.x >= kTile) {  // warps that do not wait for thread 0
    const int col = static_cast<int>(threadIdx.x) - kTile;
    storage.bias[col] = bias_of<typename Config::Factor>(finish, at.matrix, at.col + col);
  }
  __syncthreads();

  // -- Products --
  float sums[1][Config::kSums];
  const std::uint64_t first_a = matrix_descriptor<kDeepA>(stages);
  const std::uint64_t first_b = matrix_descriptor<kDeepB>(stages + Config::kABytes);
  int stage = 0;
  unsigned phase = 0;
#pragma unroll 1
  for (int step = 0; step < tiles.steps; ++step) {
    wait(&storage.full[stage], phase);
    const int offset = stage * (Config::kStageBytes / 16);
    multiply_stage<Config>(sums, first_a + offset, first_b + offset, step > 0);
    wait_for_products<0>();
    if (step + tiles.stages < tiles.steps) {
      __syncthreads();  // no warp multiplies the stage any more
      if (threadIdx.x == 0) copy(step + tiles.stages, stage);
    }
    if (++stage == tiles.stages) {
      stage = 0;
      phase ^= 1;
    }
  }
  hold(sums[0]);

  // -- Results --
  if (finishes) finish_tile<Config>(sums[0], storage.bias, finish.op);
  __syncthreads();  // no warp multiplies any stage any more
  if (result.is_float) {
    fill_floats<Config>(sums[0], stages);
  } else {
    fill_rounded<Config>(sums[0], stages);
  }
  __syncwarp();
  if (result.is_float) {
    if (result.word_bytes == 16) return write_lines<4, 16>(stages, result, at);
    return write_lines<4, 4>(stages, result, at);
  }
  if (result.word_bytes == 16) return write_lines<2, 16>(stages, result, at);
  if (result.word_bytes == 4) return write_lines<2, 4>(stages, result, at);
  write_lines<2, 2>(stages, result, at);
#else
  __trap();
#endif
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
