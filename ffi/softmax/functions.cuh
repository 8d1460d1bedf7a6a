// The functions, for all algorithms: the fill value of elements that do not take part, what an
// element adds to the state of its row, the result of an element given that state, and the result
// of an element that does not take part.
//
// The fill value changes no state, and yields the required result if the state is regular. In a row
// whose state is not regular it may not: there the mask is read again, and elements that do not
// take part get left_out().
#pragma once

#include <cstdint>
#include <limits>

#include "core/numeric.h"
#include "core/ptx/math.cuh"
#include "softmax/numerics.cuh"
#include "softmax/row.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// Passes the type that computes the results of a function as an argument.
template <class R>
struct ResultType {
  using Result = R;
};

// ---- Functions with a maximum and a sum along the row ----

// softmax of the elements of a row, from its state.
template <class T, Exponential kExponential = Exponential::kExact>
struct Softmax {
  using A = Accumulator<T>;
  typename Exponents<T>::Powers power;
  A factor;

  Softmax() = default;
  __device__ __forceinline__ Softmax(MaxSum<T> total, typename Exponents<T>::Powers power)
      : power(power), factor(reciprocal(total.sum)) {}

  __device__ __forceinline__ A operator()(A x) const {
    return power.template of<kExponential>(x) * factor;
  }
  __device__ __forceinline__ static A left_out() { return A(0); }
};

// log_softmax of the elements of a row, from its state. A row whose scaled elements are all -inf
// has the sum 0, and its results are NaN. Where only the scale makes the elements infinite, this
// takes a test: an FMA does not round the product, so that its difference from the infinite anchor
// is infinite and not NaN.
template <class T>
struct LogSoftmax {
  using A = Accumulator<T>;
  typename Exponents<T>::Powers power;
  A logarithm_of_sum;

  LogSoftmax() = default;
  __device__ __forceinline__ LogSoftmax(MaxSum<T> total, typename Exponents<T>::Powers power)
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
  __device__ __forceinline__ static A left_out() { return -infinity<A>(); }
};

// softmax, log_softmax, logsumexp and cross entropy share one reduction. Those with one result per
// row use RowResult for it, below. Gradients that need no reduction use the same fill value.
struct ForwardFunctions {
  template <class T>
  using State = MaxSum<T>;
  static constexpr int kOperands = 1;
  static constexpr bool kIsLinearInT = false;

  // The fill value of x.
  template <class T>
  __device__ __forceinline__ static Accumulator<T> fill(const KernelArgs<T>& args) {
    using A = Accumulator<T>;
    return args.scale < 0 ? infinity<A>() : -infinity<A>();
  }

  // Calls f with the ResultType of the function's results for the elements.
  template <class T, Exponential kExponential = Exponential::kExact, class F>
  __device__ __forceinline__ static void dispatch(Function function, F&& f) {
    if (function == Function::kSoftmax) {
      f(ResultType<Softmax<T, kExponential>>{});
    } else {
      f(ResultType<LogSoftmax<T>>{});
    }
  }
};

// ---- Functions that are linear in t, with one sum along the row ----

template <class T>
struct SoftmaxTangent {
  using A = Accumulator<T>;
  A scale;
  A sum;

  __device__ __forceinline__ static A term(const A& y, const A& t) { return y * t; }
  __device__ __forceinline__ A operator()(A y, A t) const { return scale * (y * (t - sum)); }
  __device__ __forceinline__ static A left_out() { return A(0); }
};

template <class T>
struct LogSoftmaxCotangent {
  using A = Accumulator<T>;
  A scale;
  A sum;

  __device__ __forceinline__ static A term(const A&, const A& t) { return t; }
  __device__ __forceinline__ A operator()(A y, A t) const {
    return scale * (t - exponential_for<T>(y) * sum);
  }
  __device__ __forceinline__ static A left_out() { return A(0); }
};

// The functions that the derivatives of softmax and log_softmax are built from.
struct TangentFunctions {
  template <class T>
  using State = Total<T>;
  static constexpr int kOperands = 2;
  static constexpr bool kIsLinearInT = true;

