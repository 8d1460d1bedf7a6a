// What all softmax kernels share: where a row lies, and what is written once its maximum and sum
// are known.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/cuda.h"
#include "core/numeric.h"
#include "core/vector.h"
#include "softmax/softmax.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

template <class A>
__device__ inline bool is_finite(A x) {
  return x - x == A(0);
}

// The rows of a Problem as a kernel sees them. Offsets are 64-bit: an array may have more than
// 2^32 elements, and so may a row.
struct Rows {
  std::int64_t count;
  std::int64_t columns;
  std::int64_t inner;

  __device__ std::int64_t begin(std::int64_t row) const {
    return inner == 1 ? row * columns : (row / inner) * columns * inner + row % inner;
  }
};

// LogSumExps with types.
template <class T>
struct RowResults {
  using A = Accumulator<T>;
  T* logsumexp;
  A* maximum;
  A* log_sum;

  __device__ void write(std::int64_t row, A lse) const {
    if (logsumexp != nullptr) logsumexp[row] = narrow<T>(lse);
  }

  __device__ bool has_parts() const { return log_sum != nullptr; }
  // largest, log_of_sum: the parts, if the row is regular.
  __device__ void write_parts(std::int64_t row, A lse, bool regular, A largest,
                              A log_of_sum) const {
    maximum[row] = regular ? largest : A(0);
    log_sum[row] = regular ? log_of_sum : lse;
  }
};

template <class T>
RowResults<T> make_row_results(const LogSumExps& logsumexps) {
  using A = Accumulator<T>;
  return {static_cast<T*>(logsumexps.result), static_cast<A*>(logsumexps.maximum),
          static_cast<A*>(logsumexps.log_sum)};
}

// Walks a row with `threads` threads: in packs where its elements are neighbours, else one by one.
// Calls visit(column, Width<w>{}); the element of `column` is row[column * rows.inner].
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

// Stores a pack where `to` allows it, else its elements: x and y need not have the same phase.
template <int kSize, class T>
__device__ inline void store_any(const Accumulator<T> (&from)[kSize], T* to) {
  if (is_aligned<kSize>(to)) {
    store<kSize>(from, to);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) to[i] = narrow<T>(from[i]);
  }
}

// Results of 16 bits need no better exponential than the hardware's.
template <class T>
__device__ inline Accumulator<T> exponential_for(Accumulator<T> x) {
  if constexpr (sizeof(T) == 2) {
    return fast_exponential(x);
  } else {
    return exponential(x);
  }
}

// What is subtracted before exponentials are taken. softmax of a row whose maximum is infinite is
// NaN, and inf - inf says so. logsumexp of it is that maximum, which subtracting 0 leaves.
template <Function kFunction, class A>
__device__ inline A shift(A maximum) {
  if constexpr (kFunction == Function::kLogSumExp) {
    return is_finite(maximum) ? maximum : A(0);
  } else {
    return maximum;
  }
}

// The step from x - shift to the result of a row with the given sum of exponentials.
template <Function kFunction, class T>
struct Finish {
  using A = Accumulator<T>;
  A parameter;

  __device__ explicit Finish(A sum)
      : parameter(kFunction == Function::kSoftmax ? A(1) / sum : A(log(sum))) {}

  __device__ A operator()(A shifted) const {
    if constexpr (kFunction == Function::kSoftmax) {
      return exponential_for<T>(shifted) * parameter;
    } else {
      return shifted - parameter;
    }
  }
};

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
