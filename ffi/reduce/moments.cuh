// Mean and variance in one pass over the elements.
//
// Sums of squares cancel if elements are far from 0 relative to their spread. So a thread sums the
// distances d of its n elements from an origin near them:
//
//     mean    = origin + sum(d) / n
//     squares = sum(d^2) - sum(d)^2 / n
//
// The origin is the mean of the first chunk of elements, which the thread loads together. Then the
// difference cancels little: if the origin is the mean of a of the n elements, sum(d)^2 is at most
// (n - a) sum(d^2), so the difference is at least sum(d^2) a / n. If a thread has many elements,
// the origin moves to their mean every few chunks:
//
//     squares += step^2 n - 2 step sum(d)
//     sum(d)  -= step n
//
// The partials of threads and blocks are merged by the formula of Chan, Golub and LeVeque (1979):
//
//     mean    = mean_a + (mean_b - mean_a) b / (a + b)
//     squares = squares_a + squares_b + (mean_b - mean_a)^2 a b / (a + b)
//
// A mean is the sum of two numbers: a single number has a rounding error, whose square would show
// in the variance of elements like 1e6 + x, with x near 1.
#pragma once

#include <cstdint>
#include <limits>

#include "core/collectives.h"
#include "core/cuda.h"
#include "core/numeric.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

// The number of some elements, their mean, and the sum of their squared distances from it.
template <class A>
struct Moments {
  A mean;
  A low;  // the low-order part of the mean, lost when `mean` is rounded
  A squares;
  A count;
};

template <class A>
__device__ inline Moments<A> shuffle_xor(Moments<A> value, int distance) {
  return {__shfl_xor_sync(kFullWarp, value.mean, distance),
          __shfl_xor_sync(kFullWarp, value.low, distance),
          __shfl_xor_sync(kFullWarp, value.squares, distance),
          __shfl_xor_sync(kFullWarp, value.count, distance)};
}

// The value of squares that overflow: infinity, or NaN if an element, and so the mean, is infinite
// or NaN.
template <class A>
__device__ inline A squares_of_far_elements(A mean) {
  return is_finite(mean) ? infinity<A>() : std::numeric_limits<A>::quiet_NaN();
}

// Adds `more` to `value`, and sets `low` to the low-order part of the sum: exactly if `value` is
// not smaller in magnitude, else with an error of about the rounding error of `more`.
template <class A>
__device__ inline void add_exactly(A more, A& value, A& low) {
  const A total = value + more;
  low = more - (total - value);
  value = total;
}