  __device__ __forceinline__ static bool is_logarithm(Function function) {
    return function == Function::kLogSoftmaxCotangent;
  }

  // The fill value of y; that of t is 0. They give elements that do not take part the result 0.
  template <class T>
  __device__ __forceinline__ static Accumulator<T> fill(const KernelArgs<T>& args) {
    using A = Accumulator<T>;
    return is_logarithm(args.function) ? -infinity<A>() : A(0);
  }

  // What an element adds to the sum.
  template <class A>
  __device__ __forceinline__ static A term(Function function, const A& y, const A& t) {
    return is_logarithm(function) ? LogSoftmaxCotangent<A>::term(y, t)
                                  : SoftmaxTangent<A>::term(y, t);
  }

  template <class T, class F>
  __device__ __forceinline__ static void dispatch(Function function, F&& f) {
    if (function == Function::kSoftmaxTangent) {
      f(ResultType<SoftmaxTangent<T>>{});
    } else {
      f(ResultType<LogSoftmaxCotangent<T>>{});
    }
  }
};

// ---- Gradients that are linear in one number a row ----

// The gradients of logsumexp and cross entropy: from the elements of a row to their results.
template <class T>
class RowGradient {
 public:
  using A = Accumulator<T>;

  RowGradient() = default;
  __device__ __forceinline__ RowGradient(const KernelArgs<T>& args, std::int64_t number)
      : label_(args.label_if_any(number)),
        cotangent_(args.g[number] * args.scale),
        weight_(cotangent_) {
    const A maximum = args.maximum[number];
    // In a row whose logsumexp is infinite, log_sum and the powers give the same results as JAX:
    // inf / inf and 0 / 0 are NaN, and finite elements beside inf weigh 0.
    const A log_sum = args.log_sum[number];
    const A inverse_sum = exponential_for<T>(-log_sum);
    const Exponents<T> exponents(args.function, args.scale);
    regular_ = is_finite(log_sum) && is_finite(cotangent_);
    // p may be a subnormal number, which the lift keeps above the smallest normal one. A larger
    // lift would take digits from the exponents, which p - 1 shows at a label with p near 1.
    const A lift = Exponents<T>::kBaseTwo && is_finite(log_sum) ? A(8) : A(0);
    power_ = exponents.powers(exponents.scaled(maximum), lift);
    if constexpr (Exponents<T>::kBaseTwo) {
      // The power of the maximum is 1, except for the lift and the rounding error of the anchor.
      factor_ = inverse_sum * power_of_two(-power_.exponent(maximum));
    } else {
      factor_ = 1;
      weight_ *= inverse_sum;
    }
  }

  // scale * p * g, the part of the result that all elements have.
  __device__ __forceinline__ A operator()(A x) const { return power_(x) * factor_ * weight_; }
  // The column of the label, or a negative number, and what is subtracted there.
  __device__ __forceinline__ std::int64_t label() const { return label_; }
  __device__ __forceinline__ A cotangent() const { return cotangent_; }

  // Elements that do not take part weigh 0, unless the row's weights are not finite.
  __device__ __forceinline__ bool is_regular() const { return regular_; }
  __device__ __forceinline__ static A left_out() { return A(0); }

 private:
  std::int64_t label_;
  A cotangent_;
  A weight_;
  typename Exponents<T>::Powers power_;
  A factor_;  // kept apart from the weight, which may be a subnormal number
  bool regular_;
};

// ---- Results of rows ----

// The results with one element per row, written by one thread. It is constructed while the loads of
// the row's elements are in flight, so that the loads of the label and of its element overlap with
// them.
template <class State>
class RowResult;

template <class T>
class RowResult<Total<T>> {
 public:
  __device__ __forceinline__ RowResult(const KernelArgs<T>&, std::int64_t, bool) {}
  __device__ __forceinline__ RowResult(const KernelArgs<T>&, std::int64_t, bool, std::int64_t) {}
  template <Anchors kAnchors = Anchors::kAny>
  __device__ __forceinline__ void write(const KernelArgs<T>&, std::int64_t, Total<T>) const {}
};

