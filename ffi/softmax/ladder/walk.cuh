// How the threads of the ladder's kernels loop over a row.
#pragma once

#include <cstdint>

#include "core/cuda.h"
#include "core/vector.h"
#include "softmax/row.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// Loops over a row with `threads` threads: in packs if its elements are contiguous, else one by
// one. Calls visit(column, Width<w>{}); the element of `column` is row[column * rows.inner].
template <int kPack, class T, class Visit>
__device__ inline void visit_columns(const Rows& rows, const T* row, int thread, int threads,
                                     Visit&& visit) {
  if (rows.inner == 1) {
    visit_packed<kPack>(row, rows.columns, thread, threads, visit);
  } else {
    for (std::int64_t column = thread; column < rows.columns; column += threads) {
      visit(column, Width<1>{});
    }
  }
}

// Stores a pack if `to` is aligned, else its elements one by one: x and y need not have the same
// phase.
template <int kSize, class T>
__device__ inline void store_any(const Accumulator<T> (&from)[kSize], T* to) {
  if (is_aligned<kSize>(to)) {
    store<kSize>(from, to);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) to[i] = narrow<T>(from[i]);
  }
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
