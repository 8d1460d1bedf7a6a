// How tensor_core adds c: result = activation(sum + bias) + beta c.
//
// c has the layout of the result. In persistent_kernel each thread loads the elements for its own
// sums, in pairs of 16 bits, panel by panel while the tile is multiplied. Their registers are those
// in which results wait to be written, and are free once the previous tile's results have been
// written.
#pragma once

#include <cstdint>

#include "core/collectives.h"
#include "core/cuda.h"
#include "core/vector.h"
#include "matmul/epilogue.cuh"
#include "matmul/hopper/stages.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// The epilogue of a launch with c.
struct FinishAndAdd : Finish {
  const void* c;  // may be null in turned_kernel
  int rows;       // of a matrix of the batch
  float beta;
};

inline FinishAndAdd finish_and_add_of(const Problem& problem, const Buffers& buffers) {
  return {finish_of(problem, buffers), buffers.c, static_cast<int>(problem.m),
          static_cast<float>(buffers.beta)};
}

// Loads c for panel `panel` of a tile, a constant once the caller's loop is unrolled: word i is for
// sums 2 i and 2 i + 1. Elements beyond the last row and column are 0.
template <class Config>
__device__ __forceinline__ void load_addend(
    const FinishAndAdd& finish, const TilePosition& at, int consumer, int panel,
    std::uint32_t (&words)[Config::kWaves][Config::kWords]) {
  using Result = typename Config::Result;
  constexpr int kPerWave = Config::kResultCols / Config::kPanelCols;
  const int wave = panel / kPerWave;
  const int first = panel % kPerWave;
  const int col = at.col + first * Config::kPanelCols + static_cast<int>(threadIdx.x) % 4 * 2;
  const int left = static_cast<int>(finish.cols) - col;
  const auto load = [&](const auto& read) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = at.row + row_of_sums<Config>(consumer, wave) + 8 * half;
      const Result* const from = static_cast<const Result*>(finish.c) +
                                 (std::int64_t{at.matrix} * finish.rows + row) * finish.cols + col;
      const int in_row = row < finish.rows ? left : 0;
#pragma unroll
      for (int eight = 0; eight < Config::kPanelCols / 8; ++eight) {
        const int e = 8 * eight;
        words[wave][(first * Config::kPanelCols / 8 + eight) * 2 + half] =
            e < in_row ? read(from + e, in_row - e) : 0;
      }
    }
  };
  if (finish.cols % 2 == 0) {  // pairs are aligned, and do not straddle an edge
    load([](const Result* from, int) { return read_pack<2>(from).reg[0]; });
  } else {
    load([](const Result* from, int count) {
      return pair_of(from[0], count > 1 ? from[1] : Result{});
    });
  }
}

// Adds beta times the loaded elements to a consumer's sums.
template <class Config>
__device__ __forceinline__ void add_addend(
    float (&sums)[Config::kWaves][Config::kSums],
    const std::uint32_t (&words)[Config::kWaves][Config::kWords], float beta) {
#pragma unroll
  for (int wave = 0; wave < Config::kWaves; ++wave) {
#pragma unroll
    for (int i = 0; i < Config::kResultSums / 2; ++i) {
      const auto pair = __builtin_bit_cast(Pack<typename Config::Result, 2>, words[wave][i]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& sum = sums[wave][2 * i + j];
        sum = fmaf(beta, widen(pair.element[j]), sum);
      }
    }
  }
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
