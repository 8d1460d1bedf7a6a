// The fragment of a row that one thread holds in registers, and what it adds to the row's
// reduction.
//
// A kernel is written once for all functions: it loads fragments, reduces them to states, combines
// the states of all threads on the row however it likes, and has the fragments write their results:
//
//     load -> reduce over lanes -> combine warps, blocks ... -> write
//
// Forward functions keep a maximum and a sum of exponentials, functions that are linear in t a
// single sum. functions.cuh defines them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/collectives.h"
#include "core/numeric.h"
#include "core/vector.h"
#include "softmax/functions.cuh"
#include "softmax/row.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// widen() with other instructions, for the second use of a pack: otherwise the compiler would keep
// the results of the first widen(), which take twice the registers of the elements. `nothing` is 0,
// which the compiler cannot know.
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

enum class Extreme { kLargest, kSmallest };

// The largest element, or the smallest. NaN is ignored here, and makes the sum NaN later.
template <Extreme kExtreme, class T, int kPack, int kPacks>
__device__ __forceinline__ Accumulator<T> extreme_of(const RegisterPack<T, kPack> (&x)[kPacks]) {
  constexpr bool kSmallest = kExtreme == Extreme::kSmallest;
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

// Reductions over a group of kLanes lanes.
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

// Whether the total from which results are computed is the state of several fragments combined, or
// of the writing fragment alone.
enum class Totals { kCombined, kOwn };

// What a fragment has after its reduction: what write() needs, or the elements, for write_fresh().
enum class Keep { kForWrite, kElements };

// Whether a thread keeps the powers of 16-bit elements if it holds this many packs and there are
// many rows. For rows with masks, only for the counts that `warp` alone uses: blocks have no
// registers for them.
template <RowLayout kLayout>
constexpr bool keeps_powers_of(int packs) {
  return packs == 2 ||
         (kLayout == RowLayout::kMaskedUnaligned && (packs == 1 || packs == 3 || packs == 5));
}

// The type in which an element is held: one that is loaded separately takes a whole register, so it
// is held widened.
template <class T, RowLayout kLayout>
using Held = std::conditional_t<kLayout == RowLayout::kElements, Accumulator<T>, T>;

// Writes a thread's packs of results. In a row that is not regular, those of elements that do not
// take part are `left_out`.
template <int kPacks, bool kOnce, class T, RowLayout kLayout, class PackOf>
__device__ __forceinline__ void write_packs(const KernelArgs<T>& args,
                                            const ThreadSlice<T, kLayout>& slice, bool is_regular,
                                            Accumulator<T> left_out, const PackOf& pack_of) {
  if (kHasMask<kLayout> && !is_regular) {
    slice.template write_rolled<kPacks>(args, [&](int p) {
      auto pack = pack_of(p);
      slice.replace_unkept(args, p, narrow<T>(left_out), pack);
      return pack;
    });
  } else {
    slice.template write<kPacks, kOnce>(args, pack_of);
  }
}

// If results are computed from the powers, these are kept, in place of wide elements or beside
// 16-bit ones. Threads with many packs recompute the powers of 16-bit elements, which takes three
// more instructions but half the registers. The variant for softmax alone removes two thirds of the
// code; the first threads of a kernel wait for every instruction to be fetched. In the variant for
// plain softmax, float32 needs no products.
template <class T, int kPacks, RowLayout kLayout_, Variant kVariant>
class ForwardFragment {
 public:
  using Element = T;
  using A = Accumulator<T>;
  using State = MaxSum<T>;
  static constexpr RowLayout kLayout = kLayout_;
  static constexpr bool kHasRowResults = kVariant == Variant::kGeneral;
  static constexpr int kOperands = 1;
  static constexpr int kHeld = kPacks;
  static constexpr int kPack = kPackOf<T, kLayout>;
  using Slice = ThreadSlice<T, kLayout>;

  __device__ __forceinline__ static const T* operand(const KernelArgs<T>& args, int) {
    return args.x;
  }

  __device__ __forceinline__ void load(const KernelArgs<T>& args, const Slice& slice) {
    load<Slice::kAsksOnce>(args, slice, args.x + slice.begin());
  }

  // Loads the packs from a copy, in which a warp's packs of each operand are contiguous. kOnce:
  // whether to test first if all packs are there, as in ThreadSlice::read().
  template <bool kOnce>
  __device__ __forceinline__ void load(const KernelArgs<T>& args, const Slice& slice, const T* x) {
    const T fill = narrow<T>(ForwardFunctions::fill(args));
    if constexpr (std::is_same_v<Held<T, kLayout>, T>) {
      slice.template read<kOnce>(args, Slice::operand(args.x, x, fill, x_));
    } else {
      RegisterPack<T, kPack> read[kPacks];
      slice.template read<kOnce>(args, Slice::operand(args.x, x, fill, read));
#pragma unroll
      for (int p = 0; p < kPacks; ++p) x_[p].reg[0] = widen(read[p].reg[0]);
    }
  }

  // The state of the group of kLanes lanes.
  template <int kLanes, Anchors kAnchors = Anchors::kAny, Keep kKeep = Keep::kForWrite>
  __device__ __forceinline__ State reduce(const KernelArgs<T>& args) {
    return reduce<kAnchors, kKeep>(args, Lanes<kLanes>{});
  }
  template <Anchors kAnchors = Anchors::kAny, Keep kKeep = Keep::kForWrite, class Group>
  __device__ __forceinline__ State reduce(const KernelArgs<T>& args, const Group& group) {
    const auto exponents = exponents_of(args);
    const A extremum = exponents.descends() ? extreme_of<Extreme::kSmallest>(x_)
                                            : extreme_of<Extreme::kLargest>(x_);
    anchor_ = exponents.anchor(group.largest(exponents.scaled(extremum)));
    const auto powers = exponents.template powers_of_part<kAnchors>(anchor_);
    constexpr bool kMayKeepPowers = kKeepsPowers && kKeep == Keep::kForWrite;
    const A sum = kMayKeepPowers && function(args) == Function::kSoftmax
                      ? sum_of_powers<kMayKeepPowers>(powers)
                      : sum_of_powers<false>(powers);
    return {anchor_, group.sum(sum)};
  }

  // After reduce(), from the state of the row.
  template <Totals kTotals = Totals::kCombined, Anchors kAnchors = Anchors::kAny>
  __device__ __forceinline__ void write(const KernelArgs<T>& args, const Slice& slice,
                                        State total) const {
    if (kKeepsPowers && function(args) == Function::kSoftmax) {
      A factor = reciprocal(total.sum);
      if constexpr (kTotals == Totals::kCombined) {
        factor *= Exponents<T>::rescaling(anchor_, total.anchor);
      }
      const auto results = [&](int p, A(&x)[kPack]) {
        const RegisterPack<A, kPack> powers = powers_at(p);
#pragma unroll
        for (int i = 0; i < kPack; ++i) x[i] = powers.reg[i] * factor;
      };
      write_each<Slice::kAsksOnce>(args, slice, is_finite(factor), Softmax<T>::left_out(), results);
    } else {
      write_fresh<Slice::kAsksOnce, kAnchors>(args, slice, total);
    }
  }

  // Without reduce(), for packs that were read again.
  template <bool kOnce = Slice::kAsksOnce, Anchors kAnchors = Anchors::kAny>
  __device__ __forceinline__ void write_fresh(const KernelArgs<T>& args, const Slice& slice,
                                              State total) const {
    const auto exponents = exponents_of(args);
    const bool regular = is_finite(total.anchor) && is_finite(total.sum);
    const auto powers = exponents.template powers_of_row<kAnchors>(total.anchor);
    // Written out instead of using ForwardFunctions::dispatch(), left_out() and is_regular(): with
    // those the compiler spills registers for two-pass rows of bfloat16.
    if (function(args) == Function::kSoftmax) {
      const Softmax<T> power(total, powers);
      write_each<kOnce>(args, slice, regular, A(0), results_of(args, power));
    } else {
      const LogSoftmax<T> logarithm(total, powers);
      const auto results = results_of(args, logarithm);
      write_each<kOnce>(args, slice, regular, -infinity<A>(), results);
    }
  }

 private:
  __device__ __forceinline__ static Function function(const KernelArgs<T>& args) {
    return kVariant == Variant::kGeneral ? args.function : Function::kSoftmax;
  }
  __device__ __forceinline__ static Exponents<T> exponents_of(const KernelArgs<T>& args) {
    return {function(args), args.scale, kVariant == Variant::kPlainSoftmax};
  }

  static constexpr bool kWide = std::is_same_v<Held<T, kLayout>, A>;
  static constexpr bool kKeepsPowers =
      kWide || keeps_powers_of<kLayout>(kPacks) || kLayout == RowLayout::kSmall;

  // If kKeepPowers, they replace the elements or are kept beside them.
  template <bool kKeepPowers>
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
        if constexpr (kKeepPowers && kWide) x_[p].reg[i] = power;
        if constexpr (kKeepPowers && !kWide) powers_[p].reg[i] = power;
        pack_sum = i == 0 ? power : pack_sum + power;
      }
      sum = p == 0 ? pack_sum : sum + pack_sum;
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

  // Results that are computed from the elements.
  template <class Result>
  __device__ __forceinline__ auto results_of(const KernelArgs<T>& args,
                                             const Result& result) const {
    return [this, &args, &result](int p, A(&x)[kPack]) {
      widen_again(pack_at(x_, p), args.nothing(), x);
#pragma unroll
      for (int i = 0; i < kPack; ++i) x[i] = result(x[i]);
    };
  }

  template <bool kOnce, class Results>
  __device__ __forceinline__ void write_each(const KernelArgs<T>& args, const Slice& slice,
                                             bool regular, A left_out, Results&& results) const {
    write_packs<kPacks, kOnce>(args, slice, regular, left_out, [&](int p) {
      A x[kPack];
      results(p, x);
      return narrow<T>(x);
    });
  }

  RegisterPack<Held<T, kLayout>, kPack> x_[kPacks];
  RegisterPack<A, kPack> powers_[kKeepsPowers && !kWide ? kPacks : 1];
  A anchor_;
};

