// What the functions are.
#pragma once

#include <cstdint>
#include <limits>

#include "core/numeric.h"
#include "softmax/numerics.cuh"
#include "softmax/row.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

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
  __device__ __forceinline__ RowResult(const KernelArgs<T>&, std::int64_t, bool) {}
  template <bool kCommon = false>
  __device__ __forceinline__ void write(const KernelArgs<T>&, std::int64_t, Total<T>) const {}
};

template <class T>
class RowResult<MaxSum<T>> {
 public:
  using A = Accumulator<T>;

  __device__ __forceinline__ RowResult(const KernelArgs<T>& args, std::int64_t row, bool writes)
      : writes_(writes && args.reduces()), target_(std::numeric_limits<A>::quiet_NaN()) {
    if (!writes_ || args.loss == nullptr) return;
    const std::int64_t label = args.label(row);
    if (label < 0) return;
    const T& target = args.x[args.rows.begin(row) + label * args.rows.inner];
    target_ = widen(target);
  }

  // kCommon: as in Forward.
  template <bool kCommon = false>
  __device__ __forceinline__ void write(const KernelArgs<T>& args, std::int64_t row,
                                        MaxSum<T> total) const {
    if (!writes_) return;
    const Exponents<T> exponents(args.function, args.scale);
    const A lse = Exponents<T>::logarithm(total.sum) +
                  Exponents<T>::logarithm_of_anchor(exponents.base(total.anchor));
    args.row_results.write(row, lse);
    if (!args.row_results.has_parts()) return;
    const Logarithms<T> logarithm(total,
                                  kCommon ? exponents.common_powers(total.anchor, exponents.lift())
                                          : exponents.powers(total.anchor, exponents.lift()));
    // Of any number near the largest element the logarithm makes a pair that is right.
    const A largest = exponents.element(total.anchor);
    const bool regular = is_finite(largest * args.scale);
    args.row_results.write_parts(row, lse, regular, largest, -logarithm(largest));
    if (args.loss == nullptr) return;
    // Of a large number and its logsumexp, which is rounded, the difference would mean nothing.
    args.loss[row] = is_finite(total.anchor) ? -logarithm(target_) : lse - target_ * args.scale;
  }

 private:
  bool writes_;
  A target_;
};

template <class T, class State>
__device__ __forceinline__ void write_row(const KernelArgs<T>& args, std::int64_t row,
                                          State total) {
  RowResult<State>(args, row, true).write(args, row, total);
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
