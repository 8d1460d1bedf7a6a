// The numbers that rows are reduced to: exponentials relative to an anchor, the state of a part of
// a row, and how the states of parts are combined.
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

// Results of 16 bits need no better exponential than the hardware's.
template <class T>
__device__ inline Accumulator<T> exponential_for(Accumulator<T> x) {
  if constexpr (sizeof(T) == 2) {
    return fast_exponential(x);
  } else {
    return exponential(x);
  }
}

// ---- Exponentials ----

// Which anchors a kernel's code takes: all, or those that are not large. A kernel of the latter
// sort does rows with large anchors again (redo.cuh).
enum class Anchors { kAny, kNotLarge };

// exp() as exact as it gets, or with fewer instructions where these are what takes the time.
enum class Exponential { kExact, kShort };

// How exponentials are taken for results of type T, of differences to an anchor, which is at least
// the largest element but for rounding.
//
// Results of 16 bits use powers of two: x is multiplied by scale and log2(e), which an FMA does on
// the way to its difference. What the anchor's rounding is off by, all elements of a row have in
// common, so it must be the same number in all that is combined: states hold anchors, not maxima.
// Anchors count two powers as one, so that none of a finite number is infinite. The hardware
// flushes subnormal powers to 0. For softmax, where a bfloat16 result may be subnormal, all powers
// are lifted by 2^64, which the division by their sum undoes; its anchors are whole numbers, for
// the lift to round nothing.
//
// Wider results take exp of the rounded difference. The product with the scale is rounded before,
// as in JAX: of large numbers, an FMA's difference would be what that rounding was off by. Kernels
// that do rows of large numbers again leave the product to the FMA at first.
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

  // Whether it is the smallest element that has the largest power.
  __device__ __forceinline__ bool descends() const { return !is_plain && factor < 0; }

  // An anchor from an element, but for anchor().
  __device__ __forceinline__ A scaled(A element) const {
    if constexpr (kBaseTwo) {
      return element * (factor / 2);
    } else {
      return rounded_product(element, factor);
    }
  }

  // The element that an anchor was made from: exactly that of 16 bits, others but for some
  // roundings, and NaN or 0 where the factor's reciprocal is no normal number.
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

  // What is subtracted: the anchor, but never an infinity that would make a part of a row NaN that
  // is not. A part that is -inf throughout adds nothing to the others. inf - inf says that softmax
  // of a row with inf in it is NaN; logsumexp of such a row is inf, which subtracting 0 leaves.
  __device__ __forceinline__ A base(A anchor) const {
    if (anchor == -infinity<A>()) return A(0);
    const bool one_a_row = function == Function::kLogSumExp || function == Function::kCrossEntropy;
    return one_a_row && anchor == infinity<A>() ? A(0) : anchor;
  }

  // By which all exponents are higher.
  __device__ __forceinline__ A lift() const {
    return kBaseTwo && function == Function::kSoftmax ? A(kLift) : A(0);
  }

  // Powers of elements relative to an anchor.
  struct Powers {
    A factor;
    A subtrahend;
    A to_natural;  // from exponents
    bool fuses;    // the product and the difference

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

  // Whether an FMA is off by more than 2^3, for what the anchor was rounded by, where 2^100 is not
  // far. Kernels need not be fast for such rows.
  static constexpr A kLarge = A(16) / std::numeric_limits<A>::epsilon();
  __device__ __forceinline__ bool is_large(A anchor) const {
    const bool rounds = kBaseTwo || factor != 1;
    return rounds && fabs(anchor) >= kLarge && fabs(anchor) < infinity<A>();
  }

  // Of elements of a row with a large anchor those have powers that equal the largest; all others
  // are so far below that theirs are 0, and still are if the largest is brought to 2^20 by a power
  // of two, which rounds nothing. The largest is what the anchor is nearest to.
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
  // For the results of a row. Without base(): softmax of a row that is -inf throughout is NaN.
  template <Anchors kAnchors = Anchors::kAny>
  __device__ __forceinline__ Powers powers_of_row(A anchor) const {
    return powers<kAnchors>(anchor, lift());
  }

  // From powers relative to one anchor to those relative to another; 0 from -inf.
  __device__ __forceinline__ static A rescaling(A from, A to) {
    if constexpr (kBaseTwo) {
      return power_of_two(2 * (from - to));
    } else {
      return exponential(from - to);
    }
  }

  // The natural logarithm of a number, and of what is meant by an anchor.
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

// An anchor, and the sum of the powers of the elements relative to it. A part of a row that is -inf
// throughout has the anchor -inf and the sum 0.
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

// Whether all finite elements of the row have finite results. Where they have not, results of
// elements that do not take part are written by themselves.
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

// States that come one after the other, however many: the sum does not lose the small ones.
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
