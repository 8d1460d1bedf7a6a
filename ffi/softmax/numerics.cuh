// The numerics of row reductions: exponentials relative to an anchor, the state of a part of a row,
// and how the states of parts are combined.
#pragma once

#include <cstdint>
#include <limits>

#include "core/collectives.h"
#include "core/cuda.h"
#include "core/numeric.h"
#include "core/ptx/math.cuh"
#include "core/vector.h"
#include "softmax/softmax.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// For 16-bit results, the hardware's approximate exponential is accurate enough.
template <class T>
__device__ inline Accumulator<T> exponential_for(Accumulator<T> x) {
  if constexpr (sizeof(T) == 2) {
    return fast_exponential(x);
  } else {
    return exponential(x);
  }
}

// ---- Exponentials ----

// Which anchors a kernel's code supports: all, or only those that are not large. In the latter case
// the kernel recomputes rows with large anchors (redo.cuh).
enum class Anchors { kAny, kNotLarge };

// exp() at full accuracy, or with fewer instructions where the kernel is bound by them.
enum class Exponential { kExact, kShort };

// How exponentials are computed for results of type T. They are taken of the difference between an
// element and an anchor, which is at least the largest element, up to rounding.
//
// 16-bit results use powers of two: one FMA multiplies x by scale * log2(e) and subtracts the
// anchor. The rounding error of the anchor is common to all elements of a row, so everything that
// is combined must use the same anchor: states hold anchors, not maxima. Anchors are half of the
// exponent, so that an anchor is infinite only where scale * x is. The hardware flushes subnormal
// powers to 0. For softmax, where a bfloat16 result may be subnormal, all powers are multiplied by
// 2^64 (the lift), which the division by their sum cancels; its anchors are integers, so that
// adding the lift is exact.
//
// Wider results take exp of the rounded difference. The product with the scale is rounded first, as
// in JAX: for large numbers, the difference computed by an FMA would be the error of that rounding.
// Kernels that recompute rows of large numbers use the FMA in their first attempt.
template <class T>
struct Exponents {
  using A = Accumulator<T>;
  static constexpr bool kBaseTwo = sizeof(T) == 2;
  static constexpr float kLog2E = 1.44269504088896341f;
  static constexpr float kLn2 = 0.693147180559945309f;
  static constexpr float kLift = 64;

  Function function;
  A factor;  // from elements to exponents
  bool is_plain;

  // is_plain: the scale is 1, and the product is exact.
  __device__ __forceinline__ Exponents(Function function, A scale, bool is_plain = false)
      : function(function), factor(kBaseTwo ? A(scale * kLog2E) : scale), is_plain(is_plain) {}

  // Whether the smallest element has the largest power.
  __device__ __forceinline__ bool descends() const { return !is_plain && factor < 0; }

  // The anchor of an element, before anchor() is applied.
  __device__ __forceinline__ A scaled(A element) const {
    if constexpr (kBaseTwo) {
      return element * (factor / 2);
    } else {
      return rounded_product(element, factor);
    }
  }

  // The element that an anchor was computed from: exact for 16-bit elements, up to rounding for
  // others, and NaN or 0 if the factor's reciprocal is not a normal number.
  __device__ __forceinline__ A element(A anchor) const {
    if constexpr (kBaseTwo) {
      return widen(narrow<T>(anchor * reciprocal(factor / 2)));
    } else {
      return factor == 1 ? anchor : anchor * reciprocal(factor);
    }
  }

  __device__ __forceinline__ A anchor(A largest) const {
    if constexpr (kBaseTwo) {
      if (function == Function::kSoftmax) return ceilf(largest);
    }
    return largest;
  }

  // The number to subtract: the anchor, unless an infinite one would produce a wrong NaN. A part of
  // a row whose elements are all -inf adds nothing to the other parts. softmax of a row that
  // contains inf is NaN, which inf - inf gives; logsumexp of such a row is inf, which subtracting 0
  // preserves.
  __device__ __forceinline__ A base(A anchor) const {
    if (anchor == -infinity<A>()) return A(0);
    const bool one_a_row = function == Function::kLogSumExp || function == Function::kCrossEntropy;
    return one_a_row && anchor == infinity<A>() ? A(0) : anchor;
  }

