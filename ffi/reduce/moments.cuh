// Mean and variance in one pass over the elements.
//
// A sum of squares cancels where elements are far from 0 relative to their spread. So a thread
// makes two passes over the elements that it has loaded together, a chunk, while they are in
// registers: their mean, and the squares of their distances from it. Chunks, and then the partials
// of threads and blocks, are merged by the formula of Chan, Golub and LeVeque (1979), for counts a
// and b:
//
//     mean    = mean_a + (mean_b - mean_a) b / (a + b)
//     squares = squares_a + squares_b + (mean_b - mean_a)^2 a b / (a + b)
//
// A mean alone is rounded by as much as its last digit; of numbers like 1e6 + x, with x near 1, the
// squares of that would be seen in the variance. So there are two numbers for a mean, and chunks
// are summed as distances from the mean so far.
#pragma once

#include <cstdint>
#include <limits>

#include "core/collectives.h"
#include "core/cuda.h"
#include "core/numeric.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

// Elements as their number, their mean and their squared distances from it.
template <class A>
struct Moments {
  A mean;
  A low;      // what rounding left off the mean
  A squares;  // a sum
  A count;
};

template <class A>
__device__ inline Moments<A> shuffle_xor(Moments<A> value, int distance) {
  return {__shfl_xor_sync(kFullWarp, value.mean, distance),
          __shfl_xor_sync(kFullWarp, value.low, distance),
          __shfl_xor_sync(kFullWarp, value.squares, distance),
          __shfl_xor_sync(kFullWarp, value.count, distance)};
}

template <class A>
__device__ inline bool is_finite(A value) {
  return value - value == 0;
}

// The squares of elements with this mean where the differences of some overflow: the squares do so,
// too. Where an element is infinite or NaN, so is the mean, and the squares are NaN.
template <class A>
__device__ inline A squares_of_far_elements(A mean) {
  return is_finite(mean) ? infinity<A>() : std::numeric_limits<A>::quiet_NaN();
}

// The value and what it lacks become value + more, as exactly as `more`.
template <class A>
__device__ inline void add_exactly(A more, A& value, A& low) {
  const A total = value + more;
  low = more - (total - value);
  value = total;
}

struct MergeMoments {
  template <class A>
  __device__ Moments<A> operator()(Moments<A> a, Moments<A> b) const {
    // From many elements to few the mean moves least, and is rounded least.
    if (a.count < b.count) {
      const Moments<A> fewer = a;
      a = b;
      b = fewer;
    }
    if (b.count == 0) return a;
    const A count = a.count + b.count;
    const A weight = b.count * fast_reciprocal(count);
    const A delta = (b.mean - a.mean) + (b.low - a.low);
    if (!is_finite(delta)) {
      const A mean = a.mean * (1 - weight) + b.mean * weight;
      return {mean, 0, squares_of_far_elements(mean), count};
    }
    const A step = delta * weight;
    const A squares = a.squares + (b.squares + step * a.count * delta);
    add_exactly(a.low + step, a.mean, a.low);
    return {a.mean, a.low, squares, count};
  }
};

// What a thread makes of elements.
template <class A>
class ElementMoments {
 public:
  template <int kCount>
  __device__ void add(const A (&value)[kCount], std::int64_t, std::int64_t) {
    add_kept(value, ~0u, 0, 0);
  }

  // The same, but of elements without a bit in `kept` none takes part.
  template <int kCount>
  __device__ void add_kept(const A (&value)[kCount], unsigned kept, std::int64_t, std::int64_t) {
    static_assert(kCount <= 32, "each element has a bit");
    const auto takes_part = [&](int i) { return (kept >> i & 1) != 0; };
    int taken = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) taken += takes_part(i) ? 1 : 0;
    if (taken == 0) return;
    if (count_ == 0) {
#pragma unroll
      for (int i = kCount - 1; i >= 0; --i) {
        if (takes_part(i)) mean_ = value[i];
      }
    }
    constexpr int kSums = kCount < 4 ? kCount : 4;  // each addition to one waits for the last
    A distance[kCount];
    A sums[kSums] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      distance[i] = takes_part(i) ? value[i] - mean_ : A(0);
      sums[i % kSums] += distance[i];
    }
    const A part = taken == kCount ? A(1) / kCount : fast_reciprocal(static_cast<A>(taken));
    const A chunk_mean = tree<Add>(sums) * part;
    count_ += static_cast<std::uint32_t>(taken);
    const A count = static_cast<A>(count_);
    const A before = count - static_cast<A>(taken);
    const A each = fast_reciprocal(count);
    if (!is_finite(chunk_mean)) {
      mean_ = before == 0 ? A(0) : mean_ * (before * each);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (takes_part(i)) mean_ += value[i] * each;
      }
      low_ = 0;
      squares_ = {squares_of_far_elements(mean_), 0};
      return;
    }
    A squares[kSums] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const A rest = takes_part(i) ? distance[i] - chunk_mean : A(0);
      squares[i % kSums] += rest * rest;
    }
    const A delta = chunk_mean - low_;
    const A step = delta * (static_cast<A>(taken) * each);
    squares_.add(tree<Add>(squares) + step * before * delta);
    add_exactly(low_ + step, mean_, low_);
  }

  __device__ Moments<A> value() const {
    return {mean_, low_, squares_.value(), static_cast<A>(count_)};
  }

 private:
  A mean_ = 0;
  A low_ = 0;
  CompensatedSum<A> squares_;
  std::uint32_t count_ = 0;
};

// What a thread makes of the partials of an earlier launch.
template <class A>
class PartialMoments {
 public:
  template <int kCount>
  __device__ void add(const Moments<A> (&value)[kCount], std::int64_t, std::int64_t) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) all_ = MergeMoments{}(all_, value[i]);
  }

  __device__ Moments<A> value() const { return all_; }

 private:
  Moments<A> all_{};
};

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
