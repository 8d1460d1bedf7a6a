// softmax, algorithm `warp`: a row lives in the registers of a group of lanes.
//
// A group of kLanes lanes, a power of two up to a whole warp, takes one row; lane l holds the packs
// l, l + kLanes, l + 2 kLanes ... so that neighbouring lanes read neighbouring addresses:
//
//     row -> | pack 0: lane 0 | pack 1: lane 1 | ... | pack kLanes: lane 0 | ...
//
// The row is read once and written once, and both reductions are xor shuffles within the group:
// no shared memory and no barrier.
#pragma once

#include "core/collectives.h"
#include "softmax/rows.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

inline constexpr int kWarpBlockThreads = 128;

template <class T, Function kFunction, int kLanes, int kPacks, int kPack>
__global__ void __launch_bounds__(kWarpBlockThreads)
    warp_kernel(const T* __restrict__ x, T* __restrict__ y, Rows rows) {
  using A = Accumulator<T>;
  constexpr int kRowsPerBlock = kWarpBlockThreads / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int row_in_block = threadIdx.x / kLanes;

  // The loop's bounds are those of the block, so that all lanes reach every shuffle.
  for (std::int64_t first = std::int64_t{blockIdx.x} * kRowsPerBlock; first < rows.count;
       first += std::int64_t{gridDim.x} * kRowsPerBlock) {
    const std::int64_t row = first + row_in_block;
    const bool has_row = row < rows.count;
    const std::int64_t begin = has_row ? rows.begin(row) : 0;

    // Load. What lies beyond the row is -inf, which neither maximum nor sum notices.
    A value[kPacks][kPack];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int column = (p * kLanes + lane) * kPack;
      if (has_row && column < rows.columns) {
        if constexpr (kPack == 1) {
          value[p][0] = widen(x[begin + column * rows.inner]);
        } else {
          load<kPack>(x + begin + column, value[p]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kPack; ++i) value[p][i] = -infinity<A>();
      }
    }

    // Reduce.
    A largest = -infinity<A>();
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) largest = fmax(largest, value[p][i]);
    }
    const A base =
        shift<kFunction>(group_reduce<kLanes>(largest, [](A a, A b) { return fmax(a, b); }));
    A sum = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        value[p][i] -= base;
        const A power = exponential_for<T>(value[p][i]);
        if constexpr (kFunction == Function::kSoftmax) value[p][i] = power;
        sum += power;
      }
    }
    sum = group_reduce<kLanes>(sum, Add{});

    // Store.
    if constexpr (kFunction == Function::kLogSumExp) {
      if (has_row && lane == 0) y[row] = narrow<T>(A(log(sum)) + base);
    } else {
      const A parameter = Finish<kFunction, T>(sum).parameter;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int column = (p * kLanes + lane) * kPack;
        if (has_row && column < rows.columns) {
#pragma unroll
          for (int i = 0; i < kPack; ++i) {
            value[p][i] =
                kFunction == Function::kSoftmax ? value[p][i] * parameter : value[p][i] - parameter;
          }
          if constexpr (kPack == 1) {
            y[begin + column * rows.inner] = narrow<T>(value[p][0]);
          } else {
            store<kPack>(value[p], y + begin + column);
          }
        }
      }
    }
  }
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