// Writes the results of a function for the elements and for the row. Fragments compiled for a
// function without results for the row do not test for them.
template <Totals kTotals = Totals::kCombined, Anchors kAnchors = Anchors::kAny, class Fragment>
__device__ __forceinline__ void write_results(
    const Fragment& fragment, const KernelArgs<typename Fragment::Element>& args,
    std::int64_t number, const typename Fragment::Slice& slice, typename Fragment::State total,
    const RowResult<typename Fragment::State>& row_result) {
  if constexpr (Fragment::kHasRowResults) {
    if (args.y != nullptr) fragment.template write<kTotals, kAnchors>(args, slice, total);
    row_result.template write<kAnchors>(args, number, total);
  } else {
    fragment.template write<kTotals, kAnchors>(args, slice, total);
  }
}

// kPacks counts the packs of both operands together, but for kElements those of each.
template <class T, int kPacks, RowLayout kLayout_>
class TangentFragment {
 public:
  using Element = T;
  using A = Accumulator<T>;
  using State = Total<T>;
  static constexpr RowLayout kLayout = kLayout_;
  static constexpr bool kHasRowResults = false;
  static constexpr int kOperands = 2;
  static constexpr int kHeld = kLayout == RowLayout::kElements ? kPacks
                               : kPacks > 1                    ? kPacks / 2
                                                               : 1;
  static constexpr int kPack = kPackOf<T, kLayout>;
  using Slice = ThreadSlice<T, kLayout>;

