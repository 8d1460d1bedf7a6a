// Mean and variance by distances from an origin that all threads of a row share, and by their
// squares, so that only two sums are left to combine, both at the same time:
//
//     mean    = origin + sum(d) / n
//     squares = sum(d^2) - sum(d)^2 / n
//
// If the origin is farther than a standard deviation from the mean, the difference cancels. Then
// the distances are measured again, from the mean that was found. A third time is never needed: the
// mean of some of the n elements is at most sqrt(n) standard deviations from the mean of all, so
// the rounding error of the mean that was found is a small part of one.
//
// If that mean is not finite, since a sum overflowed or an element is infinite or NaN, the elements
// divided by n are summed instead: that sum is the mean.
#pragma once

#include "core/collectives.h"
#include "core/cuda.h"
#include "core/numeric.h"
#include "reduce/moments.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

// How distances are measured: from an origin, or, if it divides, as the elements divided by n.
template <class A>
struct Measure {
  A scale;  // 1, or 1 / n
  A origin;
  bool divides;

  __device__ __forceinline__ A of(A value) const { return scale * value - origin; }
};

// The sums of some distances and of their squares.
template <class A>
struct Distances {
  A sum;
  A squares;

  __device__ __forceinline__ static Distances of(A distance) {
    return {distance, distance * distance};
  }
  __device__ __forceinline__ void add(A distance) {
    sum += distance;
    squares += distance * distance;
  }
};

template <class A>
__device__ inline Distances<A> shuffle_xor(Distances<A> value, int distance) {
  return {__shfl_xor_sync(kFullWarp, value.sum, distance),
          __shfl_xor_sync(kFullWarp, value.squares, distance)};
}

struct AddDistances {
  template <class A>
  __device__ Distances<A> operator()(Distances<A> a, Distances<A> b) const {
    return {a.sum + b.sum, a.squares + b.squares};
  }
};

// Distances, and how they were measured.
template <class A>
struct Measured {
  Measure<A> by;
  Distances<A> all;
};

// Whether the difference cancels, or a sum overflows, in a row of `parts` parts like this one. If
// that is so for none of the parts of a row, it is not for the row. `each` is 1 / n.
template <class A>
__device__ __forceinline__ bool is_far(const Distances<A>& part, A parts, A each) {
  return !(part.sum * part.sum * (parts * each) <= part.squares / 2 &&
           is_finite(part.squares * parts));
}

// How to measure the distances again.
template <class A>
__device__ __forceinline__ Measure<A> from_mean(const Measured<A>& found, A each) {
  const A mean = found.by.origin + found.all.sum * each;
  if (!is_finite(mean)) return {each, 0, true};
  return {1, mean, false};
}

template <class A>
__device__ __forceinline__ Moments<A> moments_of(const Measured<A>& found, A count, A each) {
  const auto& [sum, squares] = found.all;
  if (found.by.divides) return {sum, 0, squares_of_far_elements(sum), count};
  const A step = sum * each;
  Moments<A> all{found.by.origin, 0, infinity<A>(), count};
  if (is_finite(step)) add_exactly(step, all.mean, all.low);
  if (is_finite(squares)) all.squares = squares - sum * step;
  return all;
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