struct MergeMoments {
  template <class A>
  __device__ Moments<A> operator()(Moments<A> a, Moments<A> b) const {
    // The mean of more elements moves less, and so has the smaller rounding error.
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

using JAX_GPUOPS_NAMESPACE::group_reduce;

// group_reduce() of collectives.h for moments, in fewer operations than a merge at each level. With
// the distances d of the lanes' means from that of the group's first lane, weights
// w = count_i / count, and remainders e = d - sum(w d):
//
//     mean    = first mean + sum(w d) + sum(w e)
//     squares = sum(squares_i + count_i e^2) - count sum(w e)^2
//
// sum(w e) is no larger than the rounding error of sum(w d), so the difference does not cancel.
template <class A>
__device__ inline Moments<A> group_reduce(Moments<A> own, MergeMoments merge, int lanes,
                                          int stride = 1) {
  const auto sum = [&](A value) { return group_reduce(value, Add{}, lanes, stride); };
  const int first = static_cast<int>(threadIdx.x) % kWarpSize & ~((lanes - 1) * stride);
  A mean = __shfl_sync(kFullWarp, own.mean, first);
  const bool first_is_empty = __shfl_sync(kFullWarp, own.count, first) == 0;
  const A count = sum(own.count);
  const A weight = own.count * fast_reciprocal(count > 0 ? count : A(1));
  A distance = own.count > 0 ? (own.mean - mean) + own.low : A(0);
  const A step = sum(weight * distance);
  if (own.count > 0) distance -= step;
  const A low = sum(weight * distance);
  const A squares = sum(own.squares + own.count * distance * distance);
  // The same for all lanes of a group, but not for all groups of a warp.
  const bool merges = !is_finite(squares) || (first_is_empty && count > 0);
  if (__any_sync(kFullWarp, merges)) {
    const Moments<A> merged = JAX_GPUOPS_NAMESPACE::group_reduce(own, merge, lanes, stride);
    if (merges) return merged;
  }
  A rest = 0;
  add_exactly(step, mean, rest);
  return {mean, rest + low, squares - count * low * low, count};
}

template <int kLanes, class A>
__device__ inline Moments<A> group_reduce(Moments<A> own, MergeMoments merge) {
  return group_reduce(own, merge, kLanes);
}

// The moments of a thread's elements.
template <class A>
class ElementMoments {
 public:
  template <int kCount>
  __device__ void add(const A (&value)[kCount], std::int64_t, std::int64_t) {
    add_kept(value, ~0u, 0, 0);
  }

  // The same, but ignores elements whose bit in `kept` is clear.
  template <int kCount>
  __device__ void add_kept(const A (&value)[kCount], unsigned kept, std::int64_t, std::int64_t) {
    static_assert(kCount <= 32, "each element has a bit");
    const auto takes_part = [&](int i) { return (kept >> i & 1) != 0; };
    std::uint32_t taken = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) taken += takes_part(i) ? 1 : 0;
    if (taken == 0) return;
    const std::uint32_t count = count_ + taken;
    if (count_ == 0) {
      origin_ = middle(value, takes_part, taken);
    } else if (((count_ ^ count) & kChunksToMove * kCount) != 0) {  // a bit of the count flips
      move_origin();
    }
    constexpr int kSums = kCount < 4 ? kCount : 4;  // each addition waits for the one before it
    A sums[kSums];
    A squares[kSums];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const A distance = takes_part(i) ? value[i] - origin_ : A(0);
      sums[i % kSums] = i < kSums ? distance : sums[i % kSums] + distance;
      squares[i % kSums] = distance * distance + (i < kSums ? A(0) : squares[i % kSums]);
    }
    const A square = tree<Add>(squares);
    if (is_finite(square)) {
      sum_ += tree<Add>(sums);
      squares_.add(square);
    } else {  // the sum may overflow where the mean does not
      const A each = fast_reciprocal(static_cast<A>(count));
      A mean = count_ == 0 ? A(0) : this->mean() * (static_cast<A>(count_) * each);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (takes_part(i)) mean += value[i] * each;
      }
      origin_ = is_finite(mean) ? mean : A(0);
      sum_ = is_finite(mean) ? A(0) : mean;
      squares_ = {squares_of_far_elements(mean), 0};
    }
    count_ = count;
  }

  __device__ Moments<A> value() const {
    const A count = static_cast<A>(count_);
    if (count_ == 0) return {};
    const A step = sum_ * fast_reciprocal(count);
    const A squares = squares_.value();
    if (!is_finite(step) || !is_finite(squares)) return {mean(), 0, squares, count};
    Moments<A> all{origin_, 0, squares - sum_ * step, count};
    add_exactly(step, all.mean, all.low);
    return all;
  }

 private:
  // The origin moves every so many chunks: fewer cost time, and more cost digits.
  static constexpr unsigned kChunksToMove = 8;

  __device__ A mean() const { return origin_ + sum_ * fast_reciprocal(static_cast<A>(count_)); }

  __device__ void move_origin() {
    const A moved = mean();
    if (!is_finite(moved)) return;
    const A step = moved - origin_;
    const A count = static_cast<A>(count_);
    const A change = step * (count * step - 2 * sum_);
    if (!is_finite(change)) return;  // the squares have overflowed, and stay infinite
    squares_.add(change);
    sum_ -= count * step;
    origin_ = moved;
  }

  // About the mean of a chunk, as the origin; exactly their value if all elements are equal.
  template <int kCount, class TakesPart>
  __device__ static A middle(const A (&value)[kCount], const TakesPart& takes_part, int taken) {
    A first = 0;
#pragma unroll
    for (int i = kCount - 1; i >= 0; --i) {
      if (takes_part(i)) first = value[i];
    }
    A sum = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += takes_part(i) ? value[i] - first : A(0);
    return first + sum * fast_reciprocal(static_cast<A>(taken));
  }

  A origin_ = 0;  // distances are from here
  A sum_ = 0;     // of distances
  CompensatedSum<A> squares_;
  std::uint32_t count_ = 0;
};

// The moments of a thread's partials of an earlier launch.
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