  __device__ __forceinline__ static const T* operand(const KernelArgs<T>& args, int number) {
    return number == 0 ? args.x : args.t;
  }

  __device__ __forceinline__ void load(const KernelArgs<T>& args, const Slice& slice) {
    const T* const t = args.t + slice.begin();
    load<Slice::kAsksOnce>(args, slice, args.x + slice.begin(), t);
  }

  template <bool kOnce>
  __device__ __forceinline__ void load(const KernelArgs<T>& args, const Slice& slice,
                                       const T* copies) {
    load<kOnce>(args, slice, copies, copies + kWarpSize * kHeld * kPack);
  }

  template <int kLanes, Anchors kAnchors = Anchors::kAny, Keep kKeep = Keep::kForWrite>
  __device__ __forceinline__ State reduce(const KernelArgs<T>& args) {
    return reduce(args, Lanes<kLanes>{});
  }
  template <class Group>
  __device__ __forceinline__ State reduce(const KernelArgs<T>& args, const Group& group) {
    return {group.sum(TangentFunctions::is_logarithm(args.function)
                          ? sum_of<LogSoftmaxCotangent<T>>()
                          : sum_of<SoftmaxTangent<T>>())};
  }

  template <Totals kTotals = Totals::kCombined, Anchors kAnchors = Anchors::kAny>
  __device__ __forceinline__ void write(const KernelArgs<T>& args, const Slice& slice,
                                        State total) const {
    write_fresh(args, slice, total);
  }