  // What is added to all exponents.
  __device__ __forceinline__ A lift() const {
    return kBaseTwo && function == Function::kSoftmax ? A(kLift) : A(0);
  }

  // Powers of elements relative to an anchor.
  struct Powers {
    A factor;
    A subtrahend;
    A to_natural;  // factor from exponents to natural logarithms
    bool fuses;    // computes the product and the difference in one FMA

    __device__ __forceinline__ A exponent(A x) const {
      return fuses ? A(fma(x, factor, -subtrahend)) : rounded_product(x, factor) - subtrahend;
    }
    template <Exponential kExponential = Exponential::kExact>
    __device__ __forceinline__ A of(A x) const {
      if constexpr (kBaseTwo) {
        return power_of_two(exponent(x));
      } else if constexpr (kExponential == Exponential::kShort) {
        return short_exponential(exponent(x));
      } else {
        return exponential(exponent(x));
      }
    }
    __device__ __forceinline__ A operator()(A x) const { return of(x); }
  };

  // Whether the rounding error of the anchor makes an FMA's result off by more than 2^3, so that
  // powers may come near 2^100. Kernels need not be fast for such rows.
  static constexpr A kLarge = A(16) / std::numeric_limits<A>::epsilon();
  __device__ __forceinline__ bool is_large(A anchor) const {
    const bool rounds = kBaseTwo || factor != 1;
    return rounds && fabs(anchor) >= kLarge && fabs(anchor) < infinity<A>();
  }

  // In a row with a large anchor, only elements equal to the largest have powers other than 0. That
  // remains so if the elements are scaled by a power of two, which is exact, such that the largest
  // is about 2^20. The largest element is the one nearest to the anchor.
  template <Anchors kAnchors = Anchors::kAny>
  __device__ __forceinline__ Powers powers(A anchor, A lift) const {
    if constexpr (kAnchors == Anchors::kNotLarge) {
      return common_powers(anchor, lift);
    } else if constexpr (kBaseTwo) {
      if (is_large(anchor)) {
        const float largest = widen(narrow<T>(anchor / (factor / 2)));
        const int biased = __builtin_bit_cast(int, largest) >> 23 & 255;
        const auto down = __builtin_bit_cast(float, (127 + 20 - (biased - 127)) << 23);
        const float to_exponent = copysignf(down, factor);
        return {to_exponent, largest * to_exponent - lift, factor / to_exponent * kLn2, true};
      }
      return common_powers(anchor, lift);
    } else {
      return {factor, anchor, 1, is_plain};
    }
  }

  // For the sum of a part of a row.
  template <Anchors kAnchors = Anchors::kAny>
  __device__ __forceinline__ Powers powers_of_part(A anchor) const {
    return powers<kAnchors>(base(anchor), lift());
  }
  // For the results of a row. base() is not applied: softmax of a row whose elements are all -inf
  // is NaN.
  template <Anchors kAnchors = Anchors::kAny>
  __device__ __forceinline__ Powers powers_of_row(A anchor) const {
    return powers<kAnchors>(anchor, lift());
  }

  // The factor from powers relative to one anchor to powers relative to another; 0 from -inf.
  __device__ __forceinline__ static A rescaling(A from, A to) {
    if constexpr (kBaseTwo) {
      return power_of_two(2 * (from - to));
    } else {
      return exponential(from - to);
    }
  }

  // The natural logarithm of a number, and of the power that an anchor represents.
  __device__ __forceinline__ static A logarithm(A number) {
    return kBaseTwo ? A(log2f(number) * kLn2) : A(log(number));
  }
  __device__ __forceinline__ static A logarithm_of_anchor(A anchor) {
    return kBaseTwo ? A(anchor * (2 * kLn2)) : anchor;
  }

