// Ladder, steps 2 to 4: `one_warp_one_row`, `one_warp_two_rows`, `one_warp_four_rows`, and with
// kPack = 4 each of them as `..._float4`.
//
// A block is one warp, divided among kRows rows, so that short rows leave fewer lanes idle. The
// lanes of a row reduce with __shfl_down_sync and get the result with __shfl_sync: registers
// instead of shared memory, and no barrier. The float4 versions move four elements per instruction.
//
//     kRows = 2:   lanes 0 .. 15 -> row 2 b      lanes 16 .. 31 -> row 2 b + 1
#pragma once

#include "core/collectives.h"
#include "softmax/ladder/walk.cuh"
#include "softmax/launcher.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// Combines the values of a row's kLanes lanes towards its first lane, then hands the result to all.
template <int kLanes, class A, class Combine>
__device__ A shuffle_reduce(A value, Combine combine) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_down_sync(kFullWarp, value, distance, kLanes));
  }
  return __shfl_sync(kFullWarp, value, 0, kLanes);
}

template <class T, int kRows, int kPack>
__global__ void __launch_bounds__(kWarpSize)
    one_warp_kernel(const T* __restrict__ x, T* __restrict__ y, Rows rows) {
  using A = Accumulator<T>;
  constexpr int kLanes = kWarpSize / kRows;
  const int lane = threadIdx.x % kLanes;

  for (std::int64_t first = std::int64_t{blockIdx.x} * kRows; first < rows.count;
       first += std::int64_t{gridDim.x} * kRows) {
    // The last warp may have lanes without a row. They have no columns but take part in the
    // shuffles, whose masks name the whole warp.
    const std::int64_t row = first + threadIdx.x / kLanes;
    Rows mine = rows;
    if (row >= rows.count) mine.columns = 0;
    const std::int64_t begin = row < rows.count ? rows.begin(row) : 0;
    const T* const source = x + begin;
    T* const target = y + begin;

    A largest = -infinity<A>();
    visit_columns<kPack>(mine, source, lane, kLanes, [&](std::int64_t column, auto width) {
      constexpr int kWidth = width;
      A value[kWidth];
      load<kWidth>(source + column * rows.inner, value);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) largest = fmax(largest, value[i]);
    });
    largest = shuffle_reduce<kLanes>(largest, Largest{});

    CompensatedSum<A> partial;
    visit_columns<kPack>(mine, source, lane, kLanes, [&](std::int64_t column, auto width) {
      constexpr int kWidth = width;
      A value[kWidth];
      load<kWidth>(source + column * rows.inner, value);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) partial.add(fast_exponential(value[i] - largest));
    });
    const A sum = shuffle_reduce<kLanes>(partial.value(), Add{});

    visit_columns<kPack>(mine, source, lane, kLanes, [&](std::int64_t column, auto width) {
      constexpr int kWidth = width;
      A value[kWidth];
      load<kWidth>(source + column * rows.inner, value);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) value[i] = fast_exponential(value[i] - largest) / sum;
      store_any<kWidth>(value, target + column * rows.inner);
    });
  }
}

template <class T>
void launch_one_warp(const Call& call) {
  dispatch_value<1, 2, 4>(call.config.rows, [&](auto rows) {
    dispatch_value<1, 4>(call.config.pack, [&](auto pack) {
      launch_kernel<one_warp_kernel<T, rows, pack>>(
          call.queue, launch_shape(call), static_cast<const T*>(call.buffers.x),
          static_cast<T*>(call.buffers.y), rows_of(call.problem));
    });
  });
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