  template <bool kOnce = Slice::kAsksOnce>
  __device__ __forceinline__ void write_fresh(const KernelArgs<T>& args, const Slice& slice,
                                              State total) const {
    const SoftmaxTangent<T> softmax{args.scale, total.sum};
    const LogSoftmaxCotangent<T> log_softmax{args.scale, total.sum};
    if (args.function == Function::kSoftmaxTangent) {
      write_each<kOnce>(args, slice, total, softmax);
    } else {
      write_each<kOnce>(args, slice, total, log_softmax);
    }
  }

 private:
  template <class Result>
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
      for (int i = 0; i < kPack; ++i) {
        const A term = Result::term(y[i], t[i]);
        pack_sum = i == 0 ? term : pack_sum + term;
      }
      sum = p == 0 ? pack_sum : sum + pack_sum;
    }
    return sum;
  }

  template <bool kOnce>
  __device__ __forceinline__ void load(const KernelArgs<T>& args, const Slice& slice, const T* y,
                                       const T* t) {
    const T fill = narrow<T>(TangentFunctions::fill(args));
    slice.template read<kOnce>(args, Slice::operand(args.x, y, fill, y_),
                               Slice::operand(args.t, t, narrow<T>(A(0)), t_));
  }

  template <bool kOnce, class Result>
  __device__ __forceinline__ void write_each(const KernelArgs<T>& args, const Slice& slice,
                                             State total, const Result& result) const {
    const auto pack_of = [&](int p) {
      A y[kPack];
      A t[kPack];
      widen_again(pack_at(y_, p), args.nothing(), y);
      widen_again(pack_at(t_, p), args.nothing(), t);
#pragma unroll
      for (int i = 0; i < kPack; ++i) y[i] = result(y[i], t[i]);
      return narrow<T>(y);
    };
    write_packs<kHeld, kOnce>(args, slice, is_regular(total), Result::left_out(), pack_of);
  }

  RegisterPack<T, kPack> y_[kHeld];
  RegisterPack<T, kPack> t_[kHeld];
};

// The fragment type of kernels for a group of functions.
template <class Functions, class T, int kPacks, RowLayout kLayout,
          Variant kVariant = Variant::kGeneral>
using FragmentOf = std::conditional_t<Functions::kIsLinearInT, TangentFragment<T, kPacks, kLayout>,
                                      ForwardFragment<T, kPacks, kLayout, kVariant>>;

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
