// Mean and variance in one pass over the elements.
//
// Sums of squares cancel where elements are far from 0 relative to their spread. So a thread sums
// distances d from the mean of the elements that it has folded so far. A chunk of b elements, which
// it has loaded together, changes the mean and the squares of the a elements before it:
//
//     mean    += sum(d) / (a + b)
//     squares += sum(d^2) - sum(d)^2 / (a + b)
//
// The difference cancels little where a is not less than b, as sum(d)^2 is at most b sum(d^2). The
// first chunks, with a < b, are measured from their own mean. These, and the partials of threads
// and blocks, are merged by the formula of Chan, Golub and LeVeque (1979):
//
//     mean    = mean_a + (mean_b - mean_a) b / (a + b)
//     squares = squares_a + squares_b + (mean_b - mean_a)^2 a b / (a + b)
//
// A mean is two numbers: one alone is rounded by as much as its last digit, and of elements like
// 1e6 + x, with x near 1, the square of that would be seen in the variance.
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
  A low;  // what rounding left off the mean
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

// What squares become where they overflow: infinity, or NaN if an element, and so the mean, is
// infinite or NaN.
template <class A>
__device__ inline A squares_of_far_elements(A mean) {
  return is_finite(mean) ? infinity<A>() : std::numeric_limits<A>::quiet_NaN();
}

// Adds `more` to `value`, and sets `low` to what rounding leaves off the sum: exactly if `value` is
// not the smaller one, else with an error of about that of `more`.
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

using JAX_GPUOPS_NAMESPACE::group_reduce;

// group_reduce() of collectives.h for moments, in fewer operations than a merge for each halving of
// the group. Of distances d from the mean of the group's first lane, with weights w = count_i /
// count, and what is left of them, e = d - sum(w d):
//
//     mean    = first mean + sum(w d) + sum(w e)
//     squares = sum(squares_i + count_i e^2) - count sum(w e)^2
//
// sum(w e) is no more than what rounding left off sum(w d), so the difference loses nothing.
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
  // The same for all lanes of a group, and no matter of the warp's other groups.
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
    const bool is_early = count_ < kCount;  // fewer elements than the chunk's came before
    const A shift = is_early ? middle(value, takes_part, taken) : mean_;
    constexpr int kSums = kCount < 4 ? kCount : 4;  // each addition to one waits for the last
    A sums[kSums] = {};
    A squares[kSums] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const A distance = takes_part(i) ? value[i] - shift : A(0);
      sums[i % kSums] += distance;
      squares[i % kSums] += distance * distance;
    }
    const A sum = tree<Add>(sums);
    const A square = tree<Add>(squares);
    count_ += static_cast<std::uint32_t>(taken);
    const A count = static_cast<A>(count_);
    const A before = count - static_cast<A>(taken);
    const A each = fast_reciprocal(count);
    if (!is_finite(square)) {
      mean_ = before == 0 ? A(0) : mean_ * (before * each);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (takes_part(i)) mean_ += value[i] * each;
      }
      low_ = 0;
      squares_ = {squares_of_far_elements(mean_), 0};
      return;
    }
    if (is_early) {
      Moments<A> all{shift, 0, 0, static_cast<A>(taken)};
      const A own = sum * fast_reciprocal(all.count);
      all.squares = square - sum * own;
      add_exactly(own, all.mean, all.low);
      if (before != 0) all = MergeMoments{}({mean_, low_, squares_.value(), before}, all);
      mean_ = all.mean;
      low_ = all.low;
      squares_ = {all.squares, 0};
      return;
    }
    // The distances are from mean_ alone: the sums from mean_ + low_ follow.
    const A rest = sum - static_cast<A>(taken) * low_;
    const A step = rest * each;
    squares_.add((square - low_ * (sum + rest)) - rest * step);
    add_exactly(low_ + step, mean_, low_);
  }

  __device__ Moments<A> value() const {
    return {mean_, low_, squares_.value(), static_cast<A>(count_)};
  }

 private:
  // About the mean of a chunk, to measure distances from; of equal elements exactly their value.
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
