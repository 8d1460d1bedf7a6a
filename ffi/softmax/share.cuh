// The share of a row that one thread holds in registers, and what it adds to the row's reduction.
//
// A kernel is written once for all functions: it loads shares, reduces them to states, combines
// the states of all threads on the row however it likes, and has the shares write their results:
//
//     load -> reduce over lanes -> combine warps, blocks ... -> write
//
// Forward functions keep a maximum and a sum of exponentials, those linear in t a single sum.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/collectives.h"
#include "core/numeric.h"
#include "core/ptx/math.cuh"
#include "softmax/row.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// ---- Exponentials ----

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
    // kShort: by short_exponential(), where instructions are what takes the time.
    template <bool kShort = false>
    __device__ __forceinline__ A of(A x) const {
      if constexpr (kBaseTwo) {
        return power_of_two(exponent(x));
      } else if constexpr (kShort) {
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

  // For anchors that are not large.
  __device__ __forceinline__ Powers common_powers(A anchor, A lift) const {
    if constexpr (kBaseTwo) {
      return {factor, fmaf(anchor, 2, -lift), kLn2, true};
    } else {
      return {factor, anchor, 1, true};
    }
  }

  // Of elements of a row with a large anchor those have powers that equal the largest; all others
  // are so far below that theirs are 0, and still are if the largest is brought to 2^20 by a power
  // of two, which rounds nothing. The largest is what the anchor is nearest to.
  __device__ __forceinline__ Powers powers(A anchor, A lift) const {
    if constexpr (kBaseTwo) {
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

template <class T>
struct Total {
  Accumulator<T> sum;

  __device__ static Total none() { return {0}; }
};

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

// ---- Results ----

// softmax of the elements of a row, from its state.
template <class T, bool kShort = false>
struct FreshPowers {
  using A = Accumulator<T>;
  typename Exponents<T>::Powers power;
  A factor;

  FreshPowers() = default;
  __device__ __forceinline__ FreshPowers(MaxSum<T> total, typename Exponents<T>::Powers power)
      : power(power), factor(reciprocal(total.sum)) {}

  __device__ __forceinline__ A operator()(A x) const {
    return power.template of<kShort>(x) * factor;
  }
};

// log_softmax of the elements of a row, from its state. A row that is -inf throughout has the sum 0
// and is NaN, also if it is the scale that makes it so, of which an FMA does not see the product.
template <class T>
struct Logarithms {
  using A = Accumulator<T>;
  typename Exponents<T>::Powers power;
  A logarithm_of_sum;

  Logarithms() = default;
  __device__ __forceinline__ Logarithms(MaxSum<T> total, typename Exponents<T>::Powers power)
      : power(power),
        logarithm_of_sum(total.sum == 0 ? std::numeric_limits<A>::quiet_NaN()
                                        : Exponents<T>::logarithm(total.sum)) {}

  __device__ __forceinline__ A operator()(A x) const {
    if constexpr (Exponents<T>::kBaseTwo) {
      return fmaf(power.exponent(x), power.to_natural, -logarithm_of_sum);
    } else {
      return power.exponent(x) - logarithm_of_sum;
    }
  }
};

template <class T>
struct TangentResult {
  using A = Accumulator<T>;
  A scale;
  A sum;

  __device__ __forceinline__ A softmax(A y, A t) const { return scale * (y * (t - sum)); }
  __device__ __forceinline__ A log_softmax(A y, A t) const {
    return scale * (t - exponential_for<T>(y) * sum);
  }
};

// What there is one of for each row: one thread writes it. Made when the row's elements are on
// their way, for the label, and what it names, to come with them.
template <class State>
class RowResult;

template <class T>
class RowResult<Total<T>> {
 public:
  __device__ __forceinline__ RowResult(const Tensors<T>&, std::int64_t, bool) {}
  template <bool kCommon = false>
  __device__ __forceinline__ void write(const Tensors<T>&, std::int64_t, Total<T>) const {}
};

template <class T>
class RowResult<MaxSum<T>> {
 public:
  using A = Accumulator<T>;

  __device__ __forceinline__ RowResult(const Tensors<T>& tensors, std::int64_t row, bool writes)
      : writes_(writes && tensors.reduces()), target_(std::numeric_limits<A>::quiet_NaN()) {
    if (!writes_ || tensors.loss == nullptr) return;
    const std::int64_t label = tensors.label(row);
    if (label < 0) return;
    const T& target = tensors.x[tensors.rows.begin(row) + label * tensors.rows.inner];
    target_ = widen(target);
  }

  // kCommon: as in Forward.
  template <bool kCommon = false>
  __device__ __forceinline__ void write(const Tensors<T>& tensors, std::int64_t row,
                                        MaxSum<T> total) const {
    if (!writes_) return;
    const Exponents<T> exponents(tensors.function, tensors.scale);
    const A lse = Exponents<T>::logarithm(total.sum) +
                  Exponents<T>::logarithm_of_anchor(exponents.base(total.anchor));
    tensors.row_results.write(row, lse);
    if (!tensors.row_results.has_parts()) return;
    const Logarithms<T> logarithm(total,
                                  kCommon ? exponents.common_powers(total.anchor, exponents.lift())
                                          : exponents.powers(total.anchor, exponents.lift()));
    // Of any number near the largest element the logarithm makes a pair that is right.
    const A largest = exponents.element(total.anchor);
    const bool regular = is_finite(largest * tensors.scale);
    tensors.row_results.write_parts(row, lse, regular, largest, -logarithm(largest));
    if (tensors.loss == nullptr) return;
    // Of a large number and its logsumexp, which is rounded, the difference would mean nothing.
    tensors.loss[row] =
        is_finite(total.anchor) ? -logarithm(target_) : lse - target_ * tensors.scale;
  }

 private:
  bool writes_;
  A target_;
};

template <class T, class State>
__device__ __forceinline__ void write_row(const Tensors<T>& tensors, std::int64_t row,
                                          State total) {
  RowResult<State>(tensors, row, true).write(tensors, row, total);
}

// A row with a large anchor, for the second time, by a function that is called: what it needs is
// not in the way of other rows, of which a short one would take some percent more time. The whole
// warp must call it, each group of `lanes` lanes with a row of its own.
template <class T>
__device__ __noinline__ void redo_row(const Tensors<T>& tensors, std::int64_t number, bool exists,
                                      int lane, int lanes) {
  using A = Accumulator<T>;
  const Exponents<T> exponents(tensors.function, tensors.scale);
  const Selection<T> selection = exists ? Selection<T>(tensors, number) : Selection<T>();
  const std::int64_t begin = exists ? tensors.rows.begin(number) : 0;
  const auto each = [&](auto&& visit) {
    for (std::int64_t column = lane; exists && column < tensors.rows.columns; column += lanes) {
      visit(begin + column * tensors.rows.inner, selection(column));
    }
  };

  A largest = -infinity<A>();
  each([&](std::int64_t at, bool kept) {
    if (kept) largest = fmax(largest, exponents.scaled(widen(tensors.x[at])));
  });
  const A anchor = exponents.anchor(group_reduce(largest, Largest{}, lanes));
  const auto powers = exponents.powers(exponents.base(anchor), exponents.lift());
  CompensatedSum<A> sum;
  each([&](std::int64_t at, bool kept) {
    if (kept) sum.add(powers(widen(tensors.x[at])));
  });
  const MaxSum<T> total{anchor, group_reduce(sum.value(), Add{}, lanes)};
  const auto write = [&](const auto& result, A left_out) {
    each([&](std::int64_t at, bool kept) {
      tensors.y[at] = narrow<T>(kept ? result(widen(tensors.x[at])) : left_out);
    });
  };
  const auto of_total = exponents.powers(anchor, exponents.lift());
  if (tensors.y != nullptr) {
    if (tensors.function == Function::kSoftmax) {
      write(FreshPowers<T>(total, of_total), A(0));
    } else {
      write(Logarithms<T>(total, of_total), -infinity<A>());
    }
  }
  if (lane == 0 && exists) write_row(tensors, number, total);
}

// ---- Shares ----

// widen() for the second time, by other instructions: the compiler would see the same ones and hold
// their results from the first time on, in twice the registers of the elements. `nothing` is 0,
// which only the caller knows.
template <class T, int kPack>
__device__ __forceinline__ void widen_again(RegisterPack<T, kPack> pack, std::uint32_t nothing,
                                            Accumulator<T> (&to)[kPack]) {
  if constexpr (RegisterPack<T, kPack>::kPer != 2) {
    widen(pack, to);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int i = 0; i < kPack / 2; ++i) {
      to[2 * i] = __builtin_bit_cast(float, __byte_perm(pack.reg[i], nothing, 0x1044));
      to[2 * i + 1] = __builtin_bit_cast(float, __byte_perm(pack.reg[i], nothing, 0x3244));
    }
  } else {
#pragma unroll
    for (auto& reg : pack.reg) reg ^= nothing;
    widen(pack, to);
  }
}

// The largest element, or the smallest. NaN loses, and makes the sum NaN later.
template <bool kSmallest, class T, int kPack, int kPacks>
__device__ __forceinline__ Accumulator<T> extreme_of(const RegisterPack<T, kPack> (&x)[kPacks]) {
  RegisterPack<T, kPack> best = x[0];
#pragma unroll
  for (int p = 1; p < kPacks; ++p) best = extreme<kSmallest>(best, x[p]);
  Accumulator<T> value[kPack];
  widen(best, value);
#pragma unroll
  for (int i = 1; i < kPack; ++i) {
    value[0] = kSmallest ? fmin(value[0], value[i]) : fmax(value[0], value[i]);
  }
  return value[0];
}

// How a group of kLanes lanes comes to common numbers.
template <int kLanes>
struct Lanes {
  template <class A>
  __device__ __forceinline__ static A largest(A value) {
    return group_largest<kLanes>(value);
  }
  template <class A>
  __device__ __forceinline__ static A sum(A value) {
    return group_reduce<kLanes>(value, Add{});
  }
};

// With which a thread keeps the powers of 16-bit elements where there are many rows.
inline constexpr int kPacksOfPowers = 2;

// Powers are kept, if these are what the results are made of, in place of wide elements or beside
// 16-bit ones. It takes three instructions more to take the power of a 16-bit element again, and
// half the registers: what a thread with many packs does.
// kOneFunction: softmax alone. It takes two thirds of the code away, of which each kernel's first
// threads wait for every instruction.
// kPlain: the scale is 1, and so float32 needs no products.
template <class T, int kPacks, Kind kKind_, bool kOneFunction = false, bool kPlain = false>
class Forward {
 public:
  using Element = T;
  using A = Accumulator<T>;
  using State = MaxSum<T>;
  static constexpr Kind kKind = kKind_;
  static constexpr bool kHasRowResults = !kOneFunction;
  static constexpr int kOperands = 1;
  static constexpr int kHeld = kPacks;
  static constexpr int kPack = kWidestPack<T>;
  using Packs = Stretch<T, kKind>;

  __device__ __forceinline__ static const T* operand(const Tensors<T>& tensors, int) {
    return tensors.x;
  }

  __device__ __forceinline__ void load(const Tensors<T>& tensors, const Packs& stretch) {
    load<Packs::kAsksOnce>(tensors, stretch, tensors.x + stretch.begin());
  }

  // With the packs from copies of a warp's packs of each operand, one behind the other.
  // kOnce: whether to ask once if all are there, here and below.
  template <bool kOnce>
  __device__ __forceinline__ void load(const Tensors<T>& tensors, const Packs& stretch,
                                       const T* x) {
    const T fill = narrow<T>(tensors.scale < 0 ? infinity<A>() : -infinity<A>());
    stretch.template read<kOnce>(tensors, tensors.x, x, fill, x_);
  }

  // The state of the group of kLanes lanes.
  // kCommon: the caller does rows with large anchors again.
  template <int kLanes, bool kCommon = false>
  __device__ __forceinline__ State reduce(const Tensors<T>& tensors) {
    return reduce<kCommon>(tensors, Lanes<kLanes>{});
  }
  template <bool kCommon = false, class Group>
  __device__ __forceinline__ State reduce(const Tensors<T>& tensors, const Group& group) {
    const auto exponents = exponents_of(tensors);
    const A extremum = exponents.descends() ? extreme_of<true>(x_) : extreme_of<false>(x_);
    anchor_ = exponents.anchor(group.largest(exponents.scaled(extremum)));
    const A base = exponents.base(anchor_);
    const auto powers = kCommon ? exponents.common_powers(base, exponents.lift())
                                : exponents.powers(base, exponents.lift());
    const A sum = kKeepsPowers && function(tensors) == Function::kSoftmax
                      ? sum_of_powers<kKeepsPowers>(powers)
                      : sum_of_powers<false>(powers);
    return {anchor_, group.sum(sum)};
  }

  // After reduce(), of which `total` is the result if kWhole.
  template <bool kWhole = false, bool kCommon = false>
  __device__ __forceinline__ void write(const Tensors<T>& tensors, const Packs& stretch,
                                        State total) const {
    if (kKeepsPowers && function(tensors) == Function::kSoftmax) {
      A factor = reciprocal(total.sum);
      if constexpr (!kWhole) factor *= Exponents<T>::rescaling(anchor_, total.anchor);
      const auto results = [&](int p, A(&x)[kPack]) {
        const RegisterPack<A, kPack> powers = powers_at(p);
#pragma unroll
        for (int i = 0; i < kPack; ++i) x[i] = powers.reg[i] * factor;
      };
      write_each<Packs::kAsksOnce>(tensors, stretch, is_finite(factor), A(0), results);
    } else {
      write_fresh<Packs::kAsksOnce, kCommon>(tensors, stretch, total);
    }
  }

  // Without reduce(), for packs that were read again.
  template <bool kOnce = Packs::kAsksOnce, bool kCommon = false>
  __device__ __forceinline__ void write_fresh(const Tensors<T>& tensors, const Packs& stretch,
                                              State total) const {
    const auto exponents = exponents_of(tensors);
    const bool regular = is_finite(total.anchor) && is_finite(total.sum);
    // Without base(): softmax of a row that is -inf throughout is NaN.
    const auto powers = kCommon ? exponents.common_powers(total.anchor, exponents.lift())
                                : exponents.powers(total.anchor, exponents.lift());
    if (function(tensors) == Function::kSoftmax) {
      const FreshPowers<T> power(total, powers);
      write_each<kOnce>(tensors, stretch, regular, A(0), results_of(tensors, power));
    } else {
      const Logarithms<T> logarithm(total, powers);
      const auto results = results_of(tensors, logarithm);
      write_each<kOnce>(tensors, stretch, regular, -infinity<A>(), results);
    }
  }

 private:
  __device__ __forceinline__ static Function function(const Tensors<T>& tensors) {
    return kOneFunction ? Function::kSoftmax : tensors.function;
  }
  __device__ __forceinline__ static Exponents<T> exponents_of(const Tensors<T>& tensors) {
    return {function(tensors), tensors.scale, kPlain};
  }

  static constexpr bool kWide = std::is_same_v<T, A>;
  static constexpr bool kKeepsPowers = kWide || kPacks == kPacksOfPowers || kKind == Kind::kSmall;

  template <bool kKeep>
  __device__ __forceinline__ A sum_of_powers(const typename Exponents<T>::Powers& power_of) {
    A sum = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      A x[kPack];
      widen(x_[p], x);
      A pack_sum = 0;
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const A power = power_of(x[i]);
        if constexpr (kKeep && kWide) x_[p].reg[i] = power;
        if constexpr (kKeep && !kWide) powers_[p].reg[i] = power;
        pack_sum += power;
      }
      sum += pack_sum;
    }
    return sum;
  }

  __device__ __forceinline__ RegisterPack<A, kPack> powers_at(int p) const {
    if constexpr (kWide) {
      return pack_at(x_, p);
    } else {
      return pack_at(powers_, p);
    }
  }

  // Results that are made of the elements.
  template <class Result>
  __device__ __forceinline__ auto results_of(const Tensors<T>& tensors,
                                             const Result& result) const {
    return [this, &tensors, &result](int p, A(&x)[kPack]) {
      widen_again(pack_at(x_, p), tensors.nothing(), x);
#pragma unroll
      for (int i = 0; i < kPack; ++i) x[i] = result(x[i]);
    };
  }

  // Elements that do not take part are -inf, of which everything finite makes what their results
  // shall be; where the row's state is not, they need to be told from others.
  template <bool kOnce, class Results>
  __device__ __forceinline__ void write_each(const Tensors<T>& tensors, const Packs& stretch,
                                             bool regular, A left_out, Results&& results) const {
    const auto pack_of = [&](int p) {
      A x[kPack];
      results(p, x);
      return narrow<T>(x);
    };
    if (kHasMask<kKind> && !regular) {
      stretch.template write_rolled<kPacks>(tensors, [&](int p) {
        RegisterPack<T, kPack> pack = pack_of(p);
        stretch.replace_unkept(tensors, p, narrow<T>(left_out), pack);
        return pack;
      });
    } else {
      stretch.template write<kPacks, kOnce>(tensors, pack_of);
    }
  }

  RegisterPack<T, kPack> x_[kPacks];
  RegisterPack<A, kPack> powers_[kKeepsPowers && !kWide ? kPacks : 1];
  A anchor_;
};

template <class T, int kPacks, Kind kKind>
using Softmax = Forward<T, kPacks, kKind, true>;
template <class T, int kPacks, Kind kKind>
using PlainSoftmax = Forward<T, kPacks, kKind, true, true>;

// Writes what a function has of results, for elements and for the row. A share of one function that
// has none for the row does not look for them.
// kWhole: `total` is the share's own state. kCommon: as in Forward.
template <bool kWhole = false, bool kCommon = false, class Share>
__device__ __forceinline__ void write_results(const Share& share,
                                              const Tensors<typename Share::Element>& tensors,
                                              std::int64_t number,
                                              const typename Share::Packs& stretch,
                                              typename Share::State total,
                                              const RowResult<typename Share::State>& row_result) {
  if constexpr (Share::kHasRowResults) {
    if (tensors.y != nullptr) share.template write<kWhole, kCommon>(tensors, stretch, total);
    row_result.template write<kCommon>(tensors, number, total);
  } else {
    share.template write<kWhole, kCommon>(tensors, stretch, total);
  }
}

// kPacks counts those of both operands.
template <class T, int kPacks, Kind kKind_>
class Tangent {
 public:
  using Element = T;
  using A = Accumulator<T>;
  using State = Total<T>;
  static constexpr Kind kKind = kKind_;
  static constexpr bool kHasRowResults = false;
  static constexpr int kOperands = 2;
  static constexpr int kHeld = kPacks > 1 ? kPacks / 2 : 1;
  static constexpr int kPack = kWidestPack<T>;
  using Packs = Stretch<T, kKind>;

  __device__ __forceinline__ static const T* operand(const Tensors<T>& tensors, int number) {
    return number == 0 ? tensors.x : tensors.t;
  }

  __device__ __forceinline__ void load(const Tensors<T>& tensors, const Packs& stretch) {
    const T* const t = tensors.t + stretch.begin();
    load<Packs::kAsksOnce>(tensors, stretch, tensors.x + stretch.begin(), t);
  }

  template <bool kOnce>
  __device__ __forceinline__ void load(const Tensors<T>& tensors, const Packs& stretch,
                                       const T* copies) {
    load<kOnce>(tensors, stretch, copies, copies + kWarpSize * kHeld * kPack);
  }

  template <int kLanes, bool kCommon = false>
  __device__ __forceinline__ State reduce(const Tensors<T>& tensors) {
    return reduce(tensors, Lanes<kLanes>{});
  }
  template <class Group>
  __device__ __forceinline__ State reduce(const Tensors<T>& tensors, const Group& group) {
    const bool logarithm = tensors.function == Function::kLogSoftmaxCotangent;
    return {group.sum(logarithm ? sum_of<true>() : sum_of<false>())};
  }

  template <bool kWhole = false, bool kCommon = false>
  __device__ __forceinline__ void write(const Tensors<T>& tensors, const Packs& stretch,
                                        State total) const {
    write_fresh(tensors, stretch, total);
  }

  template <bool kOnce = Packs::kAsksOnce>
  __device__ __forceinline__ void write_fresh(const Tensors<T>& tensors, const Packs& stretch,
                                              State total) const {
    const TangentResult<T> result{tensors.scale, total.sum};
    if (tensors.function == Function::kSoftmaxTangent) {
      write_each<kOnce>(tensors, stretch, total, [&](A y, A t) { return result.softmax(y, t); });
    } else {
      write_each<kOnce>(tensors, stretch, total,
                        [&](A y, A t) { return result.log_softmax(y, t); });
    }
  }

 private:
  template <bool kLogarithm>
  __device__ __forceinline__ A sum_of() const {
    A sum = 0;
#pragma unroll
    for (int p = 0; p < kHeld; ++p) {
      A y[kPack];
      A t[kPack];
      widen(y_[p], y);
      widen(t_[p], t);
      A pack_sum = 0;
#pragma unroll
      for (int i = 0; i < kPack; ++i) pack_sum += kLogarithm ? t[i] : y[i] * t[i];
      sum += pack_sum;
    }
    return sum;
  }

  template <bool kOnce>
  __device__ __forceinline__ void load(const Tensors<T>& tensors, const Packs& stretch, const T* y,
                                       const T* t) {
    const bool logarithm = tensors.function == Function::kLogSoftmaxCotangent;
    const T fill = narrow<T>(logarithm ? -infinity<A>() : A(0));
    stretch.template read<kOnce>(tensors, tensors.x, y, fill, y_);
    stretch.template read<kOnce>(tensors, tensors.t, t, narrow<T>(A(0)), t_);
  }

  template <bool kOnce, class Result>
  __device__ __forceinline__ void write_each(const Tensors<T>& tensors, const Packs& stretch,
                                             State total, Result&& result) const {
    stretch.template write<kHeld, kOnce>(tensors, [&](int p) {
      A y[kPack];
      A t[kPack];
      widen_again(pack_at(y_, p), tensors.nothing(), y);
      widen_again(pack_at(t_, p), tensors.nothing(), t);
#pragma unroll
      for (int i = 0; i < kPack; ++i) y[i] = result(y[i], t[i]);
      RegisterPack<T, kPack> pack = narrow<T>(y);
      if constexpr (kHasMask<kKind>) {
        // Elsewhere, y and t of 0, or y of -inf, make 0 of what does not take part.
        if (!is_finite(total.sum)) stretch.replace_unkept(tensors, p, narrow<T>(A(0)), pack);
      }
      return pack;
    });
  }

  RegisterPack<T, kPack> y_[kHeld];
  RegisterPack<T, kPack> t_[kHeld];
};

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