template <class T>
class RowResult<MaxSum<T>> {
 public:
  using A = Accumulator<T>;

  __device__ __forceinline__ RowResult(const KernelArgs<T>& args, std::int64_t row, bool writes)
      : writes_(writes && args.reduces()), target_(std::numeric_limits<A>::quiet_NaN()) {
    if (!writes_ || args.function != Function::kCrossEntropy) return;
    const std::int64_t label = args.label(row);
    if (label < 0) return;
    const T& target = args.x[args.rows.begin(row) + label * args.rows.inner];
    target_ = widen(target);
  }
  // The same for a row whose beginning in x is known: finding it takes a division.
  __device__ __forceinline__ RowResult(const KernelArgs<T>& args, std::int64_t row, bool writes,
                                       std::int64_t begin)
      : writes_(writes && args.reduces()), target_(std::numeric_limits<A>::quiet_NaN()) {
    if (!writes_ || args.function != Function::kCrossEntropy) return;
    const std::int64_t label = args.label(row);
    if (label >= 0) target_ = widen(args.x[begin + label * args.rows.inner]);
  }

  template <Anchors kAnchors = Anchors::kAny>
  __device__ __forceinline__ void write(const KernelArgs<T>& args, std::int64_t row,
                                        MaxSum<T> total) const {
    if (!writes_) return;
    const Exponents<T> exponents(args.function, args.scale);
    const A lse = Exponents<T>::logarithm(total.sum) +
                  Exponents<T>::logarithm_of_anchor(exponents.base(total.anchor));
    args.row_results.write(row, lse);
    if (!args.row_results.has_parts()) return;
    const LogSoftmax<T> logarithm(total, exponents.template powers_of_row<kAnchors>(total.anchor));
    // Any number near the largest element makes a correct pair with its negative logarithm.
    const A largest = exponents.element(total.anchor);
    const bool regular = is_finite(largest * args.scale);
    args.row_results.write_parts(row, lse, regular, largest, -logarithm(largest));
    if (args.function != Function::kCrossEntropy) return;
    // The difference of a large number and its rounded logsumexp would have no correct digits.
    args.loss[row] = is_finite(total.anchor) ? -logarithm(target_) : lse - target_ * args.scale;
  }

 private:
  bool writes_;
  A target_;
};

// Writes the results of the rows number, number + hop ... that begin at x[begin], x[begin + hop]
// ... All groups of threads have their states, and share the rows: one thread would wait for the
// label and the element of each in turn.
template <class T, class State, int kRows, class Exists>
__device__ __forceinline__ void write_rows(const KernelArgs<T>& args, std::int64_t number,
                                           std::int64_t begin, int hop,
                                           const State (&states)[kRows], int group, int groups,
                                           Exists&& exists) {
#pragma unroll 1
  for (int i = group; i < kRows; i += groups) {
    if (!exists(i)) continue;
    State state = states[0];
#pragma unroll
    for (int k = 1; k < kRows; ++k) {
      if (k == i) state = states[k];
    }
    const std::int64_t row = number + i * hop;
    RowResult<State>(args, row, true, begin + i * hop).write(args, row, state);
  }
}

// The same for states in shared memory. It is not inlined, so that its registers are not at the
// expense of softmax in `strip`. States in registers would have to be stored for the call, which
// made cross entropy of small arrays by `column` take a third more time.
template <class T, class State>
__device__ __noinline__ void write_rows(const KernelArgs<T>& args, std::int64_t number,
                                        std::int64_t begin, int hop, const State* states, int rows,
                                        int group, int groups) {
  for (int i = group; i < rows; i += groups) {
    const std::int64_t row = number + i * hop;
    RowResult<State>(args, row, true, begin + i * hop).write(args, row, states[i]);
  }
}

template <class T, class State>
__device__ __forceinline__ void write_row(const KernelArgs<T>& args, std::int64_t row,
                                          State total) {
  RowResult<State>(args, row, true).write(args, row, total);
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