 private:
  // For anchors that are not large.
  __device__ __forceinline__ Powers common_powers(A anchor, A lift) const {
    if constexpr (kBaseTwo) {
      return {factor, fmaf(anchor, 2, -lift), kLn2, true};
    } else {
      return {factor, anchor, 1, true};
    }
  }
};

// ---- States ----

// An anchor, and the sum of the powers of the elements relative to it. A part of a row whose
// elements are all -inf has the anchor -inf and the sum 0.
template <class T>
struct MaxSum {
  using A = Accumulator<T>;
  A anchor;
  A sum;

  __device__ static MaxSum none() { return {-infinity<A>(), A(0)}; }

  __device__ __forceinline__ A sum_at(const Exponents<T>& exponents, A other) const {
    return sum * Exponents<T>::rescaling(anchor, exponents.base(other));
  }
};

template <class T>
__device__ __forceinline__ MaxSum<T> combined(const Exponents<T>& exponents, MaxSum<T> a,
                                              MaxSum<T> b) {
  const auto anchor = fmax(a.anchor, b.anchor);
  return {anchor, a.sum_at(exponents, anchor) + b.sum_at(exponents, anchor)};
}

// All kLanes lanes of each group get the group's state; the whole warp must call it.
template <int kLanes, class T>
__device__ __forceinline__ MaxSum<T> combine_lanes(const Exponents<T>& exponents, MaxSum<T> state) {
  using A = Accumulator<T>;
  const A anchor = group_reduce<kLanes>(state.anchor, Largest{});
  return {anchor, group_reduce<kLanes>(state.sum_at(exponents, anchor), Add{})};
}

template <class T>
__device__ __forceinline__ MaxSum<T> shuffle_xor(MaxSum<T> state, int distance) {
  return {__shfl_xor_sync(kFullWarp, state.anchor, distance),
          __shfl_xor_sync(kFullWarp, state.sum, distance)};
}

// Whether all finite elements of the row have finite results. If not, results of elements that do
// not take part are written separately.
template <class T>
__device__ __forceinline__ bool is_regular(MaxSum<T> total) {
  return is_finite(total.anchor) && is_finite(total.sum);
}

template <class T>
struct Total {
  Accumulator<T> sum;

  __device__ static Total none() { return {0}; }
};

template <class T>
__device__ __forceinline__ bool is_regular(Total<T> total) {
  return is_finite(total.sum);
}

template <class T>
__device__ __forceinline__ Total<T> combined(const Exponents<T>&, Total<T> a, Total<T> b) {
  return {a.sum + b.sum};
}

template <int kLanes, class T>
__device__ __forceinline__ Total<T> combine_lanes(const Exponents<T>&, Total<T> state) {
  return {group_reduce<kLanes>(state.sum, Add{})};
}

template <class T>
__device__ __forceinline__ Total<T> shuffle_xor(Total<T> state, int distance) {
  return {__shfl_xor_sync(kFullWarp, state.sum, distance)};
}

// Accumulates any number of states with a compensated sum, which does not lose small ones.
template <class State>
class Running;

template <class T>
class Running<MaxSum<T>> {
 public:
  using A = Accumulator<T>;

  __device__ __forceinline__ void add(const Exponents<T>& exponents, MaxSum<T> state) {
    const A anchor = fmax(anchor_, state.anchor);
    const A factor = Exponents<T>::rescaling(anchor_, exponents.base(anchor));
    sum_.sum *= factor;
    sum_.error *= factor;
    sum_.add(state.sum_at(exponents, anchor));
    anchor_ = anchor;
  }

  __device__ MaxSum<T> value() const { return {anchor_, sum_.value()}; }

 private:
  A anchor_ = -infinity<A>();
  CompensatedSum<A> sum_;
};

template <class T>
class Running<Total<T>> {
 public:
  __device__ __forceinline__ void add(const Exponents<T>&, Total<T> state) { sum_.add(state.sum); }
  __device__ Total<T> value() const { return {sum_.value()}; }

 private:
  CompensatedSum<Accumulator<T>> sum_;
};

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
